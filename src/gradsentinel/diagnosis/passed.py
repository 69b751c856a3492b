"""What it means that the loop gave the model the same as a replay, or something else, and got back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradsentinel.again.scene import MicroBatch
from gradsentinel.diagnosis.boundary import Boundary, Difference, compare_calls
from gradsentinel.diagnosis.replay import Computed, Replay
from gradsentinel.diagnosis.report import Report
from gradsentinel.diagnosis.swap import batch_size, is_finite
from gradsentinel.evidence import Diagnosis, Sample
from gradsentinel.incident import fold
from gradsentinel.run import Run
from gradsentinel.state.rng import RngState
from gradsentinel.state.tree import tensors_in

_SURE = 0.9
"""A diagnosis as sure as that, of one flipped bit, needs no narrowing down."""
_IN_THE_LOSS = (
    "the model was given the same and returned the same, bit for bit: the damage was made after it, in the "
    "loss or in what that is given (targets, weights)"
)
_LATER = (
    "the model was given the same and returned the same, bit for bit: the damage was made after it, in the "
    "backward pass or later"
)
_MADE_OF_IT = "given what the loop gave it, the model returns what the loop got, bit for bit: it is innocent"


@dataclass(frozen=True, slots=True)
class Passed:
    """The boundaries of the micro-batches of a step, by number, and which of these are suspect."""

    each: Mapping[int, Boundary] = field(default_factory=dict)
    suspects: tuple[int, ...] = ()
    drawn: bool = False
    """True if the forward pass draws random numbers, and the loop drew others beside."""
    buffers: tuple[str, ...] = ()
    """Buffers that the loop writes to beside the forward pass."""

    @property
    def given(self) -> tuple[int, Difference] | None:
        """A micro-batch in which the model was given something else, a suspect if there is one; and what."""
        found = [(number, one.given) for number, one in self.each.items() if one.given is not None]
        return min(found, key=lambda pair: (pair[0] not in self.suspects, pair[0]), default=None)

    @property
    def made(self) -> Difference | None:
        """The damage that the model has done: it was given the same, and nothing else is another one."""
        if self.given is not None or any(self.each[n].unknown for n in self.suspects if n in self.each):
            return None
        found = [(number, one.made) for number, one in self.each.items() if one.made is not None]
        if len(found) != 1 or found[0][0] not in self.suspects:
            return None
        what = found[0][1]
        return what if what.bad else None

    @property
    def flipped(self) -> Difference | None:
        """The damage, if the model was given the same and one single bit of what it returned is another."""
        found = [one.made for one in self.each.values() if one.made is not None]
        return found[0] if self.given is None and len(found) == 1 and found[0].flipped is not None else None

    @property
    def module(self) -> str:
        """The module that was called, of which that is known; empty for the model as a whole."""
        made = self.made or self.flipped
        return next((one.name for one in self.each.values() if made is not None and one.made is made), "")

    @property
    def same(self) -> bool:
        """True if in all suspects the model was given the same and returned the same."""
        return bool(self.suspects) and all(n in self.each and self.each[n].same for n in self.suspects)

    @property
    def unknown(self) -> str:
        """Why what the loop gave to the model, or got back, cannot be compared; empty if it can."""
        return next((self.each[n].unknown for n in self.suspects if n in self.each), "")

    def explained_otherwise(self) -> str:
        """Return what the loop had around the model that a replay leaves out; empty if nothing is known."""
        suspects = [one for number, one in self.each.items() if number in self.suspects]
        modes = dict.fromkeys(mode for one in suspects for mode in one.modes)
        if modes:
            under = fold(list(modes))
            return f"the loop ran the model under {under}, a mode that may change what operators make"
        if any(one.hooks for one in suspects):
            return "the loop registered hooks before the model returned, which a replay leaves out"
        if self.buffers:
            return f"the loop writes to {fold(self.buffers)}, which a replay begins with as the step did"
        if self.drawn:
            return (
                "the forward pass draws random numbers, and the loop drew others beside: a replay draws "
                "what the loop may not have drawn"
            )
        unseen = next((one.unseen for one in suspects if one.unseen), "")
        if unseen and self.made is not None:
            return f"{unseen}, and may have held something else before it was filled again"
        return ""


class Boundaries:
    """Compares the loop's calls of the model with each replay's; make it before the first replay.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._scene = run.scene
        self._each: dict[int, Boundary] = {}
        self._computed: dict[int, tuple[RngState | None, Mapping[str, int]]] = {}
        names = [] if run.scene.rng is None else [name for name, _ in run.scene.rng.devices]
        self._now = RngState.capture(names)
        self._writes = run.scene.buffers.moved()

    def take(self, microbatch: MicroBatch, computed: Computed) -> None:
        """Compare a replay's calls with the loop's, and let go of them."""
        calls = self._scene.calls
        if calls is None:
            return
        number = microbatch.index
        sizes = {tensor.shape[0] for _, tensor in tensors_in(microbatch.batch) if tensor.dim()}
        self._each[number] = compare_calls(calls.of(number), computed.calls, sizes)
        self._computed[number] = computed.rng, computed.writes
        computed.calls = None

    def passed(self) -> Passed:
        """Return what all comparisons together show."""
        if not self._each:
            return Passed()
        losses = {done.microbatch: done.loss for done in self._scene.passes}
        bad = [n for n, loss in losses.items() if loss is not None and not math.isfinite(float(loss))]
        suspects = tuple(bad or losses or self._each)
        return Passed(self._each, suspects, self._drew_beside(suspects), self._written_beside())

    def _drew_beside(self, suspects: Sequence[int]) -> bool:
        microbatches = self._scene.microbatches
        for number in suspects:
            after, _ = self._computed.get(number, (None, {}))
            before, follows = microbatches[number].rng, microbatches[number + 1 : number + 2]
            if after is None or after.draws_like(before):
                continue
            if not after.draws_like(follows[0].rng if follows else self._now):
                return True
        return False

    def _written_beside(self) -> tuple[str, ...]:
        if len(self._computed) < len(self._scene.microbatches):
            return ()
        usual: dict[str, int] = {}
        for _, writes in self._computed.values():
            for name, count in writes.items():
                usual[name] = usual.get(name, 0) + count
        return tuple(name for name, count in self._writes.items() if count != usual.get(name, 0))


