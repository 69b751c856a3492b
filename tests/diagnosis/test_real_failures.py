"""Failures that people reported, made small: cause, phase, operator, place and line as they really were."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradsentinel import MagnitudeCallback, NanCallback, Rollback, TrainingAborted

INF = float("inf")


def distance(model, batch):
    difference = model(batch["a"]) - model(batch["b"])
    return (difference**2).sum(1).sqrt().mean()


def test_distance_of_identical_embeddings(diagnosed, line):
    """pytorch#160016, #2421: sqrt'(0) is inf, the next node makes it NaN."""
    batch = {"a": torch.randn(3, 4), "b": torch.randn(3, 4)}
    batch["b"][2] = batch["a"][2]
    incident = diagnosed(nn.Linear(4, 3), [batch], distance)
    found = incident.diagnosis
    assert (found.cause, found.phase, found.op) == ("math", "backward", "aten.div.Tensor")
    assert (found.module, found.node) == ("", "SqrtBackward0")
    assert found.source == line(distance, "sqrt()")
    told = "\n".join(found.evidence)
    assert "1 exact zero" in told
    assert "sample 2" in told
    assert "aten.mul.Tensor in PowBackward0" in told
    assert "eps" in found.remedy[0]
    assert [(sample.position, sample.field) for sample in incident.samples] == [(2, "")]


class Gate(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.kind = kind

    def forward(self, x):
        x = self.lin(x)
        if self.kind == "log":
            return torch.where(x > 0, torch.log(x), x)
        if self.kind == "sqrt":
            return torch.where(x > 0, torch.sqrt(x), x)
        return torch.where(x < -1e9, torch.exp(x + 200), x)


@pytest.mark.parametrize(("kind", "node"), [("sqrt", "SqrtBackward0"), ("exp", "ExpBackward0")])
def test_branch_of_where_that_was_not_taken(kind, node, diagnosed, line):
    """pytorch#187297, #68425: the output is finite; the unselected branch comes back as 0 * inf."""
    model = nn.Sequential()
    model.add_module("gate", Gate(kind))
    batch = torch.tensor([[1.0, 2.0], [-3.0, 0.5]])
    found = diagnosed(model, [batch], lambda model, x: model(x).sum()).diagnosis
    assert (found.cause, found.phase, found.op) == ("math", "forward", f"aten.{kind}.default")
    assert (found.module, found.node) == ("gate", node)
    assert found.source == line(Gate.forward, f"torch.{kind}(")
    assert "where()" in "\n".join(found.evidence)
    assert "mask the input, not the output" in found.remedy[0]


def test_branch_of_where_that_does_no_harm(diagnosed):
    model = Gate("log")
    batch = torch.tensor([[1.0, 2.0], [-3.0, 0.5]])
    assert diagnosed(model, [batch], lambda model, x: model(x).sum()) is None


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True)])

    def forward(self, x, padding):
        return self.layers[0](x, x, x, key_padding_mask=padding, need_weights=True)[0]


def test_attention_over_an_empty_sequence(diagnosed):
    """pytorch#41508: sample 1 is all padding and is left out of the loss, yet all gradients are NaN."""
    padding = torch.zeros(3, 4, dtype=torch.bool)
    padding[0, 3] = True
    padding[1] = True
    batch = {"x": torch.randn(3, 4, 8), "padding": padding, "ids": [70, 71, 72]}

    def forward(model, batch):
        return model(batch["x"], batch["padding"])[[0, 2]].pow(2).mean()

    incident = diagnosed(Encoder(), [batch], forward)
    found = incident.diagnosis
    assert (found.cause, found.phase, found.op) == ("data", "forward", "aten._softmax.default")
    assert (found.module, found.node) == ("layers.0", "SoftmaxBackward0")
    assert [(s.position, s.id) for s in incident.samples] == [(1, 71)]
    assert "nothing but -inf" in "\n".join(found.evidence)


def test_no_token_is_supervised(diagnosed, line):
    """allenai/OLMo-core PR 657: 0 / 0 in the loss."""

    def forward(model, batch):
        losses = model(batch["x"]).pow(2).flatten() * batch["mask"]
        return losses.sum() / batch["mask"].sum()

    found = diagnosed(nn.Linear(4, 1), [{"x": torch.randn(6, 4), "mask": torch.zeros(6)}], forward).diagnosis
    assert (found.cause, found.phase, found.op) == ("data", "forward", "aten.div.Tensor")
    assert found.module == ""
    assert found.source == line(forward, "/ batch")
    assert "0 / 0" in "\n".join(found.evidence)


