"""Tensor parallelism spreads a NaN over its ranks within the backward pass: the one it began on is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_tensor_parallel import LAYOUTS, Model, batches, build, build_in_two_dimensions, loss_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel import NanCallback, Sentinel, Severity

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.xdist_group("tensor-parallel-origin"),  # tests share a run of two processes
]

NAN = float("nan")


class Forward(torch.autograd.Function):
    """One element becomes NaN; the gradient passes."""

    @staticmethod
    def forward(ctx, x):
        return _spoilt(x)

    @staticmethod
    def backward(ctx, g):
        return g


class Backward(torch.autograd.Function):
    """One element of the gradient becomes NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return _spoilt(g)


def _spoilt(x: Tensor) -> Tensor:
    """This rank's part of it, with a NaN."""
    if isinstance(x, DTensor):
        part = _spoilt(x.to_local())
        return DTensor.from_local(
            part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )
    x = x.clone()
    x.view(-1)[0] = NAN
    return x


class Switch:
    """Arms a fault on this rank, behind a module's own hooks."""

    def __init__(self) -> None:
        self.on = False

    def after(self, module: nn.Module, fault: type[torch.autograd.Function]) -> None:
        module.register_forward_hook(lambda _m, _a, output: fault.apply(output) if self.on else None)

    def input_gradient(self, module: nn.Module) -> None:
        """Only the gradient of the input that the module computes itself is bad, as by a broken kernel."""

        def enter(_module: nn.Module, args: Any) -> None:
            if self.on:
                args[0].register_hook(_spoilt)

        module.register_forward_pre_hook(enter)


FAULTS: dict[str, Callable[[Switch, Model], None]] = {
    "forward, between the layers": lambda switch, model: switch.after(model.second.up, Forward),
    "forward, in the norm": lambda switch, model: switch.after(model.second.norm, Forward),
    "backward, between the layers": lambda switch, model: switch.after(model.second.up, Backward),
    "backward, in the norm": lambda switch, model: switch.after(model.second.norm, Backward),
    "backward, behind the block": lambda switch, model: switch.after(model.first, Backward),
    "backward, in one kernel": lambda switch, model: switch.input_gradient(model.second.up),
}


def train(
    rank: int, folder: Path, model: Model, fault: str, guilty: tuple[int, ...], data: list[Tensor]
) -> dict[str, Any]:
    """Train three steps of two micro-batches; the fault is in the last micro-batch of the second step."""
    switch = Switch()
    FAULTS[fault](switch, model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=folder / "run") as sentinel:
        for number, batch in enumerate(sentinel.steps(data, accumulate=2)):
            switch.on = number == 3 and rank in guilty
            sentinel.backward(loss_of(model, batch))
            sentinel.step(max_norm=0.5)
    (incident,) = sentinel.incidents
    return {
        "step": incident.step,
        "kind": str(incident.kind),
        "outcome": str(incident.outcome),
        "microbatch": incident.microbatch,
        "ranks": [(place.rank, dict(place.coordinates)) for place in incident.ranks],
        "message": incident.message,
        "parameters": [tensor.name for tensor in incident.tensors],
        "severity": incident.severity,
    }