def given_otherwise(
    replay: Replay, microbatches: Sequence[MicroBatch], passed: Passed, time_left: Callable[[], bool]
) -> Report | None:
    """Return what to say if the loop gave the model something else than `forward=`; None if it did not.

    Runs the micro-batch once more, with what the loop gave to the model.
    """
    if passed.given is None:
        return None
    number, what = passed.given
    calls, microbatch = replay.run.scene.calls, next(m for m in microbatches if m.index == number)
    made: Boundary | None = None
    finite = True
    if calls is not None and time_left():
        loop = calls.of(number)
        computed = replay.compute(microbatch, instead=loop)
        made, finite = compare_calls(loop, computed.calls, ()), is_finite(computed)
    alike = made is not None and made.same
    more = (_MADE_OF_IT,) if alike else ()
    if what.bad and not what.finite and made is not None and (alike or not finite):
        return _bad_inputs(microbatch, what, more, sure=alike)
    fact = f"the loop gave the model something else than forward= does: {in_words(what)}"
    fix = (
        "let forward= do all that the loop does to a batch before the model gets it (augmentation, noise, "
        "normalisation): then the step can be run again and traced"
    )
    return Report(
        diagnosis=Diagnosis(
            cause="unknown",
            confidence=0.3,
            phase="forward",
            evidence=(fact, *more),
            remedy=(fix,),
        )
    )


def _bad_inputs(microbatch: MicroBatch, what: Difference, more: tuple[str, ...], *, sure: bool) -> Report:
    known = what.size == batch_size(microbatch.batch) and len(what.records) < what.size
    rows = what.records if known else ()
    ids = microbatch.ids
    fix = (
        "look at what the loop does to a batch before the model gets it: a division by 0, a logarithm of 0, "
        "an overflow; do it inside forward= to have it run again and traced"
    )
    fact = (
        f"the loop gave the model values that are not finite, where forward= gives it finite ones: "
        f"{in_words(what)}; they were made between the batch and the model (augmentation, normalisation)"
    )
    return Report(
        diagnosis=Diagnosis(
            cause="data",
            confidence=0.7 if sure else 0.5,
            phase="input",
            evidence=(fact, *more),
            remedy=(fix,),
        ),
        microbatch=microbatch.index,
        made_by_the_loop=True,
        samples=tuple(Sample(position=row, id=ids.get(row)) for row in rows),
    )


def after_the_model(diagnosis: Diagnosis, passed: Passed, *, in_loss: bool) -> Diagnosis:
    """Say, where it is so, that what the model was given and returned is the same: it narrows the search."""
    if not passed.same or diagnosis.cause not in ("unknown", "hardware") or diagnosis.confidence >= _SURE:
        return diagnosis
    fact = _IN_THE_LOSS if in_loss else _LATER
    return replace(
        diagnosis,
        phase="loss" if in_loss else diagnosis.phase,
        module="",
        evidence=(*diagnosis.evidence, fact),
    )


def in_words(what: Difference) -> str:
    """Say what differs: 'argument x, record 2, element [2, 0]: nan instead of 0.3 and 5 more'."""
    parts = [what.where]
    if what.records and len(what.records) < what.size:
        numbers = fold([str(record) for record in what.records])
        parts.append(f"record {numbers}" if len(what.records) == 1 else f"records {numbers}")
    if what.first:
        parts.append(what.first + (f" and {what.odd - 1} more" if what.odd > 1 else ""))
    return ", ".join(parts)
