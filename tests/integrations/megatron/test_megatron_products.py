"""A fault in the product that tensor-parallel ranks add up: the rank that multiplied wrongly is named."""

import re
from dataclasses import replace

import pytest
import torch
from layouts import LAYOUTS, Fault
from outcomes import Expected, check_cured
from results import outcome
from torch import nn

from gradsentinel.integrations.megatron.exchanges import Exchange, _first, watch
from gradsentinel.integrations.megatron.gradients import BucketGradients
from gradsentinel.testing import clear_swallowed, swallowed

NAN, INF = float("nan"), float("inf")
FAULTS = {
    "tp2dp2": (
        Fault(rank=3, parameter="layers.1.mlp.linear_fc2", when="product"),
        Fault(rank=0, parameter="layers.2.self_attention.linear_proj", when="product", value=INF),
        Fault(rank=1, parameter="layers.3.mlp.linear_fc2", when="product", microbatch=0),
    ),
    "tp2-sequence": (
        Fault(rank=1, parameter="layers.0.self_attention.linear_proj", when="product"),
        Fault(rank=0, parameter="layers.3.mlp.linear_fc2", when="product", value=-INF, microbatch=0),
    ),
    "tp2pp2dp2": (
        Fault(rank=6, parameter="layers.0.mlp.linear_fc2", when="product"),
        Fault(rank=1, parameter="layers.1.self_attention.linear_proj", when="product", value=INF),
    ),
}


@pytest.mark.multiprocess
@pytest.mark.xdist_group("megatron")
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "name", ["tp2dp2", "tp2-sequence", pytest.param("tp2pp2dp2", marks=pytest.mark.slow)]
)
def test_a_transient_fault_in_a_product_names_its_rank(megatron, alone, tmp_path, name):
    layout = LAYOUTS[name]
    faults = tuple(replace(fault, step=2 + number) for number, fault in enumerate(FAULTS[name]))
    settings = {"callbacks": "NanCallback, Retry(max_retries=100)", "faults": faults}
    watched = megatron.run("train", layout.world, layout, tmp_path, **settings)
    for rank, result in enumerate(watched):
        assert result["struck"] == sum(fault.rank == rank for fault in faults)
    kinds = ("nonfinite_gradient", "nonfinite_loss")
    expected = [
        Expected(step=fault.step, outcome="retried", rank=fault.rank, kinds=kinds) for fault in faults
    ]
    check_cured(outcome(alone(layout)), outcome(watched), expected)
    for fault, incident in zip(faults, watched[0]["incidents"], strict=True):
        assert f"; it began on rank {fault.rank}: " in incident["message"]
        if not layout.sequence_parallel:  # there some gradients are good on the others, which tells more
            where = fault.parameter.rpartition(".")[2]
            product = (
                rf"the product of decoder\.layers\.\d\.\w+\.{where}, in micro-batch {fault.microbatch}, "
            )
            assert re.search(product, incident["message"])


class RowParallelLinear(nn.Module):
    """In the shape of Megatron's: multiplies, then adds up over the ranks, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))
        self.others = torch.zeros(2)
        self.multiplies_itself = False

    def _forward_impl(self, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return given @ weight

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self.multiplies_itself:  # as a library does that replaces this method
            return given @ self.weight + self.others
        product = self._forward_impl(given, weight=self.weight)
        return product.add_(self.others)


class ChoosingLayer(RowParallelLinear):
    """As up to release 0.13: an instance has the function, and sets it anew in each pass."""

    _forward_impl = None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self._forward_impl = torch.matmul
        product = self._forward_impl(given, self.weight)
        try:
            torch.distributed.all_reduce(product)
        except ValueError:  # there is nobody else
            product += self.others
        return product


def watched(module: nn.Module, place=lambda: (0, 0, 1)) -> BucketGradients:
    local = BucketGradients()
    local.begin_step()
    watch(Exchange(module, "the input", _first, product="the product"), local, place)
    return local


def seen(local: BucketGradients) -> list[tuple[str, float]]:
    return [(what.partition(",")[0], float(peak)) for what, peak in local.seen.handed]


@torch.no_grad()
def test_the_product_is_looked_at_once_before_it_is_added_up():
    module = RowParallelLinear()
    module.others = torch.tensor([100.0, INF])
    local = watched(module)
    module(torch.tensor([3.0, -5.0]))
    assert seen(local) == [("the product", 5.0)]
    module.weight[0, 1] = NAN
    module(torch.tensor([3.0, -5.0]))
    assert local.first_bad_handover()[1] == "the product, in micro-batch 0,"


@torch.no_grad()
def test_a_layer_that_multiplies_another_way_is_looked_at_by_its_input():
    module = RowParallelLinear()
    local = watched(module)
    module(torch.tensor([1.0, 2.0]))
    module.multiplies_itself = True
    module(torch.tensor([7.0, -9.0]))
    module.multiplies_itself = False
    module(torch.tensor([3.0, 4.0]))
    assert seen(local) == [("the product", 2.0), ("the input", 9.0), ("the product", 4.0)]


@torch.no_grad()
def test_of_a_layer_that_chooses_anew_how_it_multiplies_the_product_is_looked_at_as_it_is_added_up():
    module = ChoosingLayer()
    module.others = torch.tensor([100.0, INF])
    local = watched(module)
    module(torch.tensor([3.0, -5.0]))
    assert seen(local) == [("the product", 5.0)]
    local.detach()
    assert "forward" not in vars(module)


@torch.no_grad()
def test_a_layer_without_that_method_is_looked_at_by_its_input():
    module = nn.Linear(2, 2)
    nn.init.zeros_(module.weight)
    local = watched(module)
    module(torch.tensor([1.0, -2.0]))
    assert seen(local) == [("the input", 2.0)]


@torch.no_grad()
def test_detached_the_layer_is_what_it_was():
    module = RowParallelLinear()
    before = dict(vars(module))
    local = watched(module)
    assert "_forward_impl" in vars(module)
    local.detach()
    assert dict(vars(module)) == before
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    module(torch.tensor([1.0, 2.0]))
    assert seen(local) == []


@torch.no_grad()
@pytest.mark.expects_swallowed
def test_a_look_that_fails_leaves_the_product_alone_and_is_not_tried_again():
    def broken():
        raise RuntimeError("no place")

    module = RowParallelLinear()
    watched(module, place=broken)
    clear_swallowed()
    for _ in range(2):
        assert module(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert [str(error) for error in swallowed()] == ["no place"]
