"""What a loop holds that is written around Accelerate or Fabric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from gradsentinel.bus import Handle
from gradsentinel.decision import Action
from gradsentinel.errors import ConfigurationError
from gradsentinel.events import Event
from gradsentinel.incident import Incident
from gradsentinel.integrations.engine import Engine
from gradsentinel.integrations.loaders import draw_through
from gradsentinel.integrations.wraps import Wraps

if TYPE_CHECKING:
    from typing_extensions import Self

B = TypeVar("B")
E = TypeVar("E", bound=Event)


class LoopSentinel:
    """Watches a loop that calls its framework for backward, clipping and steps, as it did without us.

    `steps(loader)` is optional: it shows the micro-batches, which replay, Retry and the list of batches to
    leave out need. A DataLoader is drawn through a sampler that knows the indices of its records, until
    `close()`.
    """

    def __init__(self, engine: Engine, wraps: Wraps) -> None:
        self._engine = engine
        self._wraps = wraps
        self._in_steps = False

    def steps(self, loader: Iterable[B]) -> Iterator[B]:
        """Yield the loader's batches, remembering each until its step is done."""
        if not isinstance(loader, Iterable):
            raise ConfigurationError(f"{type(loader).__name__} cannot be iterated over")
        self._engine.run.course.refuse(loader)
        draw_through(loader, self._wraps)
        return self._steps(loader)

    def _steps(self, loader: Iterable[B]) -> Iterator[B]:
        run = self._engine.run
        if self._in_steps:
            raise ConfigurationError(
                "steps() inside steps(): iterate over validation data without the sentinel"
            )
        self._in_steps = True
        try:
            for index, batch, _ in run.course.batches(run, loader):
                self._engine.take(batch)
                run.data["batch"] = index + 1
                run.data["batches"] += 1
                yield batch
                self._engine.finish()  # before the next batch is drawn, which a rollback may have changed
        finally:
            self._in_steps = False

    def on(
        self, event: type[E], function: Callable[[E], Any], *, every: int = 1, once: bool = False
    ) -> Handle:
        """Call a plain function for an event, as `Sentinel.on` does."""
        return self._engine.watch.bus.on(event, function, every=every, once=once)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """The incidents of this run so far, oldest first."""
        return tuple(self._engine.run.incidents)

    @property
    def applied(self) -> bool:
        """True if the last step changed the weights; guard your own per-step work (an EMA) with it."""
        return self._engine.applied

    @property
    def last_action(self) -> Action:
        """What was done about the last step."""
        decision = self._engine.latest
        return Action.CONTINUE if decision is None else decision.action

    @property
    def step_count(self) -> int:
        """Number of the step in flight, from 0; goes back on a rollback."""
        return self._engine.run.step

    @property
    def run_dir(self) -> Path:
        """Where events and incidents are written."""
        return self._engine.run.directory.path

    def check_state(self) -> None:
        """Look at the whole state before you write a checkpoint of it by yourself; called on every rank.

        Raises:
            TrainingAborted: if it is bad and there is nothing to go back to.
        """
        self._engine.check_state()

    def state_dict(self) -> dict[str, Any]:
        """Return step counters and what the callbacks must remember, for the loop's own checkpoint."""
        return self._engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned; callbacks that are not there any more are left out."""
        self._engine.load_state_dict(state)

    def close(self) -> None:
        """End the run and take everything off again; a second call does nothing."""
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        try:
            self._engine.close(error)
        finally:
            self._wraps.undo()
