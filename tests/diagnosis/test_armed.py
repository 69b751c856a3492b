"""Without forward=, hooks are armed at the first incident, and the second one is placed."""

import pytest
import torch
from torch import nn

from gradsentinel import NanCallback, Sentinel


class Middle(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.how = how

    def forward(self, x):
        h = self.lin(x)
        if self.how == "forward":
            return torch.log(h * 0)
        return (h * 0).pow(2).sum(1, keepdim=True).sqrt() + h if self.how == "backward" else h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = Middle("none")
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


@pytest.mark.parametrize("how", ["forward", "backward"])
def test_the_second_occurrence_is_placed(how, run_dir):
    model = Model()
    before = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with Sentinel(
        model, torch.optim.SGD(model.parameters(), lr=0.01), callbacks=[NanCallback()], run_dir=run_dir
    ) as sentinel:
        for step, batch in enumerate(sentinel.steps([torch.randn(6, 4) for _ in range(5)])):
            model.middle.how = how if step in (1, 3) else "none"
            sentinel.backward(model(batch).mean())
            sentinel.step()
        first, second = sentinel.incidents
        assert first.diagnosis.cause == "unknown"
        assert "pass forward=" in "\n".join(first.diagnosis.evidence)
        assert "hooks are armed on" in "\n".join(first.diagnosis.evidence)
        assert (second.diagnosis.module, second.diagnosis.phase) == ("middle", how)
        assert second.where == "middle"
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == before


def test_armed_hooks_change_no_bit(run_dir):
    ends = []
    for armed in (False, True):
        torch.manual_seed(1)
        model = Model()
        with Sentinel(
            model,
            torch.optim.Adam(model.parameters()),
            callbacks=[NanCallback()],
            run_dir=run_dir / str(armed),
            forward=None if armed else lambda model, x: model(x).mean(),
        ) as sentinel:
            for step, batch in enumerate(sentinel.steps([torch.randn(6, 4) for _ in range(5)])):
                model.middle.how = "backward" if step == 1 else "none"
                sentinel.backward(model(batch).mean())
                sentinel.step()
            assert len(sentinel.incidents) == 1
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
