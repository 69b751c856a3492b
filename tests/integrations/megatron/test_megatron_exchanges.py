"""A fault in what tensor-parallel ranks exchange within one operation names the rank, and is cured."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from layouts import LAYOUTS, Fault
from outcomes import Expected, check_cured
from results import outcome, release
from torch import nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

from gradsentinel.gradients import GradientView
from gradsentinel.integrations.megatron import collectives
from gradsentinel.integrations.megatron.collectives import (
    Handed,
    asks_modes,
    watch_collectives,
    watch_collectives_of,
)
from gradsentinel.integrations.megatron.exchanges import looking
from gradsentinel.integrations.megatron.gradients import BucketGradients
from gradsentinel.integrations.megatron.returns import TellingGradient, _after_column, watch_stage
from gradsentinel.integrations.megatron.schedule import ScheduledStep
from gradsentinel.testing import clear_swallowed, swallowed

NAN, INF = float("nan"), float("inf")
LOOKED_UP = "what embedding.word_embeddings has looked up"
LOSS = "what the loss adds up over its part of the vocabulary"


def returned(rank, parameter, what="the gradient of the input of ", **more):
    return Fault(rank=rank, parameter=parameter, when="returned", **more), what


def lookup(rank, **more):
    return Fault(rank=rank, parameter="word_embeddings", when="lookup", **more), LOOKED_UP


def loss(rank, kernel, **more):
    return Fault(rank=rank, parameter=kernel, when="loss", **more), LOSS


FAULTS = {
    "tp2dp2": [
        returned(3, "layers.1.mlp.linear_fc1"),
        returned(0, "layers.2.self_attention.linear_qkv", value=INF, microbatch=0),
        returned(2, "output_layer"),
        lookup(1),
        lookup(2, value=-INF, microbatch=0),
        loss(1, "max", value=INF),
        loss(0, "index", microbatch=0),
        loss(3, "sum"),
    ],
    "tp2-sequence": [
        returned(1, "layers.0.mlp.linear_fc1", microbatch=0),
        returned(0, "layers.3.self_attention.linear_qkv", value=-INF),
        lookup(1),
        loss(0, "sum", value=INF),
        # Here something else is finite elsewhere, which tells more.
        returned(1, "layers.2.pre_mlp_layernorm", "where it only arrived, the gradient of "),
        returned(0, "layers.0.input_layernorm", "the gradient of the output of embedding", microbatch=0),
    ],
    "tp2-recompute": [
        returned(1, "layers.1.mlp.linear_fc1"),
        returned(0, "layers.3.self_attention.linear_qkv", microbatch=0),
        lookup(1),
    ],
    "tp2pp2dp2": [
        returned(5, "layers.0.mlp.linear_fc1"),
        returned(0, "layers.1.self_attention.linear_qkv", microbatch=0),
        lookup(3),
        loss(6, "index"),
        returned(7, "layers.0.input_layernorm", "the gradient that pipeline stage 1 hands back"),
    ],
    "pp2": [returned(1, "layers.0.input_layernorm", "the gradient that pipeline stage 1 hands", value=INF)],
    "pp2vpp2": [returned(1, "layers.0.input_layernorm", "the gradient that pipeline stage 1 hands back")],
    "ep2": [
        returned(1, "layers.1.mlp.experts.local_experts.0.linear_fc1"),
        returned(0, "layers.3.mlp.experts.local_experts.1.linear_fc1"),
    ],
    "cp2dp2": [returned(2, "layers.1.self_attention.linear_proj", "the gradient of the output of ")],
}
"""By layout: what goes wrong, and by what the rank is told."""
MARKS = {
    "tp2pp2dp2": pytest.mark.slow,
    "pp2vpp2": pytest.mark.skipif(release() < (0, 13), reason="up to 0.12 chunks are made another way"),
}


@pytest.mark.multiprocess
@pytest.mark.xdist_group("megatron")
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, ())) for name in FAULTS],
)
def test_a_transient_fault_within_an_exchange_names_its_rank(megatron, alone, tmp_path, name):
    layout = LAYOUTS[name]
    faults = tuple(replace(fault, step=2 + number) for number, (fault, _) in enumerate(FAULTS[name]))
    settings = {"callbacks": "NanCallback, Retry(max_retries=100)", "steps": 3 + len(faults)}
    watched = megatron.run("train", layout.world, layout, tmp_path, faults=faults, **settings)
    for rank, result in enumerate(watched):
        assert result["struck"] == sum(fault.rank == rank for fault in faults)
    kinds = ("nonfinite_gradient", "nonfinite_loss")
    expected = [
        Expected(step=fault.step, outcome="retried", rank=fault.rank, kinds=kinds) for fault in faults
    ]
    check_cured(outcome(alone(layout, steps=3 + len(faults))), outcome(watched), expected)
    for (fault, what), incident in zip(FAULTS[name], watched[0]["incidents"], strict=True):
        assert f"; it began on rank {fault.rank}: {what}" in incident["message"]


@pytest.mark.multiprocess
@pytest.mark.xdist_group("megatron")
@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("name", "number", "module"),
    [
        ("tp2dp2", 0, "decoder.layers.1.mlp.linear_fc1"),
        ("tp2dp2", 3, "embedding.word_embeddings"),
        ("tp2dp2", 5, "model"),
        ("tp2dp2", 7, "model"),
        ("tp2-sequence", 5, "decoder.layers.0.input_layernorm"),
        ("ep2", 0, "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1"),
        ("cp2dp2", 0, "decoder.layers.1.self_attention.linear_proj"),
        ("pp2", 0, None),  # no module's output and no gradient of its parameters shows it
    ],
)
def test_a_persistent_fault_within_an_exchange_is_traced_on_its_rank(
    megatron, tmp_path, name, number, module
):
    layout, fault = LAYOUTS[name], replace(FAULTS[name][number][0], persistent=True)
    watched = megatron.run(
        "train", layout.world, layout, tmp_path, callbacks="NanCallback, Retry", faults=(fault,), steps=4
    )
    [incident] = watched[0]["incidents"]
    assert [result["skipped"] for result in watched] == [[fault.step]] * layout.world
    assert [rank["rank"] for rank in incident["ranks"]] == [fault.rank]
    assert f"; it began on rank {fault.rank}" in incident["message"]
    assert incident["diagnosis"]["module"] == module
    assert "computed again by all ranks it is not finite either" in incident["diagnosis"]["evidence"][0]
    assert [result["swallowed"] for result in watched] == [[]] * layout.world


class LinearWithExchange(torch.autograd.Function):
    """In the shape of Megatron's: the product of a backward pass is added up over the ranks, in place."""

    reshapes = False

    @staticmethod
    def forward(ctx, given, weight):
        ctx.save_for_backward(given, weight)
        return given @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        given, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1]) if LinearWithExchange.reshapes else gradient
        product = flat.matmul(weight)
        back = product.reshape(given.shape).add_(100.0)
        gradient = gradient.contiguous().view(-1, gradient.shape[-1])
        return back, gradient.t().matmul(given.reshape(-1, given.shape[-1]))


