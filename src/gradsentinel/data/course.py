"""The course of a run through its data: which batches come, in which order, and the way back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradsentinel.data.epoch import EpochStart, begin_again, go_on, tell_epoch, told_epoch
from gradsentinel.data.sampler import sampler_of
from gradsentinel.errors import ConfigurationError

if TYPE_CHECKING:
    from gradsentinel.run import Run
    from gradsentinel.state.snapshot import Snapshot

logger = logging.getLogger("gradsentinel")

Drawn = tuple[int, Any, "int | None"]
"""A batch's number in its epoch, the batch, and the length of its loader if that is known."""


@dataclass(slots=True)
class Stretch:
    """The batches that one call of `Sentinel.steps` draws."""

    loader: Iterable[Any]
    start: EpochStart | None = None
    """How its loader began; None until it is its turn."""
    epoch: int = 0
    first: int = 0
    """Number in the epoch of its first batch: behind those that an earlier process has drawn."""
    batches: int = 0
    """So many were drawn before it, over all epochs."""
    end: int | None = None
    """The loop left it before this batch of the epoch; None if it went to the loader's end, or still goes."""
    reached: int = 0
    """The loop had got so far when the run went back."""
    told: int | None = None
    """The epoch that its sampler had been told when `steps` was called."""


class Course:
    """What `Sentinel.steps` draws, call after call, and how to get to an earlier place of it again.

    Going back leads through the same batches in the same order, of earlier calls, too: within one call of
    `steps` come the rest of the epoch that the run went back into, what came after it, and the epoch that
    the loop is in. The position in the data says which one it is.
    """

    def __init__(self) -> None:
        self.by_steps = False
        """True in a loop that can draw its data with `Sentinel.steps`; set by the facade."""
        self.can_go_back = False
        """True if somebody may want to: then the calls are remembered, and loaders that give their batches
        only once are refused."""
        self.saved: Mapping[str, Any] | None = None
        """The start of the epoch that an earlier process was in, until the data is positioned there."""
        self._stretches: list[Stretch] = []
        self._now = -1
        self._complained = False
        self._back: Callable[[Stretch], Iterator[Any]] | None = None
        """Opens the data where the run went back to, until that is done."""

    @property
    def start(self) -> EpochStart | None:
        """How the epoch in flight began; None where nobody draws with `steps`."""
        return self._stretches[self._now].start if self._stretches else None

    def require(self, who: str) -> None:
        """Hear that somebody may want to go back; raises ConfigurationError where that is impossible."""
        if not self.by_steps:
            raise ConfigurationError(
                f"{who} has to draw the data itself, and here the framework does: use data='go_on', or a "
                "plain loop with Sentinel.steps()"
            )
        self.can_go_back = True

    def refuse(self, loader: Iterable[Any] | None) -> None:
        """Raise ConfigurationError if the run could not go back in this data; None: it is not drawn here."""
        if not self.can_go_back:
            return
        wish = "a rollback with data='replay' goes back in the data"
        if loader is None:
            raise ConfigurationError(
                f"{wish}, so the loop has to draw it with `for batch in sentinel.steps(loader)`; "
                "or use data='go_on'"
            )
        for part in (loader, getattr(loader, "dataset", None)):
            if isinstance(part, Iterator) and not hasattr(loader, "load_state_dict"):
                raise ConfigurationError(
                    f"{wish}, and a {type(part).__name__} gives its batches only once: give steps() a list "
                    "or a DataLoader, or use data='go_on'"
                )

    def batches(
        self, run: Run, loader: Iterable[Any], at_end: Callable[[], None] = lambda: None
    ) -> Iterator[Drawn]:
        """Yield what one call of `steps` draws; the caller counts what it takes in `run.data`.

        `at_end` is called at the end of each epoch whose length is known.
        """
        self._append(run, loader)
        while self._now < len(self._stretches):
            stretch = self._stretches[self._now]
            length: int | None = None
            with suppress(TypeError, NotImplementedError):  # a DataLoader of an IterableDataset has none
                length = len(stretch.loader)  # type: ignore[arg-type]
            left = True
            try:
                yield from self._of(stretch, run, length, at_end)
                left = False
            finally:
                if left:
                    self._leave(stretch, run)
            if self._back is None:
                self._now += 1
        self._now = len(self._stretches) - 1

    def _of(
        self, stretch: Stretch, run: Run, length: int | None, at_end: Callable[[], None]
    ) -> Iterator[Drawn]:
        """Yield the batches of one stretch until its end, or until the run goes back."""
        again = stretch.start is not None
        drawn = enumerate(self._open(stretch, run), run.data["batch"])
        for number, batch in run.skipped.without(drawn, run, sampler_of(stretch.loader)):
            if stretch.end is not None and number >= stretch.end:
                break
            if again and run.skipped and run.skipped.expects(run.data["epoch"], number):
                self._complain(number, run)
            yield number, batch, None if length is None else _without_the_last(length, run)
            if self._back is not None:
                return
            if stretch.end is not None and number + 1 >= stretch.end:
                break
        if stretch.end is None:
            if length is not None:
                at_end()
            if self._back is not None:
                return
            run.data["epoch"] += 1
            run.data["batch"] = 0

    def _complain(self, number: int, run: Run) -> None:
        """Say once that the way back does not lead through the same batches."""
        if not self._complained and not run.consensus.rank:
            logger.warning(
                "the loader gives other batches than before (batch %d of epoch %d): what is on the list of "
                "skipped batches may come at another place",
                number,
                run.data["epoch"],
            )
        self._complained = True

    def _leave(self, stretch: Stretch, run: Run) -> None:
        """Hear that the loop ends in the middle of a stretch; the next call goes on behind it."""
        last = self._stretches[-1]
        if last.start is None:  # the loop has not got to its own data, but was still on the way back
            self._stretches.pop()
        elif stretch is last:
            stretch.end = run.data["batch"] if self._back is None else stretch.reached
            return
        if self._back is None and stretch.start is not None:
            saved, place = stretch.start.state(), run.data["batch"]
            self._back = lambda one: go_on(one.loader, saved, place, (run.host.device.type,))

    def state(self, run: Run, *, before_step: bool) -> dict[str, Any]:
        """Return how to get to the present place again in a later process; {} without `steps`.

        `before_step` means that the next batch has been drawn already.
        """
        if self.start is None:
            return {}
        at_start = before_step and run.data["batch"] == self._stretches[self._now].first
        return self.start.state(at_start=at_start)

    def go_back_to(self, snapshot: Snapshot, run: Run) -> None:
        """Draw the batches from this snapshot's place on again, from the next batch on.

        Called on: every rank. The snapshot is one that this process took.
        """
        if self._now < 0:
            return
        self._stretches[self._now].reached = run.data["batch"]
        place = snapshot.data["batches"]
        begun = [number for number, one in enumerate(self._stretches) if one.start is not None]
        self._now = max((n for n in begun if self._stretches[n].batches <= place), default=begun[0])
        stretch = self._stretches[self._now]
        if stretch.batches >= place:
            self._back = lambda one: self._again(one, run)
            run.data.update(epoch=stretch.epoch, batch=stretch.first, batches=stretch.batches)
        else:
            devices = (run.host.device.type,)
            self._back = lambda one: go_on(one.loader, snapshot.epoch, snapshot.data["batch"], devices)
            run.data.update(snapshot.data)

    def forget_before(self, snapshot: Snapshot) -> None:
        """Hear that the run will not go back to before this snapshot."""
        place = snapshot.data["batches"]
        while self._now > 0 and self._stretches[1].start is not None and self._stretches[1].batches <= place:
            del self._stretches[0]
            self._now -= 1

    def forget(self) -> None:
        """Hear that the data is elsewhere now: nothing that was drawn is to be drawn again."""
        self._stretches.clear()
        self._now, self._back = -1, None

    def _append(self, run: Run, loader: Iterable[Any]) -> None:
        if not self.can_go_back:
            self.forget()
        stretch = Stretch(loader, told=told_epoch(loader))
        if self.saved is not None:
            saved, self.saved = self.saved, None
            stretch.start = EpochStart.of(loader, saved)
            stretch.epoch, stretch.first = run.data["epoch"], run.data["batch"]
            stretch.batches = run.data["batches"]
            self._back = lambda one: go_on(one.loader, saved, one.first, (run.host.device.type,))
        self._stretches.append(stretch)
        if self._back is None or len(self._stretches) == 1:
            self._now = len(self._stretches) - 1

    def _open(self, stretch: Stretch, run: Run) -> Iterator[Any]:
        """Position the data, and return what comes from there on."""
        back, self._back = self._back, None
        if back is not None:
            return back(stretch)
        if stretch.start is not None:
            run.data.update(epoch=stretch.epoch, batch=stretch.first, batches=stretch.batches)
            return self._again(stretch, run)
        run.data["batch"] = 0
        tell_epoch(stretch.loader, stretch.told)  # on the way here it may have been told others
        stretch.epoch, stretch.batches = run.data["epoch"], run.data["batches"]
        stretch.start = EpochStart(
            stretch.loader, (run.host.device.type,), whole=self.can_go_back or len(self._stretches) == 1
        )
        return iter(stretch.loader)

    @staticmethod
    def _again(stretch: Stretch, run: Run) -> Iterator[Any]:
        assert stretch.start is not None
        return begin_again(stretch.loader, stretch.start, stretch.first, (run.host.device.type,))


def _without_the_last(length: int, run: Run) -> int:
    """Return how many batches the epoch has as far as the last one that is not going to be left out.

    With accumulation the last window is a short one, and is to be stepped with it.
    """
    if run.skipped:
        while length and run.skipped.was_drawn_at(run.data["epoch"], length - 1):
            length -= 1
    return length
