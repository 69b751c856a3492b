"""repro.py of a half-precision fault runs the operator as it ran: in its dtype, and under its autocast."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from gradsentinel import NanCallback, Sentinel, SnapshotSaver

FUNCTION = """
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x @ weight)  # autocast: in half
            ctx.weight = weight
            return x + 0

        @staticmethod
        def backward(ctx, grad):
            (product,) = ctx.saved_tensors
            return grad * (1 / (product.float() - product.float() + (product.dtype != torch.half))), None
"""


@pytest.fixture
def program(run_dir):
    """Run one bad step and return its diagnosis, its bundle, and what runs repro.py."""

    def make(model, forward, batch):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Sentinel(
            model,
            optimizer,
            callbacks=[NanCallback(), SnapshotSaver()],
            run_dir=run_dir,
            forward=forward,
        ) as sentinel:
            for given in sentinel.steps([batch]):
                sentinel.backward(forward(model, given))
                sentinel.step()
        (incident,) = sentinel.incidents
        folder = run_dir / "incidents" / incident.id

        def run(*arguments, path=()):
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
            done = subprocess.run(  # noqa: S603 - this interpreter, a file written by the test
                [sys.executable, folder / "repro.py", *arguments],
                capture_output=True,
                text=True,
                check=False,
                env=environment,
            )
            assert not done.stderr
            return done.returncode, done.stdout

        return incident.diagnosis, run

    return make


@pytest.mark.slow
def test_what_half_precision_lost_before_a_wider_operator_failed(program):
    """The quotient is computed in float32, where it is bad; what lost the number is a product in float16."""

    def forward(model, batch):
        small = (model(batch).abs() * 1e-4).half() * 1e-4
        return (1 / small.float()).mean()

    torch.manual_seed(0)
    found, run = program(nn.Linear(4, 4), forward, torch.rand(6, 4) + 0.5)
    assert (found.cause, found.op) == ("precision", "aten.mul.Tensor")
    code, said = run()
    assert code == 0, said
    first, _, later = said.partition("aten.reciprocal.default, later")
    assert "aten.mul.Tensor, as it ran:\n  input 0: float16[6, 4]" in first
    assert "0 then, 0.0 now, " in first
    assert "e-09 in float32" in first or "e-08 in float32" in first
    assert "output 0[0, 0]: Inf then, inf now" in later
    code, said = run("--dtype", "float32")
    assert code == 1
    assert "NOT REPRODUCED: nothing is lost here" in said


@pytest.mark.slow
def test_an_operator_under_autocast_runs_in_the_type_it_ran_in(program):
    def forward(model, batch):
        with torch.autocast("cpu", torch.float16):
            hidden = model(batch)
        return hidden.float().pow(2).mean()

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model.weight.data.fill_(3e4)
    found, run = program(model, forward, torch.ones(6, 4))
    assert (found.cause, found.op) == ("precision", "aten.addmm.default")
    code, said = run()
    assert code == 0, said
    assert "input 2: float16[4, 4]" in said
    assert "output 0: float16[6, 4], 0 NaN, 24 Inf" in said
    assert run("--dtype", "float32")[0] == 1


@pytest.mark.slow
def test_a_function_of_the_users_own_runs_under_the_autocast_of_the_run(program, tmp_path, monkeypatch):
    """Its forward keeps something in half under autocast; its backward is singular only then."""
    (tmp_path / "own_product.py").write_text(textwrap.dedent(FUNCTION))
    monkeypatch.syspath_prepend(tmp_path)
    import own_product  # noqa: PLC0415 - written above

    def forward(model, batch):
        with torch.autocast("cpu", torch.float16):
            hidden = own_product.Product.apply(model(batch).float(), torch.eye(4))
        return hidden.float().pow(2).mean()

    torch.manual_seed(0)
    found, run = program(nn.Linear(4, 4), forward, torch.ones(6, 4))
    assert (found.cause, found.phase) == ("operator", "backward")
    code, said = run(path=[tmp_path])
    assert "Product.apply, then its backward" in said
    assert code == 0, said