class ColumnParallelLinear(nn.Module):
    def __init__(self, *, gathers=False):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(3, 2))
        self._gathers = gathers

    def forward(self, given):
        made = LinearWithExchange.apply(given, self.weight)
        return (made.clone() if self._gathers else made), None


def gradients(module, look=None):
    """Gradients of input and weight, of a layer whose backward pass is looked at."""
    handle = None if look is None else module.register_forward_hook(lambda *a: _after_column(*a, look=look))
    given = torch.ones(2, 2, 2, requires_grad=True)
    module(given)[0].mul(2.0).sum().backward()
    weight, module.weight.grad = module.weight.grad, None
    if handle is not None:
        handle.remove()
    return given.grad, weight


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("reshapes", [False, True])
def test_the_product_of_a_backward_pass_is_looked_at_once_and_stays_as_it_is(monkeypatch, gathers, reshapes):
    monkeypatch.setattr(LinearWithExchange, "reshapes", reshapes)
    module, seen = ColumnParallelLinear(gathers=gathers), []
    plain = gradients(module)
    looked_at = gradients(module, lambda values: seen.extend(value.clone() for value in values))
    for with_look, without in zip(looked_at, plain, strict=True):
        assert type(with_look) is torch.Tensor
        assert torch.equal(with_look, without)
    (product,) = seen
    assert type(product) is torch.Tensor
    assert torch.equal(product.view(2, 2, 2), plain[0] - 100.0)  # before it was added up


