"""A finite loss whose gradients are not, or a loss that is not finite itself: the model's own formulas."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional


def test_distance_of_identical_embeddings(watch, drive, nonfinite, told, named):
    """pytorch#160016, #2421: a hand-written Euclidean distance; one pair is equal, so sqrt'(0) is inf.

    The loss is fine, every gradient of the shared encoder is NaN; one duplicate in one batch is enough.
    """
    encoder = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    pairs = [(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(4)]
    pairs[1][1][2] = pairs[1][0][2]
    sentinel = watch(encoder, optimizer)

    def distance(pair):
        loss = ((encoder(pair[0]) - encoder(pair[1])) ** 2).sum(1).sqrt().mean()
        assert loss.isfinite()
        return loss

    assert drive(sentinel, pairs, distance) == ["continue", "skip", "continue", "continue"]
    assert told(sentinel) == [(1, "nonfinite_gradient", "skipped")]
    incident = sentinel.incidents[0]
    assert named(incident) == {"weight", "bias"}
    assert incident.diagnosis.phase == "backward"
    assert incident.samples == ()  # every input was finite: the data is not to blame
    assert nonfinite(encoder, optimizer) == []
    assert sentinel.applied_steps == 3


class Branches(nn.Module):
    """Takes the safe branch of a where(), but computes both."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.kind = kind

    def forward(self, batch):
        x = self.lin(batch)
        if self.kind == "log":
            return torch.where(x > 0, torch.log(x), x)
        if self.kind == "sqrt":
            return torch.where(x > 0, torch.sqrt(x), x)
        return torch.where(x < -1e9, torch.exp(x + 200), x)


POINTS = torch.tensor([[1.0, 2.0], [-3.0, 0.5]])


def test_unselected_branch_that_does_no_harm(watch, drive):
    """pytorch#68425, variant log: the forward pass holds NaN in the branch not taken, the gradients do not.

    log(x < 0) is NaN, yet its gradient 0 / x is 0: an alarm here would be false.
    """
    torch.manual_seed(0)
    model = Branches("log")
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with torch.no_grad():
        assert torch.log(model.lin(POINTS)).isnan().any()
    assert drive(sentinel, [POINTS] * 3, lambda batch: model(batch).sum()) == ["continue"] * 3
    assert sentinel.incidents == ()


