"""torch.compile and activation checkpointing wrap modules: a diagnosis knows them by the user's own names."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from gradsentinel import NanCallback, Sentinel

pytestmark = [  # of torch's compiler itself, which would fail on them here
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, h):
        return torch.log(self.lin(h) * 0 + self.shift)


class Block(nn.Module):
    def __init__(self, tail):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.tail = tail

    def forward(self, h):
        return self.tail(self.up(h))


def saved(module):
    return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


def reentrant(module):
    return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.REENTRANT)


def compiled(module):
    return torch.compile(module, backend="eager")


def in_place(module):
    module.compile(backend="eager")
    return module


def both(module):
    return compiled(saved(module))


WRAPPERS = [saved, reentrant, compiled, in_place, both]


@pytest.fixture
def diagnosis_of(run_dir):
    def run(model):
        def forward(model, x):
            return model(x).mean()

        with Sentinel(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            callbacks=[NanCallback()],
            run_dir=run_dir,
            forward=forward,
        ) as sentinel:
            for batch in sentinel.steps([torch.randn(3, 4)]):
                sentinel.backward(forward(model, batch))
                sentinel.step()
        (incident,) = sentinel.incidents
        return incident

    return run


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_a_wrapped_block_inside_of_the_model(wrap, diagnosis_of, line):
    model = nn.Sequential(nn.Linear(4, 4), wrap(Block(nn.Linear(4, 4))), wrap(Block(Tail())))
    incident = diagnosis_of(model)
    found = incident.diagnosis
    assert (found.cause, found.phase, found.op) == ("math", "forward", "aten.log.default")
    assert found.module == "2.tail"
    assert found.source == line(Tail.forward, "torch.log(")
    assert incident.where == "2.tail"
    assert [tensor.name for tensor in incident.tensors] == [
        "0.weight", "0.bias", "1.up.weight", "1.up.bias", "1.tail.weight", "1.tail.bias",
        "2.up.weight", "2.up.bias", "2.tail.lin.weight", "2.tail.lin.bias",
    ]  # fmt: skip


@pytest.mark.parametrize("wrap", [compiled, in_place], ids=lambda wrap: wrap.__name__)
def test_a_compiled_model_is_run_again_eagerly(wrap, diagnosis_of, line):
    """Its operators are those of the source, one by one, and have the lines of the source."""
    model = wrap(nn.Sequential(nn.Linear(4, 4), Block(Tail())))
    found = diagnosis_of(model).diagnosis
    assert (found.op, found.module) == ("aten.log.default", "1.tail")
    assert found.source == line(Tail.forward, "torch.log(")


def test_a_wrapped_buffer_has_its_own_name_too(diagnosis_of):
    model = nn.Sequential(nn.Linear(4, 4), saved(Block(Tail())))
    model[1]._checkpoint_wrapped_module.tail.shift.fill_(torch.inf)
    found = diagnosis_of(model).diagnosis
    assert found.cause == "setup"
    assert found.evidence[0].startswith("buffer 1.tail.shift ")