@pytest.mark.parametrize("field", ["x", "y"])
def test_a_bad_record(field, diagnosed):
    """Marigold#111, mmf#1251: NaN in an input or in a target; the model is innocent."""
    batch = {"x": torch.randn(4, 4), "y": torch.randn(4, 1), "idx": torch.arange(12, 16)}
    batch[field][1, 0] = torch.nan
    incident = diagnosed(nn.Linear(4, 1), [batch], lambda m, b: (m(b["x"]) - b["y"]).pow(2).mean())
    assert (incident.diagnosis.cause, incident.diagnosis.phase) == ("data", "input")
    assert [(s.position, s.id, s.field) for s in incident.samples] == [(1, 13, field)]


def test_an_infinity_in_the_data_that_the_loss_does_not_feel(diagnosed):
    """tanh hides it in the forward pass; the weight's gradient is 0 * inf."""
    batch = {"x": torch.randn(4, 4), "idx": torch.arange(12, 16)}
    batch["x"][1, 2] = INF
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    incident = diagnosed(model, [batch], lambda model, b: model(b["x"]).pow(2).mean())
    assert (incident.diagnosis.cause, incident.diagnosis.phase) == ("data", "input")
    assert [(s.position, s.id, s.field) for s in incident.samples] == [(1, 13, "x")]


def test_half_precision_adam_whose_eps_is_zero(sentinel_for):
    """optax#1754, pytorch#8860: eps=1e-8 is 0 in float16."""
    model = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 1)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = torch.tensor([1, 2])

    def forward(model, batch):
        return model(batch).float().pow(2).mean()

    sentinel = sentinel_for(model, forward, optimizer=optimizer)
    (given,) = sentinel.steps([batch])
    sentinel.backward(forward(model, given))
    with pytest.raises(TrainingAborted):
        sentinel.step()
    (incident,) = sentinel.incidents
    found = incident.diagnosis
    assert (found.cause, found.phase, found.module) == ("optimizer", "optimizer", "0")
    assert "eps" in found.remedy[0]


def test_infinity_from_adding_up_gradients_in_bfloat16(diagnosed):
    """DeepSpeed PR 8035: a sum between backward and step exceeds the largest bfloat16."""

    def accumulate(model):
        model.weight.grad[0, 1].add_(3e38).add_(3e38)

    model = nn.Linear(3, 1).bfloat16()
    found = diagnosed(
        model,
        [torch.randn(8, 3).bfloat16()],
        lambda model, x: model(x).pow(2).mean(),
        after_backward=accumulate,
    ).diagnosis
    assert (found.cause, found.phase) == ("precision", "reduce")
    assert "element 1 of weight" in "\n".join(found.evidence)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 1)
        self.gate = nn.Parameter(torch.zeros(4))


def test_zero_initialised_gate_under_a_norm(diagnosed, line):
    """DeepSpeed#8415: sqrt'(0) at the initial value, on every step."""

    def forward(model, x):
        return (model.lin(x) - 1).pow(2).mean() + 0.01 * model.gate.pow(2).sum().sqrt()

    found = diagnosed(Gated(), [torch.randn(8, 4)], forward).diagnosis
    assert (found.cause, found.phase, found.op) == ("math", "backward", "aten.div.Tensor")
    assert (found.module, found.node) == ("", "SqrtBackward0")
    assert found.source == line(forward, "sqrt()")
    assert "> gate" in "\n".join(found.evidence)