@pytest.mark.parametrize("kind", ["sqrt", "exp"])
def test_unselected_branch_that_poisons_the_gradient(kind, watch, drive, nonfinite, told, named):
    """pytorch#187297, #52248 and many duplicates: where() with 0 * inf or 0 / NaN in the branch not taken.

    Output and loss are finite and right; the gradients are NaN.
    """
    torch.manual_seed(0)
    model = Branches(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    safe = torch.full((2, 2), 0.1)
    with torch.no_grad():
        model.lin.weight.copy_(torch.eye(2))
        model.lin.bias.zero_()
    sentinel = watch(model, optimizer)
    batches = [POINTS if kind == "sqrt" else POINTS * 10, safe]
    if kind == "exp":
        batches[1] = safe - 300  # exp(x + 200) underflows there, so the same model is healthy

    assert drive(sentinel, [batches[1], batches[0], batches[1]], lambda b: model(b).mean()) == [
        "continue",
        "skip",
        "continue",
    ]
    assert told(sentinel) == [(1, "nonfinite_gradient", "skipped")]
    assert named(sentinel.incidents[0]) == {"lin.weight", "lin.bias"}
    assert math.isfinite(sentinel.incidents[0].loss)
    assert nonfinite(model, optimizer) == []


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_over_an_empty_sequence(need_weights, watch, drive, nonfinite, told, named):
    """pytorch#41508: a sample that is all padding is dropped from the loss, yet poisons in_proj for all.

    With need_weights=False the safe softmax is used and nothing is wrong.
    """
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    optimizer = torch.optim.AdamW(attention.parameters(), lr=1e-3)
    sentinel = watch(attention, optimizer)
    batches = []
    for step in range(3):
        padding = torch.zeros(3, 4, dtype=torch.bool)
        padding[0, 3] = True
        padding[1] = step == 1
        batches.append({"x": torch.randn(3, 4, 8), "padding": padding})

    def loss_of(batch):
        x = batch["x"]
        out, _ = attention(x, x, x, key_padding_mask=batch["padding"], need_weights=need_weights)
        loss = out[[0, 2]].pow(2).mean()
        assert loss.isfinite()
        return loss

    actions = drive(sentinel, batches, loss_of)
    if need_weights:
        assert actions == ["continue", "skip", "continue"]
        assert told(sentinel) == [(1, "nonfinite_gradient", "skipped")]
        assert {"in_proj_weight", "in_proj_bias"} <= named(sentinel.incidents[0])
        assert "out_proj.bias" not in named(sentinel.incidents[0])
    else:
        assert actions == ["continue"] * 3
        assert sentinel.incidents == ()
    assert nonfinite(attention, optimizer) == []


@pytest.mark.parametrize(
    "formula",
    [
        pytest.param(lambda h: (h * 0).pow(0.5).sum() + h.sum(), id="pow(0, 0.5)"),
        pytest.param(lambda h: torch.acos(h * 0 + 1).sum(), id="acos(1)"),
        pytest.param(lambda h: (h / (h * 0)).nan_to_num(0, 0, 0).sum() + h.sum(), id="nan_to_num(h / 0)"),
        pytest.param(lambda h: torch.where(h * 0 == 0, h, torch.log(h * 0)).sum(), id="where(log(0))"),
        pytest.param(lambda h: torch.softmax(h - torch.inf, 1).nansum() + h.sum(), id="softmax of -inf"),
        pytest.param(lambda h: torch.xlogy(h * 0, h * 0).sum() + h.sum(), id="xlogy(0, 0)"),
    ],
)
def test_finite_loss_with_a_nonfinite_gradient(formula, watch, drive, nonfinite, told):
    """The kind behind all of these: singular points of a derivative, reached by a healthy forward pass."""
    lin = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(lin.parameters())
    sentinel = watch(lin, optimizer)

    def loss_of(batch):
        loss = formula(lin(batch["x"])) if batch["singular"] else lin(batch["x"]).pow(2).mean()
        assert loss.isfinite()
        return loss

    batches = [{"x": torch.randn(4, 4), "singular": step == 2} for step in range(5)]
    assert drive(sentinel, batches, loss_of) == ["continue", "continue", "skip", "continue", "continue"]
    assert told(sentinel) == [(2, "nonfinite_gradient", "skipped")]
    assert nonfinite(lin, optimizer) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_nonfinite_loss_with_harmless_gradients(value, optimizer_class, watch, drive, nonfinite, told):
    """A logged regulariser or an overflowed constant: the loss is NaN or Inf, every gradient is finite.

    Gradient checks see nothing. The loss itself is wrong, so the step must not be made.
    """
    lin = nn.Linear(4, 1)
    optimizer = optimizer_class(lin.parameters(), lr=0.1)
    sentinel = watch(lin, optimizer)

    def loss_of(batch):
        loss = lin(batch["x"]).pow(2).mean()
        return loss * 0 + value if batch["bad"] else loss

    batches = [{"x": torch.randn(4, 4), "bad": step == 1} for step in range(3)]
    assert drive(sentinel, batches, loss_of, max_norm=1.0) == ["continue", "skip", "continue"]
    assert told(sentinel) == [(1, "nonfinite_loss", "skipped")]
    assert sentinel.incidents[0].tensors == ()
    assert sentinel.incidents[0].diagnosis.phase == "loss"
    assert nonfinite(lin, optimizer) == []


def test_nan_loss_times_zero_weight(watch, drive, told):
    """An auxiliary loss with weight 0 is meant to be off; NaN * 0 is NaN all the same."""
    lin = nn.Linear(4, 1)
    sentinel = watch(lin, torch.optim.SGD(lin.parameters(), lr=0.1))

    def loss_of(step):
        out = lin(torch.randn(4, 4))
        auxiliary = torch.log(-out.detach().abs()) if step == 1 else out.detach().abs()
        return out.pow(2).mean() + 0.0 * auxiliary.mean()

    assert drive(sentinel, [0, 1, 2], loss_of) == ["continue", "skip", "continue"]
    assert told(sentinel) == [(1, "nonfinite_loss", "skipped")]


def test_nan_only_in_the_imaginary_part(watch, drive, nonfinite, told, named):
    """A complex-valued layer whose gradient is NaN in its imaginary part alone; the real part looks fine."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.other = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return (self.w.real * x + self.w.imag * x + self.other * x).pow(2).sum()

    model = Complex()
    optimizer = torch.optim.Adam(model.parameters())
    sentinel = watch(model, optimizer)

    def loss_of(step):
        loss = model(torch.ones(4))
        # d sqrt(0) in one imaginary part: a finite term with an infinite gradient
        return loss + (model.w.imag[2] * 0).sqrt() if step == 1 else loss

    assert drive(sentinel, [0, 1, 2], loss_of) == ["continue", "skip", "continue"]
    assert told(sentinel) == [(1, "nonfinite_gradient", "skipped")]
    (tensor,) = sentinel.incidents[0].tensors
    assert (tensor.name, tensor.nonfinite, tensor.first_index) == ("w", 1, (2,))
    assert nonfinite(model, optimizer) == []


FUTURE = torch.ones(4, 4).triu(1).bool()
BENIGN = {
    "causal mask filled": lambda h: torch.softmax((h @ h.T).masked_fill(FUTURE, -torch.inf), -1) @ h,
    "additive mask": lambda h: torch.softmax(h @ h.T + torch.full((4, 4), -torch.inf).triu(1), -1) @ h,
    "causal sdpa": lambda h: functional.scaled_dot_product_attention(
        h[None, None], h[None, None], h[None, None], is_causal=True
    ),
    "norm of a zero row": lambda h: (h * torch.tensor([[0.0], [1.0], [1.0], [1.0]])).norm(dim=1),
    "running minimum": lambda h: torch.minimum(torch.full((4,), torch.inf), h.pow(2).sum(1)),
    "logsumexp with masked entries": lambda h: torch.logsumexp(
        h.masked_fill(torch.eye(4).bool(), -torch.inf), 1
    ),
    "root of a relu": lambda h: (torch.relu(h) + 0).pow(0.5),
    "top-k filter": lambda h: torch.softmax(
        torch.where(h < h.topk(2, 1).values[:, -1:], torch.full_like(h, -torch.inf), h), 1
    ),
    "atan2 at the origin": lambda h: torch.atan2(h * 0, h * 0) + h,
    "std of a constant": lambda h: ((h - h).var(1) + 1e-6).sqrt() + h.sum(1),
    "padded max pool": lambda h: functional.max_pool1d(h[None], 3, padding=1),
    "normalised zero vector": lambda h: functional.normalize(h * 0) + h,
    "std backward at zero": lambda h: (h - h).std(1) + h.sum(1),
    "cross entropy with -inf logits": lambda h: functional.cross_entropy(
        torch.cat([h, torch.full((4, 2), -torch.inf)], 1), torch.zeros(4, dtype=torch.long)
    ),
}


@pytest.mark.parametrize("name", BENIGN)
def test_infinities_made_on_purpose(name, watch, drive):
    """returnn#1446, pytorch#182156: masks, running minima, kernels that make and mask infinities inside."""
    origin = torch.zeros(1, requires_grad=True)
    if (
        name.startswith("atan2")
        and not torch.autograd.grad(torch.atan2(origin, origin), origin)[0].isfinite()
    ):
        pytest.skip("in this torch (2.6) the derivative of atan2 at 0 is NaN")
    lin = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(lin.parameters())
    sentinel = watch(lin, optimizer)
    batches = [torch.randn(4, 4) for _ in range(3)]
    actions = drive(sentinel, batches, lambda x: BENIGN[name](lin(x)).pow(2).mean(), max_norm=1.0)
    assert actions == ["continue"] * 3
    assert sentinel.incidents == ()
