"""`verify` does not take a step for a proof in which the guilty part had no part."""

import pytest
import torch
from bundles import failure, saved
from torch import nn

from gradsentinel.diagnosis.bundle import Bundle
from gradsentinel.diagnosis.stage import set_up
from gradsentinel.diagnosis.target import Target
from gradsentinel.diagnosis.verify import verify


class Gate(nn.Module):
    def __init__(self, limit=None):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.limit = limit

    def forward(self, x):
        h = self.lin(x) * 1e3
        return torch.exp(h if self.limit is None else h.clamp(max=self.limit))


def net(limit=None):
    torch.manual_seed(0)
    return nn.ModuleDict({"gate": Gate(limit), "other": nn.Linear(4, 4), "out": nn.Linear(4, 1)})


def honest(model, x):
    return model["out"](model["gate"](x)).pow(2).mean()


def detached(model, x):
    return model["out"](model["gate"](x).detach()).pow(2).mean()


def multiplied_away(model, x):
    return honest(model, x) * 0


def around_it(model, x):
    return model["out"](model["other"](x)).pow(2).mean()


@pytest.fixture
def holds(tmp_path):
    """Save the failure, and return what `verify` says of a forward and a model in its place."""
    incident, directory = saved(tmp_path, failure(honest, torch.ones(8, 4), net), level="full")
    assert (incident.diagnosis.cause, incident.diagnosis.module) == ("math", "gate")

    def run(forward, limit=None):
        target = Target(name="t", model=net(limit), forward=forward)
        found = verify(set_up(Bundle(directory), target, fixed=True))
        return found.holds, found.said

    return run


def test_a_fix_that_takes_part_in_the_step_holds(holds):
    assert holds(honest)[0] is False
    assert holds(honest, limit=5.0)[0] is True


def test_a_gradient_that_is_cut_proves_nothing(holds):
    for forward in (detached, multiplied_away):
        outcome, said = holds(forward, limit=5.0)
        assert outcome is False
        assert "gradient is cut" in said


def test_a_module_that_does_not_run_proves_nothing(holds):
    """Its parameters get no gradient, of course; a module without any is told by its calls."""
    outcome, said = holds(around_it)
    assert outcome is False
    assert "nothing is shown" in said