class Block(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.tied = tied

    def forward(self, h):
        return (self.tied(h).pow(2).sum(1) * 0).sqrt()


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.tied = nn.Linear(3, 3, bias=False)
        self.blk = Block(self.tied)
        self.reentrant = reentrant

    def forward(self, x):
        h = self.tied(x)
        return checkpoint(self.blk, h, use_reentrant=self.reentrant).sum() + h.sum()


@pytest.mark.parametrize("reentrant", [False, True])
def test_fault_in_a_checkpointed_block(reentrant, diagnosed, line):
    """pytorch#81296: recomputation in backward, a tied weight: one incident, the right block."""
    incident = diagnosed(Checkpointed(reentrant), [torch.randn(2, 3)], lambda model, x: model(x))
    found = incident.diagnosis
    assert (found.cause, found.phase, found.op) == ("math", "backward", "aten.div.Tensor")
    assert (found.module, found.node) == ("blk", "SqrtBackward0")
    assert found.source == line(Block.forward, "sqrt()")
    assert [tensor.name for tensor in incident.tensors] == ["tied.weight"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(16, 16)
        self.k = nn.Linear(16, 16)

    def forward(self, x):
        scores = torch.bmm(self.q(x), self.k(x).transpose(1, 2)) / 4
        return torch.bmm(torch.softmax(scores, -1), x)


def test_half_precision_attention_scores_overflow(diagnosed, line):
    """lit-llama#294, transformers#5651: q.k exceeds 65504; the softmax is not to blame."""
    model = nn.Sequential()
    model.add_module("attn", Attention())
    with torch.no_grad():
        model.attn.q.weight.mul_(400)
        model.attn.k.weight.copy_(model.attn.q.weight)

    def forward(model, x):
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        return out.float().pow(2).mean()

    found = diagnosed(model, [torch.randn(2, 5, 16)], forward).diagnosis
    assert (found.cause, found.phase, found.op) == ("precision", "forward", "aten.bmm.default")
    assert found.module == "attn"
    assert found.source == line(Attention.forward, "scores =")
    told = "\n".join(found.evidence)
    assert "65504" in told
    assert "aten._softmax.default" in told
    assert any("float32" in text and "attn" in text for text in found.remedy)


class Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.n = n
        y = torch.zeros_like(x)
        y[:n] = x[:n] * 2
        return y

    @staticmethod
    def backward(ctx, g):
        gx = torch.empty_like(g)
        gx[: ctx.n] = g[: ctx.n] * 2
        return gx, None


@pytest.mark.parametrize("comes_back", [True, False])
def test_gradient_rows_nobody_wrote(comes_back, diagnosed, monkeypatch):
    """flash-linear-attention PR 892: whatever a replay finds in old memory, it is not the hardware."""
    allocate = torch.empty_like
    fired = []

    def dirty(tensor):
        fired.append(True)
        return allocate(tensor).fill_(torch.nan if comes_back or len(fired) == 1 else 0.5)

    class Attn(nn.Module):
        def forward(self, x):
            return Varlen.apply(x, 6)

    model = nn.Sequential()
    model.add_module("proj", nn.Linear(4, 4))
    model.add_module("attn", Attn())
    monkeypatch.setattr(torch, "empty_like", dirty)
    found = diagnosed(model, [torch.randn(8, 4)], lambda model, x: model(x).pow(2).mean()).diagnosis
    assert found.cause == "operator"
    assert found.phase == "backward"
    assert "VarlenBackward" in "\n".join(found.evidence)
    if comes_back:
        assert (found.node, found.module) == ("VarlenBackward", "attn")
        assert "rows 6-7" in "\n".join(found.evidence)


def test_uninitialised_memory_is_found_even_when_it_happens_to_be_finite(diagnosed):
    """NaN by chance in the run, finite by chance in the replay: so that fills fresh memory with NaN."""

    class Buggy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, state):
            ctx.state = state
            return x * 2

        @staticmethod
        def backward(ctx, g):
            gx = torch.empty_like(g)
            gx[:-1] = g[:-1]
            gx[-1] = gx[-1] * 0 if ctx.state else torch.nan  # old memory, made certain
            ctx.state.append(True)
            return gx, None

    state = []
    found = diagnosed(
        nn.Linear(4, 4), [torch.randn(8, 4)], lambda model, x: Buggy.apply(model(x), state).pow(2).mean()
    ).diagnosis
    assert (found.cause, found.confidence) == ("operator", 0.85)
    assert "BuggyBackward" in "\n".join(found.evidence)


def flip_bit(tensor, element, bit):
    bits = tensor.view(torch.int32).view(-1)
    bits[element] ^= 1 << bit


def test_flipped_bit_in_a_gradient(sentinel_for):
    """torchtitan#951, dion#76: one huge element, once; the replay is clean and differs in one bit."""
    model = nn.Linear(4, 2)

    def forward(model, x):
        return model(x).pow(2).mean()

    sentinel = sentinel_for(
        model, forward, NanCallback(), MagnitudeCallback(max_global_norm=1e6, action="skip")
    )
    for step, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(3)])):
        sentinel.backward(forward(model, batch))
        if step == 1:
            flip_bit(model.weight.grad, 5, 30)
        sentinel.step()
    (incident,) = sentinel.incidents
    found = incident.diagnosis
    assert (found.cause, found.confidence) == ("hardware", 0.95)
    assert "element 5, bit 30" in "\n".join(found.evidence)


