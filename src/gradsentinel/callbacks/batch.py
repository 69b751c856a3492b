"""Bad data: found when it enters the model, and named by record."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from gradsentinel import events
from gradsentinel.callbacks.batch_evidence import (
    evidence_of,
    facts_of_failure,
    fault_beyond,
    faults_of,
)
from gradsentinel.callbacks.batch_fields import Reader, checked_ranges, is_empty, tables_of
from gradsentinel.callbacks.batch_gross import Beyond, Gross
from gradsentinel.callbacks.batch_habits import Habits, Oddity
from gradsentinel.callbacks.batch_heard import Heard, faults_heard
from gradsentinel.callbacks.batch_look import (
    Look,
    either,
    flag_on,
    told_of,
    warning,
    was_fine,
    where_bad,
)
from gradsentinel.callbacks.batch_meter import Meter
from gradsentinel.callbacks.batch_reading import BEYOND, EMPTY, NONFINITE, OUT_OF_RANGE, UNSELECTED, Reading
from gradsentinel.callbacks.batch_share import Share, SharesCompared
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError, TrainingAborted
from gradsentinel.evidence import Evidence, Finding
from gradsentinel.measures.mailbox import Letter, Mailbox
from gradsentinel.run import Run

logger = logging.getLogger("gradsentinel")

_HARMLESS = "loss and gradients are finite all the same, and the step was made"
_ON_PURPOSE = "; if it is meant so, name the field in allow_nonfinite="


@dataclass(kw_only=True)
class BatchCallback(SharesCompared):
    """Looks at each micro-batch before the model does, and drops the step that bad data spoils.

    Wrong by itself: NaN and Inf, ids beyond the tables of the model, numbers outside of `ranges`, labels all
    ignored, records masked from end to end, an empty batch. The step is dropped if its loss or gradients are
    not finite then (for ids and ranges, always); else it is told once, for the model copes with it. Unusual,
    and only told: values far above what was usual, a mean that has moved, a field that has become constant,
    the same batch again, records that are copies of each other, and with several ranks a rank that sees far
    less or more than the others. Needs `sentinel.steps()`. Called on: every rank.
    """

    action: Action | str = Action.SKIP
    """The cheapest recovery to try when bad data spoils a step: skip, retry, rollback, abort, or warn."""
    ranges: Mapping[str, tuple[int, int]] | None = None
    """Lawful integers by field, from the first number to below the second: `{"input_ids": (0, 50257)}`. In
    fields of labels `ignore_index` is lawful too. A field is named as in the batch; by its path if nested."""
    ignore_index: int = -100
    """The label that the loss leaves out."""
    allow_nonfinite: Collection[str] = ()
    """Paths of fields that hold NaN or Inf on purpose, for missing values."""
    statistics_every: int = 1
    """Compare every so many micro-batches with those before; 0: never."""
    warmup: int = 20
    """So many micro-batches are looked at before any is called unusual."""
    limit: float = 8.0
    """Standard deviations above which a size or a mean is unusual; a size also has to be eightfold."""
    drop_beyond: float | None = 100.0
    """Values so many times beyond the bound of what is unusual drop the step before it is made, at most 3 in
    1000: what comes more often is how the data is. None: they are only told."""
    compare_every: int = 100
    """Compare what the ranks see after every so many steps; 0: never."""
    lookups: bool = True
    """Hear what the model looks up, and keep a number from a table that has it not; False: nothing is heard,
    for a program that handles the IndexError itself."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _reader: Reader = field(init=False, repr=False)
    _meter: Meter = field(init=False, repr=False)
    _habits: Habits = field(init=False, repr=False)
    _gross: Gross = field(init=False, repr=False)
    _mailboxes: dict[torch.device, Mailbox] = field(default_factory=dict, init=False, repr=False)
    _looks: list[Look] = field(default_factory=list, init=False, repr=False)
    """The micro-batches of the step in flight."""
    _waiting: deque[Look] = field(default_factory=deque, init=False, repr=False)
    """Micro-batches whose numbers are to be judged when it is known how their step went."""
    _told: set[tuple[str, str]] = field(default_factory=set, init=False, repr=False)
    """What the model copes with: fault and field."""
    _allowed: frozenset[str] = field(default=frozenset(), init=False, repr=False)
    _number: int = field(default=0, init=False, repr=False)
    _in_flight: bool = field(default=False, init=False, repr=False)
    _share: Share = field(default_factory=Share, init=False, repr=False)
    _heard: Heard | None = field(default=None, init=False, repr=False)
    """None before the run, and where nothing is to be heard."""

    def __post_init__(self) -> None:
        self.action = Action.parse(self.action)
        if self.action is Action.CONTINUE:
            raise ConfigurationError(
                "action='continue' would do nothing; leave the callback out, or use warn"
            )
        if isinstance(self.allow_nonfinite, str):
            raise ConfigurationError("allow_nonfinite is a list of fields, not one string")
        ranges = self.ranges = checked_ranges(self.ranges or {})
        self.allow_nonfinite = tuple(self.allow_nonfinite)
        if self.statistics_every < 0 or self.compare_every < 0:
            raise ConfigurationError("statistics_every and compare_every are 1 or more, or 0 for never")
        if self.warmup < 3:
            raise ConfigurationError(f"warmup={self.warmup}: of fewer than 3 batches nothing is usual")
        if not self.limit > 0:
            raise ConfigurationError(f"limit={self.limit} must be above 0")
        if self.drop_beyond is not None and not self.drop_beyond > 1:
            raise ConfigurationError(f"drop_beyond={self.drop_beyond} is a factor above 1, or None for never")
        self._allowed = frozenset(self.allow_nonfinite)
        self._reader = Reader(ranges, {})
        self._meter = Meter(self.ignore_index)
        self._habits = Habits(warmup=self.warmup, limit=self.limit)
        times = self.drop_beyond if self.statistics_every else None
        self._gross = Gross(warmup=self.warmup, limit=self.limit, times=times)

    def norm_bound(self) -> float:
        """Return infinity: before the clip a finite norm passes."""
        return math.inf

    def calm(self, step: int, norm: float, losses: Sequence[float]) -> bool:
        """Return True unless a batch is far beyond the others; the rest it says of what is not finite."""
        for look in self._looks:
            for reading, _, letter in look.letters:
                if not letter.arrived() or (reading.plan.sizes and self._beyond(look)):
                    return False
        return True

    def on_run_start(self, event: events.RunStart) -> None:
        """See what the model can look up."""
        self._run = event.run
        self._reader = Reader(self.ranges or {}, tables_of(event.run.host.modules()))
        self._share.several = event.run.consensus.world_size > 1
        self._heard = Heard(event.run, Action.parse(self.action)) if self.lookups else None

    # -- in the step: nothing waits --------------------------------------------------------------------

    def on_batch(self, event: events.Batch) -> Sequence[Finding]:
        """Measure the batch; report numbers outside of given ranges, and of tables when it is looked up."""
        if event.microbatch == 0:
            self._looks = []
        self._in_flight = True
        fields = self._reader.read(event.batch)
        look = Look(event.step, event.microbatch, event.batch, empty=is_empty(event.batch, fields))
        if self._run is not None and self._run.scene.microbatches:
            look.drawn = self._run.scene.microbatches[-1]
        self._looks.append(look)
        self._waiting.append(look)
        self._reader.tell_unused(fields)
        if self._share.several:
            self._share.count(event.batch, fields, self.ignore_index)
        if look.empty or not fields:
            return ()
        due = bool(self.statistics_every) and self._number % self.statistics_every == 0
        self._number += 1
        outside: list[Tensor] = []
        for reading in self._meter.measure(fields, allowed=self._allowed, statistics=due):
            look.letters.append((reading, *self._post(reading)))
            outside += reading.outside
        found = [] if self._heard is None else self._heard.listen(look, fields, outside, self._reader)
        if outside:
            confirm = self._confirming([look], only=OUT_OF_RANGE)
            flags = [flag for flag in map(self._here, outside) if flag is not None]
            found += [self._finding(flag, confirm, look.microbatch) for flag in flags]
        return found

    def on_after_backward(self, event: events.AfterBackward) -> list[Finding]:
        """Report the batch if it is far beyond the others, or if it is bad and the loss is not finite."""
        look = next((look for look in self._looks if look.microbatch == event.microbatch), None)
        if look is None:
            return []
        look.judged = True
        found = self._far_out(look)
        if event.loss is not None and (bad := look.spoils(self._device)) is not None:
            spoilt = where_bad(bad, event.loss)
            found.append(self._finding(spoilt, self._confirming([look]), look.microbatch))
        return found

    def on_before_clip(self, event: events.BeforeClip) -> list[Finding]:
        """Report the batches if something is wrong with one and the gradients are not finite."""
        found: list[Finding] = []
        if self._run is not None and self._run.consensus.world_size == 1:  # several ask before, if at all
            found = [one for look in self._looks if not look.judged for one in self._far_out(look)]
        if event.loss_scale is not None:  # the scaler drops such a step itself
            return found
        looks = [look for look in self._looks if look.spoils(self._device) is not None]
        bad = reduce(either, (look.bad for look in looks), None)
        if bad is not None:
            spoilt = where_bad(bad, event.gradients.total_norm)
            found.append(self._finding(spoilt, self._confirming(looks), None))
        return found

    def _far_out(self, look: Look) -> list[Finding]:
        """Return a finding about values far beyond the usual ones; on the device if they are not here yet."""
        iteration = 0 if self._run is None else self._run.iteration
        if not look.arrived():
            shares = [self._gross.share(reading, iteration) for reading, _, _ in look.letters]
            there = [self._here(share) for share in shares if share is not None]
            values = [share for share in there if share is not None]
        else:
            values = [torch.tensor(2.0)] if self._beyond(look) else []
        return [
            Finding(
                kind=Kind.NONFINITE_INPUT,
                value=value,
                limit=1.0,
                action=Action.parse(self.action),
                confirm=lambda: self._confirm_beyond(look),
                microbatch=look.microbatch,
            )
            for value in values
        ]

    def _beyond(self, look: Look) -> list[Beyond]:
        iteration = 0 if self._run is None else self._run.iteration
        return [one for pair in look.read() for one in self._gross.found(*pair, iteration)]

    def _confirm_beyond(self, look: Look) -> Evidence | None:
        beyond = self._beyond(look)
        if not beyond:
            return None
        if self._run is not None:
            self._gross.dropped(self._run.iteration)
        faults = [fault_beyond(one, look.batch) for one in beyond]
        return evidence_of(faults, look.ids, Action.parse(self.action), look.microbatch)

    def _post(self, reading: Reading) -> tuple[Mailbox | None, Letter]:
        device, sheet = reading.plan.device, reading.sheet
        if reading.plan.on_host:  # a sheet belongs to nobody else: it is the letter
            return None, Letter(sheet, None)
        mailbox = self._mailboxes.get(device)
        if mailbox is None:
            mailbox = self._mailboxes[device] = Mailbox(device)
        return mailbox, mailbox.post(sheet)

    @property
    def _device(self) -> torch.device | None:
        """The run's device."""
        return None if self._run is None else self._run.host.device

    def _here(self, flag: Tensor) -> Tensor | None:
        """Return a flag on the run's device; None if that is in host memory and false."""
        return flag_on(self._device, flag)

    def _finding(
        self, value: Tensor, confirm: Callable[[], Evidence | None], microbatch: int | None
    ) -> Finding:
        return Finding(
            kind=Kind.NONFINITE_INPUT,
            value=value,
            action=Action.parse(self.action),
            confirm=confirm,
            microbatch=microbatch,
        )

    # -- on the host -----------------------------------------------------------------------------------

    def _confirming(self, looks: Sequence[Look], *, only: str | None = None) -> Callable[[], Evidence | None]:
        """Return what names the faults of the first of these micro-batches that has any."""

        def confirm() -> Evidence | None:
            for look in looks:
                faults = faults_of(
                    look.batch, self._reader, ignore_index=self.ignore_index, allowed=self._allowed
                )
                faults = [fault for fault in faults if only in {None, fault.mark}]
                if faults:
                    return evidence_of(faults, look.ids, Action.parse(self.action), look.microbatch)
            return None

        return confirm

    def on_after_step(self, event: events.AfterStep) -> Sequence[Finding]:
        """Judge what was measured, as far as it has arrived: what the model coped with, what is unusual."""
        self._in_flight = False
        self._share.steps += 1
        findings = [] if self._heard is None else self._heard.failures()
        while self._waiting and self._waiting[0].step <= event.step and self._waiting[0].arrived():
            look = self._waiting.popleft()
            marks, odd = self._read(look, learn=event.applied)
            if marks and was_fine(event):
                findings.append(warning(self._coped(look, marks)))
            if odd:
                findings.append(warning(told_of(odd, look)))
        return findings

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Forget what was learnt of steps that are taken back."""
        if event.recovery.step is not None:
            self._habits.forget_from(event.recovery.step)
            self._gross.forget_from(event.recovery.step)
            self._waiting.clear()

    def on_run_end(self, event: events.RunEnd) -> None:
        """Say what is wrong with the batch that the program failed on: a look-up fails on bad numbers."""
        error = event.error
        if not (self._in_flight and self._looks) or isinstance(error, TrainingAborted):
            return
        if not isinstance(error, Exception):
            return
        look = self._looks[-1]
        facts = [fault.fact for fault in faults_heard(look, self._reader)] or facts_of_failure(
            error, look.batch, self._reader, ignore_index=self.ignore_index, allowed=self._allowed
        )
        for fact in facts:
            text = f"step {look.step}, micro-batch {look.microbatch}: bad data: {fact}"
            logger.error(text)
            if hasattr(error, "add_note"):
                error.add_note(f"gradsentinel: {text}")

    def state_dict(self) -> dict[str, Any]:
        """Return what batches usually are like."""
        return {
            "habits": self._habits.state_dict(),
            "gross": self._gross.state_dict(),
            "told": sorted(map(list, self._told)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._habits.load_state_dict(state["habits"])
        if "gross" in state:  # earlier versions did not follow it
            self._gross.load_state_dict(state["gross"])
        self._told = {(mark, path) for mark, path in state["told"]}
        self._allowed |= {path for mark, path in self._told if mark == NONFINITE}

    def _read(self, look: Look, *, learn: bool) -> tuple[list[tuple[str, str]], list[Oddity]]:
        """Return the faults that were not told yet, and what is unusual."""
        marks = [(EMPTY, "")] if look.empty else []
        odd: list[Oddity] = []
        for reading, sheet in look.read():
            marks += reading.marks(sheet)
            if learn and reading.plan.sizes:
                self._gross.learn(look.step, reading, sheet)
            rows = reading.rows(sheet) if learn else None
            if rows is not None:
                odd += self._habits.judge(look.step, reading.statistics(sheet), rows)
        for _, mailbox, letter in look.letters:
            if mailbox is not None:
                mailbox.take_back(letter)
        if marks:
            silent = {UNSELECTED, OUT_OF_RANGE}  # no fault by itself; told at once
            marks = [mark for mark in marks if mark not in self._told and mark[0] not in silent]
        return marks, odd

    def _coped(self, look: Look, marks: Sequence[tuple[str, str]]) -> Callable[[], Evidence | None]:
        """Return what tells of faults that did no harm, once each."""

        def confirm() -> Evidence | None:
            allowed = set(self.allow_nonfinite)
            fresh = [mark for mark in marks if mark not in self._told]  # one of this step may have been first
            guessed = any(mark == BEYOND for mark, _ in fresh)
            ignored = self.ignore_index
            found = faults_of(
                look.batch, self._reader, ignore_index=ignored, allowed=allowed, guessed=guessed
            )
            faults = [fault for fault in found if (fault.mark, fault.path) in fresh]
            self._told.update(fresh)  # not before: of very many findings in one step some are not looked into
            self._allowed |= {path for mark, path in fresh if mark == NONFINITE}
            note = _HARMLESS + (_ON_PURPOSE if any(fault.mark == NONFINITE for fault in faults) else "")
            return evidence_of(faults, look.ids, Action.WARN, look.microbatch, note) if faults else None

        return confirm
