"""A responder that talks to the others and fails on one rank: nobody waits, all stop for the same reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from gradsentinel import (
    Action,
    Detector,
    Finding,
    Incident,
    Kind,
    NanCallback,
    Recovery,
    Responder,
    Sentinel,
    TrainingAborted,
)
from gradsentinel.incident import Outcome
from gradsentinel.run import Run

pytestmark = pytest.mark.multiprocess

CALLS: dict[str, Callable[[Run], Any]] = {
    "gather": lambda run: run.consensus.gather("x" * 1000),
    "all_of": lambda run: run.consensus.all_of(True),
    "agree": lambda run: run.consensus.agree(torch.ones(3, dtype=torch.int32)),
    "total": lambda run: run.consensus.total(torch.ones(1000)),
    "differ": lambda run: run.consensus.differ(torch.ones(5, dtype=torch.int64), None),
    "copy_from": lambda run: run.consensus.copy_from(0, [torch.zeros(1000)], None),
}


class Talks(Responder):
    """Makes three calls; on rank 1 something happens before one of them."""

    rung = Action.SKIP

    def __init__(self, call: str, before: int, instead: str) -> None:
        self.call, self.before, self.instead = call, before, instead
        self.swallow = instead == "raises, swallowed by the others"

    def respond(self, incident: Incident, run: Run) -> Recovery | None:
        for number in range(3):
            if (dist.get_rank(), number) == (1, self.before):
                if self.instead == "answers":
                    break
                raise ValueError("only here")
            try:
                CALLS[self.call](run)
            except Exception:
                if not self.swallow:
                    raise
        run.undo_step()
        return Recovery(outcome=Outcome.SKIPPED, apply=False, message="dropped")


class Suspects(Detector):
    def on_before_clip(self, event: Any) -> Finding:
        return Finding(kind=Kind.CUSTOM, value=torch.tensor(event.step == 1), action=Action.SKIP)


def each(rank: int, folder: Path, cases: list[tuple[str, int, str]]) -> list[tuple[str, str]]:
    ends = []
    for number, case in enumerate(cases):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        callbacks = [NanCallback(), Suspects(), Talks(*case)]
        try:
            with Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder / str(number)) as sentinel:
                for batch in sentinel.steps([torch.ones(2, 2)] * 3):
                    sentinel.backward(model(batch).sum())
                    sentinel.step()
            ends.append(("", sentinel.incidents[0].recovery))
        except TrainingAborted as error:
            ends.append((type(error).__name__, str(error)))
    return ends


def test_a_responder_that_leaves_before_a_collective_keeps_nobody_waiting(tmp_path):
    cases = [
        (call, before, instead)
        for call in CALLS
        for before, instead in ((0, "raises"), (2, "raises"), (1, "answers"))
    ]
    cases += [(call, 1, "raises, swallowed by the others") for call in ("gather", "total")]
    first, second = run_ranks(each, 2, tmp_path, tmp_path, cases, timeout=60)
    for case, here, there in zip(cases, first, second, strict=True):
        _, _, instead = case
        assert (here[0], there[0]) == ("RecoveryFailed", "RecoveryFailed"), case
        if instead == "answers":
            assert "step 1: Talks did not do the same on every rank" in here[1], case
            assert "step 1: Talks did not do the same on every rank" in there[1], case
        else:
            assert "step 1: Talks failed on another rank" in here[1], case
            assert "step 1: Talks failed on this rank: only here" in there[1], case


def test_a_responder_that_does_the_same_everywhere_may_talk(tmp_path):
    cases = [(call, 9, "nothing") for call in CALLS]
    for ends in run_ranks(each, 2, tmp_path, tmp_path, cases, timeout=60):
        assert ends == [("", "dropped")] * len(cases)