@pytest.mark.parametrize("recovery", [True, False])
def test_divergence_of_the_learning_rate(recovery, sentinel_for):
    """ChatGLM2-6B#519: the step that shows Inf is innocent, the learning rate jumped long before."""
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    callbacks = [NanCallback(), Rollback(every=5)] if recovery else [NanCallback()]

    def forward(model, x):
        return (model(x) - x.sum(1, keepdim=True)).pow(2).mean()

    sentinel = sentinel_for(model, forward, *callbacks, optimizer=optimizer)
    for step, batch in enumerate(sentinel.steps([torch.randn(16, 6) for _ in range(60)])):
        optimizer.param_groups[0]["lr"] = 5.0 if step >= 6 else 0.05
        sentinel.backward(forward(model, batch))
        sentinel.step()
        if sentinel.incidents:
            break
    found = sentinel.incidents[0].diagnosis
    assert (found.cause, found.phase, found.op) == ("optimizer", "forward", "aten.pow.Tensor_Scalar")
    assert "learning rate" in found.remedy[0]


def causal(h):
    scores = h @ h.T
    return torch.softmax(scores.masked_fill(torch.triu(torch.ones(4, 4), 1).bool(), -INF), -1) @ h


def added_mask(h):
    return torch.softmax(h @ h.T + torch.full((4, 4), -INF).triu(1), -1) @ h


def sdpa(h):
    return functional.scaled_dot_product_attention(
        h[None, None], h[None, None], h[None, None], is_causal=True
    )


def norm_at_zero(h):
    return (h * torch.tensor([[0.0], [1.0], [1.0], [1.0]])).norm(dim=1)


def running_minimum(h):
    return torch.minimum(torch.full((4,), INF), h.pow(2).sum(1))


def masked_logsumexp(h):
    return torch.logsumexp(h.masked_fill(torch.eye(4, 4).bool(), -INF), 1)


def power_of_relu(h):
    return (torch.relu(h) + 0).pow(0.5)


def top_k(h):
    least = h.topk(2, 1).values[:, -1:]
    return torch.softmax(torch.where(h < least, torch.full_like(h, -INF), h), 1)


def atan2_at_zero(h):
    return torch.atan2(h * 0, h * 0) + h


def deviation_with_eps(h):
    return ((h - h).var(1) + 1e-6).sqrt() + h.sum(1)


def max_pool(h):
    return functional.max_pool1d(h[None], 3, padding=1)


HEALTHY = [
    causal, added_mask, sdpa, norm_at_zero, running_minimum, masked_logsumexp,
    power_of_relu, top_k, atan2_at_zero, deviation_with_eps, max_pool,
]  # fmt: skip


@pytest.mark.parametrize("healthy", HEALTHY, ids=lambda f: f.__name__)
def test_infinities_that_healthy_code_makes(healthy, diagnosed):
    """returnn#1446, pytorch PR 187653: no incident, and a walk from a healthy result finds no origin."""
    model = nn.Linear(4, 4)
    assert diagnosed(model, [torch.randn(4, 4)], lambda model, x: healthy(model(x)).pow(2).mean()) is None


@pytest.mark.parametrize("healthy", HEALTHY, ids=lambda f: f.__name__)
def test_a_fault_beside_healthy_infinities_is_the_one_that_is_blamed(healthy, diagnosed):
    def forward(model, x):
        good = healthy(model.one(x)).pow(2).mean()
        return good + torch.log(model.two(x) * 0).mean()

    model = nn.Module()
    model.one, model.two = nn.Linear(4, 4), nn.Linear(4, 4)
    found = diagnosed(model, [torch.randn(4, 4)], forward).diagnosis
    assert (found.cause, found.phase, found.op) == ("math", "forward", "aten.log.default")


def test_the_weights_are_untouched_by_all_this(diagnosed):
    model = nn.Linear(4, 3)
    before = copy.deepcopy(model.state_dict())
    same = torch.randn(3, 4)
    diagnosed(model, [{"a": same, "b": same}], distance)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