def test_a_layer_of_another_kind_is_left_alone():
    layer, seen = nn.Linear(2, 3), []
    layer.register_forward_hook(lambda *a: _after_column(*a, look=seen.append))
    layer(torch.ones(1, 2)).sum().backward()
    assert seen == []
    assert type(layer.weight.grad) is torch.Tensor


class LinearWithWhatItIsGiven(torch.autograd.Function):
    """Hands on its gradient as it is: that of what is added to the product."""

    @staticmethod
    def forward(ctx, given, weight, added):
        ctx.save_for_backward(given, weight)
        return given.matmul(weight.t()) + added

    @staticmethod
    def backward(ctx, gradient):
        given, weight = ctx.saved_tensors
        return gradient.matmul(weight), gradient.t().matmul(given), gradient.contiguous()


class ColumnParallelLinearThatAdds(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.added = nn.Parameter(torch.zeros(2, 3))

    def forward(self, given):
        return LinearWithWhatItIsGiven.apply(given, self.weight, self.added), None


def test_a_gradient_that_is_handed_on_is_a_plain_one_to_all_others():
    module, seen, met = ColumnParallelLinearThatAdds(), [], []
    module.register_forward_hook(lambda *a: _after_column(*a, look=seen.append))
    module.added.register_hook(lambda gradient: met.append(type(gradient)))
    module(torch.ones(2, 2))[0].mul(2.0).sum().backward()
    assert len(seen) == 1
    assert met == [torch.Tensor]
    assert type(module.added.grad) is torch.Tensor
    assert torch.equal(module.added.grad, torch.full((2, 3), 2.0))


def test_nothing_is_told_of_what_is_no_product():
    seen = []
    gradient = torch.ones(2, 3).as_subclass(TellingGradient)
    gradient.look = seen.append
    assert type(gradient.sum(dim=0)) is torch.Tensor
    assert type(gradient.t().matmul(torch.ones(2, 2))) is torch.Tensor  # the gradient of the weight
    assert seen == []
    functional.linear(gradient, torch.ones(4, 3))
    assert len(seen) == 1


@pytest.mark.expects_swallowed
def test_a_look_that_fails_ends_by_itself_and_the_backward_pass_goes_on():
    def broken(*_):
        raise RuntimeError("no room")

    module = ColumnParallelLinear()
    plain = gradients(module)
    look = looking("the gradient", broken, lambda: (0, 0, 0))
    clear_swallowed()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(gradients(module, look), plain, strict=True))
    assert [str(error) for error in swallowed()] == ["no room"]


@pytest.mark.skipif(not asks_modes(torch.distributed.all_reduce), reason="this torch asks no modes")
def test_what_is_given_to_a_collective_is_seen_before_it():
    seen = []
    given, other = torch.ones(2), torch.zeros(1)
    scatter = getattr(torch.distributed, "reduce_scatter_single", torch.distributed.reduce_scatter_tensor)
    with Handed(seen.append):
        with pytest.raises(ValueError, match="process group"):  # nobody to exchange it with
            torch.distributed.all_reduce(given)
        with pytest.raises(ValueError, match="process group"):
            scatter(other, other)
        given.sum()
    assert [id(one) for one in seen] == [id(given), id(other)]


def lookup_of(weight):
    """In the shape of Megatron's word embedding; its last line is in front of the collective."""
    found = functional.embedding(torch.tensor([[0, 1], [2, 0]]), weight)
    found[torch.tensor([[False, True], [False, False]]), :] = 0.0
    return found.contiguous()


def test_where_collectives_ask_nobody_what_may_be_handed_over_is_seen_as_it_is_made():
    """With torch 2.6; in the order in which the ranks make it, each value once."""
    seen = []
    weight, logits = torch.ones(3, 2), torch.tensor([[1.0, 5.0], [7.0, 2.0]])
    with Handed(seen.append, asked=False):
        handed = lookup_of(weight)
        largest = torch.max(logits, dim=-1)[0]
        total = logits.exp().sum(dim=-1)
    assert [one.tolist() for one in seen] == [handed.tolist(), largest.tolist(), total.tolist()]
    with Handed(seen.append):
        lookup_of(weight)
    assert len(seen) == 3


@pytest.mark.parametrize("asks", [True, False])
def test_a_collective_is_asked_whether_it_asks_modes(asks):
    def with_modes(tensor):
        return torch.overrides.has_torch_function((tensor,))

    def without(tensor):
        return tensor

    @functools.wraps(with_modes if asks else without)
    def timed(tensor):
        raise NotImplementedError

    assert asks_modes(timed) is asks
    assert not asks_modes(len)  # written in C


