"""The facade that a plain training loop holds."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import Self

from gradsentinel.assembly import default_examiners, ema_updater, make_run, with_defaults
from gradsentinel.attach import Attachment
from gradsentinel.bus import Handle
from gradsentinel.callback import Callback
from gradsentinel.decision import Action
from gradsentinel.errors import ConfigurationError
from gradsentinel.events import Event
from gradsentinel.host import Forward, TorchHost
from gradsentinel.incident import Incident
from gradsentinel.watch import Verdict, Watch

logger = logging.getLogger("gradsentinel")

B = TypeVar("B")
E = TypeVar("E", bound=Event)


class Sentinel:
    """Watches a plain PyTorch loop: no bad update reaches the weights, and the run goes on.

    Make it when the model is on its device and its checkpoint is loaded; it reads the initial state.

    Args:
        model: the module, several, or a mapping from name to module. torch.compile and DDP wrappers
            are looked through for names.
        optimizer: one optimizer or several; none that needs a closure.
        callbacks: what to watch for and what to do, in any order. Without a `Skip` one with default
            budgets is added, without an `EventLog` likewise.
        run_dir: where events and incidents are written. None: `gradsentinel-runs/<time>`, made only
            when there is an incident to keep.
        scheduler: LR scheduler(s), stepped after each step that is not dropped.
        scaler: a torch.amp.GradScaler; `backward` scales, `step` unscales and updates it.
        forward: `forward(model, batch) -> loss`, with which a step can be computed again.
        ema: an average of the weights (AveragedModel, or an object with update(model) or update());
            updated after each applied step, and part of snapshots if it has a state_dict.
        extra: further objects with state_dict and load_state_dict that belong to the training state.

    Raises:
        ConfigurationError: for anything that cannot work, at construction.
        TrainingAborted: if a detector finds the initial state unusable.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        callbacks: Sequence[Callback] = (),
        run_dir: str | os.PathLike[str] | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        forward: Forward | None = None,
        ema: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        state = dict(extra or {})
        if ema is not None and hasattr(ema, "state_dict"):
            state["ema"] = ema
        self.host = TorchHost(model, optimizer, scheduler=scheduler, scaler=scaler, extra=state)
        self.model = model
        self.forward = forward
        self._update_ema = ema_updater(ema, model)
        self._watch = Watch(
            make_run(self.host, run_dir), with_defaults(callbacks), examiners=default_examiners()
        )
        self._window = 1
        self._in_window = 0
        self._stepped = False
        self._last_of_loader = False
        self._in_steps = False
        self._saw_backward = False
        self._told: set[str] = set()
        self._applied = 0
        self._verdict: Verdict | None = None
        self._closed = False
        self._untouched: list[tuple[Tensor, int]] | None = self._versions()
        self._watch.start()
        self._watch.prepare()

    # -- the loop ------------------------------------------------------------------------------------

    def steps(self, loader: Iterable[B], *, accumulate: int = 1) -> Iterator[B]:
        """Yield the loader's batches, remembering each until its step is done.

        With `accumulate=k` each batch is one of k micro-batches of a step: `backward` divides the
        loss by k, and `step` does its work on every k-th batch and on the last one of a loader whose
        length is known; on the others it returns None. An unfinished window of a loader of unknown
        length is carried over to the next call.
        """
        if accumulate < 1:
            raise ConfigurationError(f"accumulate={accumulate} must be at least 1")
        if not isinstance(loader, Iterable):
            raise ConfigurationError(f"{type(loader).__name__} cannot be iterated over")
        return self._steps(loader, accumulate)

    def _steps(self, loader: Iterable[B], accumulate: int) -> Iterator[B]:
        run = self._watch.run
        total = len(loader) if isinstance(loader, Sized) else None
        self._window = accumulate
        self._in_steps = True
        run.data["batch"] = 0
        try:
            for index, batch in enumerate(loader):
                if self._stepped:
                    self._in_window, self._stepped = 0, False
                if self._in_window == 0:
                    self._watch.prepare()
                    self._watch.begin_step()
                    left = accumulate if total is None else total - index
                    self._watch.expected_microbatches = min(accumulate, left)
                self._watch.batch(batch)
                self._in_window += 1
                self._last_of_loader = index + 1 == total
                run.data["batch"] = index + 1
                run.data["batches"] += 1
                yield batch
            run.data["epoch"] += 1
            run.data["batch"] = 0
        finally:
            self._in_steps = False
            self._last_of_loader = False

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run `loss.backward()`, scaled for accumulation and by the GradScaler, and look at the loss.

        Args:
            loss: 0-dim or one element, as computed: neither divided nor scaled.
            kwargs: passed to `Tensor.backward` (retain_graph and the like).
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigurationError(
                f"backward needs a scalar loss, got {shape}; reduce it, as with loss.mean()"
            )
        if not loss.requires_grad:
            raise ConfigurationError(
                "the loss needs no gradient: was it detached, or computed under no_grad?"
            )
        self._freshen()
        scaled = loss / self._window if self._in_steps and self._window > 1 else loss
        if self.host.scaler is not None:
            scaled = self.host.scaler.scale(scaled)
        scaled.backward(**kwargs)  # type: ignore[no-untyped-call]
        self._saw_backward = True
        self._watch.after_backward(
            loss,
            self.host.gradients(),
            scaled=self.host.scaler is not None,
            microbatch=self._in_window - 1 if self._in_steps else None,
        )

    def step(
        self,
        max_norm: float | None = None,
        *,
        norm_type: float = 2.0,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ) -> Tensor | None:
        """Check, agree, clip, step the optimizer and scheduler, clear the gradients; recover if need be.

        Args:
            max_norm: clip the global gradient norm to this; None does not clip.
            norm_type: order of the norm that is clipped.
            optimizer: step only these (of several), as a GAN does; None steps all.

        Returns:
            The gradient norm before clipping, 0-dim: what `clip_grad_norm_` returns. None in the
            middle of an accumulation window.

        Raises:
            TrainingAborted: when the run must not go on.
        """
        if self._closed:
            raise RuntimeError("this Sentinel is closed")
        if self._in_steps and self._in_window < self._window and not self._last_of_loader:
            return None
        self._freshen()
        self._tell_if_blind()
        host, watch = self.host, self._watch
        optimizers = self._choose(optimizer)
        scale, overflow = host.unscale(optimizers)
        view = host.gradients(optimizers, norm_type=norm_type)
        verdict = watch.before_clip(view, optimizers=optimizers, loss_scale=scale, overflow=overflow)
        norm = view.total_norm
        if verdict.apply:
            if verdict.recomputed:
                view = host.gradients(optimizers, norm_type=norm_type)
            if max_norm is not None:
                view.clip_(max_norm, total_norm=verdict.safe_norm)
            host.apply(optimizers)
        host.finish(optimizers, advance=verdict.apply)
        self._verdict = verdict
        if self.applied:
            self._applied += 1
            self._update_ema()
        self._stepped = True
        self._saw_backward = False
        late = watch.after_step(verdict, learning_rates=host.learning_rates(), clipped=max_norm is not None)
        if late > Action.WARN:  # the step was made, found bad, and undone
            self._verdict = replace(verdict, apply=False, action=late)
        if not self._in_steps:
            watch.prepare()
        elif len(optimizers) < len(host.optimizers):  # another one's turn may come, on the same batches
            watch.prepare(same_batches=True)
        return norm

    def attached(self) -> Attachment:
        """Watch a loop that cannot be edited, through the optimizers' official hooks: a context manager.

        Says at attach what cannot be seen from there: the loss, micro-batches and the LR scheduler.
        """
        return Attachment(self.host, self._watch)

    # -- callbacks and results -----------------------------------------------------------------------

    def on(
        self, event: type[E], function: Callable[[E], Any], *, every: int = 1, once: bool = False
    ) -> Handle:
        """Call a plain function for an event; the handle's `remove()` takes it off again.

        Args:
            event: an event class, such as `BeforeClip`.
            function: takes the event; may return findings, like a detector.
            every: only on steps divisible by this.
            once: only the first time.
        """
        return self._watch.bus.on(event, function, every=every, once=once)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """The incidents of this run so far, oldest first."""
        return tuple(self._watch.run.incidents)

    @property
    def applied(self) -> bool:
        """True if the last `step` changed the weights; guard your own per-step work (an EMA) with it."""
        return self._verdict is not None and self._verdict.apply and not self._verdict.scaler_skips

    @property
    def last_action(self) -> Action:
        """What was done about the last step."""
        return Action.CONTINUE if self._verdict is None else self._verdict.action

    @property
    def step_count(self) -> int:
        """Number of the step in flight, from 0; goes back on a rollback."""
        return self._watch.run.step

    @property
    def applied_steps(self) -> int:
        """How many steps changed the weights, over the whole run."""
        return self._applied

    def state_dict(self) -> dict[str, Any]:
        """Return step counters and what the callbacks must remember, for the loop's own checkpoint."""
        run, bus = self._watch.run, self._watch.bus
        return {
            "step": run.step,
            "iteration": run.iteration,
            "data": dict(run.data),
            "callbacks": {bus.name_of(callback): callback.state_dict() for callback in bus.callbacks},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned; callbacks that are not there any more are left out."""
        run, bus = self._watch.run, self._watch.bus
        run.step, run.iteration, run.data = state["step"], state["iteration"], dict(state["data"])
        for callback in bus.callbacks:
            name = bus.name_of(callback)
            if name in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][name])

    def restore(self, path: str | os.PathLike[str] | None = None) -> int:
        """Put the training state back to one that an aborted run left on disk, and return its step.

        Args:
            path: the snapshot's directory; None takes the newest of this run directory.

        Raises:
            ArchiveError: if there is none, or it is damaged.
            SnapshotMismatch: if it does not fit the model or optimizer; nothing was changed then.
        """
        run = self._watch.run
        run.restore(run.load_snapshot(path))
        self._watch.prepare()
        return run.step

    @property
    def run_dir(self) -> Path:
        """Where events and incidents are written."""
        return self._watch.run.directory.path

    def close(self) -> None:
        """End the run: settle what is left, emit the last event; a second call does nothing."""
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._closed = True
        self._watch.close(error)

    # -- small things --------------------------------------------------------------------------------

    def _choose(self, optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
        if optimizer is None:
            return self.host.optimizers
        chosen = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
        for one in chosen:
            if all(one is not known for known in self.host.optimizers):
                raise ConfigurationError(
                    "step(optimizer=...) takes optimizers that were given at construction"
                )
        return chosen

    def _versions(self) -> list[tuple[Tensor, int]]:
        """Return how often each parameter was written to; lazy ones get their values in the forward pass."""
        named = self.host.named_parameters()
        return [(parameter, parameter._version) for _, parameter in named if not is_lazy(parameter)]

    def _freshen(self) -> None:
        """Take the initial state again if a checkpoint was loaded between construction and first use."""
        if self._untouched is None:
            return
        loaded = any(parameter._version != version for parameter, version in self._untouched)
        if loaded and not self._in_steps:
            self._watch.prepare()
        self._untouched = None

    def _tell_if_blind(self) -> None:
        if not self._saw_backward:
            self._tell(
                "step() without sentinel.backward(loss): the loss and the micro-batches are not seen, "
                "so a NaN loss whose gradients are zero is missed; "
                "call sentinel.backward(loss) instead of loss.backward()"
            )

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning(text)
