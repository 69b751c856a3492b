"""The findings that are made of what is looked up during a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradsentinel.callbacks.batch_evidence import KEPT_FROM, Fault, evidence_of, faults_of_misses
from gradsentinel.callbacks.batch_fields import Field, Reader
from gradsentinel.callbacks.batch_links import Misses
from gradsentinel.callbacks.batch_look import Look
from gradsentinel.callbacks.batch_lookups import Lookups
from gradsentinel.decision import Action, Kind
from gradsentinel.evidence import Evidence, Finding
from gradsentinel.run import Run

NEVER_MADE = "the step was never made"


class Heard:
    """Listens from the moment a micro-batch is drawn to the end of its backward pass.

    Args:
        run: the run.
        action: what to ask for when a number was looked up in vain.
    """

    def __init__(self, run: Run, action: Action) -> None:
        self._run = run
        self._action = action
        self._lookups = Lookups(run.host, replaces=action > Action.WARN)

    def listen(
        self, look: Look, fields: Sequence[tuple[Field, Tensor]], outside: Sequence[Tensor], reader: Reader
    ) -> list[Finding]:
        """Listen to a micro-batch, if need be; the finding comes true with the first miss.

        `outside` are flags of fields with numbers outside of a given range.
        """
        sheets = [
            (reading, letter.read())
            for reading, _, letter in look.letters
            if reading.plan.on_host and reading.plan.integers
        ]
        insist = any(flag.device.type == "cpu" and bool(flag) for flag in outside)
        look.misses = misses = self._lookups.begin(fields, sheets, insist=insist)
        if misses is None:
            return []
        self._run.scene.listeners.append(self._lookups.end)
        confirm = self._missed(misses, look, reader)
        return [
            Finding(
                kind=Kind.NONFINITE_INPUT,
                value=misses.flag,
                action=self._action,
                confirm=confirm,
                microbatch=look.microbatch,
            )
        ]

    def failures(self) -> list[Finding]:
        """Return a finding of what went wrong while somebody listened, once."""
        calls = self._lookups.calls
        if calls.failure is None:
            return []
        error, calls.failure = calls.failure, None
        said = f"look-ups of the model cannot be watched any more: {type(error).__name__}: {error}"
        flag = torch.tensor(True)
        return [Finding(kind=Kind.CALLBACK_ERROR, value=flag, action=Action.WARN, message=said)]

    def _missed(self, misses: Misses, look: Look, reader: Reader) -> Callable[[], Evidence | None]:
        """Return what says which numbers were looked up in vain; None if none was after all."""

        def confirm() -> Evidence | None:
            faults = faults_of_misses(misses.found, look.batch, reader)
            if not faults:
                return None
            if self._run.scene.unmade:  # the loop was left, or has failed: there is nothing to be undone
                return evidence_of(faults, look.ids, Action.WARN, look.microbatch, NEVER_MADE)
            kept = (KEPT_FROM,) if self._action > Action.WARN else ()
            return evidence_of(faults, look.ids, self._action, look.microbatch, more=kept)

        return confirm


def faults_heard(look: Look, reader: Reader) -> list[Fault]:
    """Return what was looked up in vain during a micro-batch."""
    return [] if look.misses is None else faults_of_misses(look.misses.found, look.batch, reader)