def each_fault(rank: int, folder: Path) -> dict[str, Any]:
    """By layout, fault and who is guilty."""
    return {
        f"{layout.__name__}: {fault}, {guilty}": train(
            rank, folder / f"{number}{layout.__name__}{guilty}", build(layout), fault, guilty, batches(6)
        )
        for layout in LAYOUTS
        for number, fault in enumerate(FAULTS)
        for guilty in ((1,), (0, 1))
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("origin")
    first, second = run_ranks(each_fault, 2, folder, folder, timeout=120)
    assert first == second
    return first


def kind_of(fault: str) -> str:
    return "nonfinite_loss" if fault.startswith("forward") else "nonfinite_gradient"


IMPLICIT = ("all_distributed", "backward, in the norm")
"""Here the gradient is a sum whose terms lie apart until torch adds them up within the norm's backward."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_one_rank_is_named_of_two_that_hold_the_nan(told, layout, fault):
    incident = told[f"{layout.__name__}: {fault}, (1,)"]
    assert (incident["step"], incident["kind"], incident["outcome"]) == (1, kind_of(fault), "skipped")
    assert incident["microbatch"] == 1
    if (layout.__name__, fault) == IMPLICIT:
        assert incident["ranks"] == [(0, {"tp": 0}), (1, {"tp": 1})]
        assert "it began on one of ranks 0-1, or on all of them" in incident["message"]
        return
    assert incident["ranks"] == [(1, {"tp": 1})]
    assert "one of ranks" not in incident["message"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_of_two_that_are_equally_bad_nobody_is_singled_out(told, layout, fault):
    incident = told[f"{layout.__name__}: {fault}, (0, 1)"]
    assert (incident["step"], incident["kind"], incident["outcome"]) == (1, kind_of(fault), "skipped")
    assert incident["ranks"] == [(0, {"tp": 0}), (1, {"tp": 1})]
    assert "it began on one of ranks 0-1, or on all of them" in incident["message"]
    assert incident["severity"] is Severity.WARNING  # they may be one fault


@pytest.mark.parametrize(
    ("fault", "said", "nearest"),
    [
        ("forward, between the layers", "the output of second.down was not finite there", None),
        (
            "backward, between the layers",
            "where it only arrived, the gradient of second.up.bias, second.up.weight is finite",
            ["second.up.bias", "second.up.weight"],
        ),
        ("backward, in one kernel", "the gradient of the input of second.up was not finite there", None),
    ],
)
def test_it_is_said_how_the_rank_was_told(told, fault, said, nearest):
    incident = told[f"beside_plain_ones: {fault}, (1,)"]
    assert f"; it began on rank 1: {said}" in incident["message"]
    if nearest is not None:
        assert incident["parameters"][: len(nearest)] == nearest


# -- what it costs -------------------------------------------------------------------------------------


class Looks(TorchDispatchMode):
    """Counts how often this rank's part of something is looked at, and notes who waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.waits = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.count += func is torch.ops.aten.aminmax.default
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def look(rank: int, folder: Path) -> dict[str, tuple[int, int, int]]:
    """By layout: how often in a micro-batch, how often in an evaluation, and how often somebody waits."""
    found = {}
    for layout in LAYOUTS:
        model, (batch,) = build(layout), batches(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=folder / layout.__name__):
            with Looks() as training:
                loss_of(model, batch).backward()
            model.eval()
            with Looks() as evaluation, torch.no_grad():
                model(batch)
        with Looks() as afterwards:
            loss_of(model.train(), batch).backward()
        assert afterwards.count == 0  # every hook is gone
        found[layout.__name__] = (training.count, evaluation.count, training.waits)
    return found


def test_an_exchange_is_looked_at_once_and_nobody_waits(tmp_path):
    """Two blocks, each with a sum forward and one backward; more is exchanged along the sequence."""
    for found in run_ranks(look, 2, tmp_path, tmp_path):
        assert found["beside_plain_ones"] == (4, 0, 0)
        assert found["all_distributed"] == (6, 0, 0)  # outputs of column layers stay distributed tensors
        assert found["along_the_sequence"] == (13, 0, 0)


# -- sharded over one dimension and parallel over the other -------------------------------------------


def in_two_dimensions(rank: int, folder: Path) -> dict[str, Any]:
    """Data-parallel ranks get different batches; rank 3 is the guilty one."""
    return {
        fault: train(
            rank,
            folder / str(number),
            build_in_two_dimensions(),
            fault,
            (3,),
            [batch + rank // 2 for batch in batches(6)],
        )
        for number, fault in enumerate(FAULTS)
    }


def test_of_four_ranks_in_two_dimensions_one_is_named(tmp_path):
    results = run_ranks(in_two_dimensions, 4, tmp_path, tmp_path, timeout=120)
    assert results[1:] == results[:-1]
    for fault in FAULTS:
        incident = results[0][fault]
        assert (incident["step"], incident["kind"]) == (1, kind_of(fault)), fault
        assert incident["ranks"] == [(3, {"dp": 1, "tp": 1})], fault
        assert incident["microbatch"] == 1, fault