def test_a_method_is_watched_and_put_back(monkeypatch):
    class Model:
        def loss(self, values):
            torch.distributed.all_reduce(values.contiguous())

    model, seen = Model(), []
    monkeypatch.setattr(collectives, "asks_modes", lambda _: False)
    wraps = watch_collectives(model, "loss", seen.append)
    with pytest.raises(ValueError, match="process group"):
        model.loss(torch.ones(3))
    assert [one.shape for one in seen] == [(3,)]
    torch.ones(1).contiguous()  # outside of it nothing is
    assert len(seen) == 1
    wraps.undo()
    assert vars(model) == {}


def local_gradients(stage=0, stages=2):
    local = BucketGradients(stage=stage, stages=stages)
    local.begin_step()
    return local


class Block(nn.Module):
    """In the shape of Megatron's: what the stage before has sent is left with it."""

    def __init__(self):
        super().__init__()
        self.input_tensor = None

    def forward(self):
        return self.input_tensor * NAN


def test_the_gradient_that_a_stage_hands_back_is_looked_at_and_the_hook_taken_off():
    root, local = nn.Sequential(Block()), local_gradients(stage=1)
    watch_stage(root, local.stage(0), local, lambda: (1, 0, 7))
    root[0].input_tensor = torch.ones(2, requires_grad=True)
    root[0]().sum().backward()
    number, what = local.first_bad_handover()
    assert what == "the gradient that pipeline stage 1 hands back, in micro-batch 1,"
    assert number > 2**62
    local.detach()
    assert not root[0]._forward_pre_hooks


class WordEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, *, fails=False):
        if fails:
            raise KeyError("no such word") if fails is True else fails
        return lookup_of(self.weight)


@pytest.mark.parametrize("asks", [True, False])
def test_a_module_is_watched_by_hooks_so_that_a_copy_has_its_own_weights(monkeypatch, asks):
    monkeypatch.setattr(collectives, "asks_modes", lambda _: asks)
    module, seen = WordEmbedding(), []
    handles = watch_collectives_of(module, lambda value: seen.append(value.tolist()))
    plain = module().tolist()
    assert seen == ([] if asks else [plain])  # it hands nothing to a collective
    with pytest.raises(KeyError):
        module(fails=True)
    torch.ones(1).contiguous()  # nobody looks any more
    assert seen == ([] if asks else [plain])
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.weight.fill_(5.0)
    assert copied()[0, 0].tolist() == [5.0, 5.0]
    for handle in handles:
        handle.remove()
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_an_interrupted_pass_leaves_nothing_that_looks_on():
    def interrupted(**_):
        embedding(fails=KeyboardInterrupt)

    embedding, seen = WordEmbedding(), []
    watch_collectives_of(embedding, seen.append)
    arguments = {"forward_step_func": lambda *_: None, "data_iterator": None}
    step = ScheduledStep(interrupted, arguments, seen=lambda _: None, output=lambda *_: None)
    outer = Handed(lambda _: None)
    with outer:
        with pytest.raises(KeyboardInterrupt):
            step.run()
        assert _get_current_function_mode_stack() == [outer]
    assert _get_current_function_mode_stack() == []
    embedding()
    assert _get_current_function_mode_stack() == []


def test_backward_passes_come_after_forward_passes_and_go_from_the_last_stage_to_the_first():
    def first(stage, record, microbatch, count, chunk=0):
        local = local_gradients(stage=stage)
        getattr(local, record)("x", torch.tensor([NAN]), microbatch, chunk, count)
        return local.first_bad_handover()[0]

    in_order = [
        first(0, "record_exchange", 0, 3),
        first(1, "record_exchange", 0, 1),
        first(0, "record_exchange", 0, 1, chunk=1),
        first(0, "record_exchange", 1, 1),
        first(0, "record_return", 0, 9, chunk=1),
        first(1, "record_return", 0, 2),
        first(1, "record_return", 0, 5),
        first(0, "record_return", 0, 1),
        first(1, "record_return", 1, 0),
    ]
    assert in_order == sorted(set(in_order))
    alone = local_gradients(stage=1)
    alone.record(GradientView([("w", torch.tensor([NAN]))]))
    assert alone.first_bad_handover()[0] > in_order[-1]  # what came to it from others they know better
