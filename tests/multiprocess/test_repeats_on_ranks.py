"""What waits to be told is told by all ranks in the same step, also if each has names of its own."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

from gradsentinel import BeforeClip, Evidence, Finding, Kind, Sentinel
from gradsentinel.decision import Action

pytestmark = pytest.mark.multiprocess


def train(rank, folder):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    sentinel = Sentinel(model, optimizer, callbacks=[], run_dir=folder, timeout=20.0)

    def names(event):
        if event.step >= 12:
            return None
        about = (f"r{rank}.n{event.step}",)
        evidence = Evidence(kind=Kind.CUSTOM, action=Action.WARN, message=f"step {event.step}", about=about)
        return Finding(
            kind=Kind.CUSTOM, value=torch.tensor(True), action=Action.WARN, confirm=lambda: evidence
        )

    sentinel.on(BeforeClip, names)
    with sentinel:
        for batch in sentinel.steps(list(torch.randn(130, 3, 4))):
            sentinel.backward(model(batch).square().mean())
            sentinel.step()
    return [(one.step, one.id, len(one.claims[0].names), one.notes[-1:]) for one in sentinel.incidents]


def test_what_waits_is_told_by_all_ranks(tmp_path):
    first, second = run_ranks(train, 2, tmp_path, tmp_path)
    assert first == second
    assert [step for step, *_ in first] == [*range(8), 108]
    assert all(count == 2 for _, _, count, _ in first)
    assert "since the last warning also: r0.n8, r1.n8, r0.n9 and 3 more" in first[-1][3][0]
