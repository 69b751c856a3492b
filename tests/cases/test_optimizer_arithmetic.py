"""Finite gradients, and the update is NaN all the same; or moments that outlive the weights' rescue."""

import copy
import math

import pytest
import torch
from torch import nn

from gradsentinel import Action, NanCallback, Rollback, TrainingAborted


class Bag(nn.Module):
    """An embedding of which most rows are not in the batch: their gradient is exactly 0."""

    def __init__(self, dtype=torch.float32, *, sparse: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 3, sparse=sparse, dtype=dtype)
        self.lin = nn.Linear(3, 1, dtype=dtype)

    def loss(self, rows):
        loss = self.lin(self.emb(torch.tensor(rows))).float().pow(2).mean()
        assert loss.isfinite()
        return loss


DIVIDING = {
    "Adam for-loop": lambda p, **kw: torch.optim.Adam(p, 1e-3, foreach=False, **kw),
    "Adam foreach": lambda p, **kw: torch.optim.Adam(p, 1e-3, foreach=True, **kw),
    "AdamW": lambda p, **kw: torch.optim.AdamW(p, 1e-3, **kw),
    "NAdam": lambda p, **kw: torch.optim.NAdam(p, 1e-3, **kw),
    "Adamax": lambda p, **kw: torch.optim.Adamax(p, 1e-3, **kw),
    "RMSprop": lambda p, **kw: torch.optim.RMSprop(p, 1e-3, **kw),
    "Adagrad": lambda p, **kw: torch.optim.Adagrad(p, 1e-3, **kw),
}


def poisons(make, dtype, **settings):
    """Tell by plain torch whether this optimizer turns 0 / (0 + eps) into NaN."""
    model = Bag(dtype)
    optimizer = make(model.parameters(), **settings)
    model.loss([1, 2]).backward()
    optimizer.step()
    return not model.emb.weight.isfinite().all()


@pytest.mark.parametrize("name", DIVIDING)
@pytest.mark.parametrize(
    ("dtype", "eps"),
    [
        pytest.param(torch.float16, {"eps": 1e-8}, id="fp16"),
        pytest.param(torch.float32, {"eps": 0.0}, id="eps 0"),
        pytest.param(torch.float32, {"eps": 1e-50}, id="eps below float32"),
    ],
)
def test_epsilon_that_is_zero_in_the_parameters_dtype(name, dtype, eps, watch, named, nonfinite):
    """optax#1754, glide-finetune#5, pytorch#8860: eps=1e-8 is 0 in fp16, and 0 / (sqrt(0) + 0) is NaN.

    All gradients are finite and the loss is fine; the rows that were not in the batch are gone. The
    weights go back, with the moments; with a larger eps the run goes on.
    """
    if not poisons(DIVIDING[name], dtype, **eps):
        # This optimizer divides otherwise: then nothing is wrong, and nothing may be reported.
        model = Bag(dtype)
        sentinel = watch(model, DIVIDING[name](model.parameters(), **eps))
        sentinel.backward(model.loss([1, 2]))
        sentinel.step()
        assert sentinel.incidents == ()
        return
    model = Bag(dtype)
    initial = copy.deepcopy(model.state_dict())
    optimizer = DIVIDING[name](model.parameters(), **eps)
    sentinel = watch(model, optimizer, NanCallback(), Rollback())
    sentinel.backward(model.loss([1, 2]))
    sentinel.step()

    (incident,) = sentinel.incidents
    assert (incident.step, str(incident.kind)) == (0, "nonfinite_parameter")
    assert str(incident.outcome) == "rolled_back"
    assert "emb.weight" in named(incident)
    assert incident.diagnosis.cause == "optimizer"
    assert incident.diagnosis.phase == "optimizer"
    assert incident.diagnosis.module == "emb"
    divides = "aten._foreach_addcdiv_.ScalarList" if "foreach" in name else "aten.addcdiv_.default"
    assert incident.diagnosis.op == divides
    assert "eps" in incident.message
    assert sentinel.last_action is Action.ROLLBACK
    assert not sentinel.applied
    assert all(torch.equal(initial[key], value) for key, value in model.state_dict().items())
    assert nonfinite(model, optimizer) == []

    for group in optimizer.param_groups:
        group["eps"] = 1e-4
    for rows in ([0, 2], [3, 4], [1, 5]):
        sentinel.backward(model.loss(rows))
        sentinel.step()
    assert len(sentinel.incidents) == 1
    assert sentinel.step_count == 3
    assert nonfinite(model, optimizer) == []


@pytest.mark.parametrize("name", DIVIDING)
def test_epsilon_large_enough_for_half_precision(name, watch, nonfinite):
    """The same models with eps=1e-4 are healthy."""
    model = Bag(torch.float16)
    optimizer = DIVIDING[name](model.parameters(), eps=1e-4)
    sentinel = watch(model, optimizer)
    for rows in ([1, 2], [0, 2], [3, 4]):
        sentinel.backward(model.loss(rows))
        sentinel.step(1.0)
    assert sentinel.incidents == ()
    assert nonfinite(model, optimizer) == []


def test_sparse_adam_divides_zero_by_zero(watch, named, nonfinite):
    """SparseAdam looks at touched rows only: a touched row with a zero gradient is 0 / (sqrt(0) + eps)."""
    model = Bag(sparse=True)
    model.lin.requires_grad_(requires_grad=False)
    nn.init.zeros_(model.lin.weight)  # so that the touched rows' gradients are exactly 0
    optimizer = torch.optim.SparseAdam(model.emb.parameters(), eps=1e-50)
    sentinel = watch(model, optimizer, NanCallback(), Rollback())
    sentinel.backward(model.loss([1, 2]))
    sentinel.step()
    (incident,) = sentinel.incidents
    assert (incident.step, str(incident.kind)) == (0, "nonfinite_parameter")
    assert named(incident) == {"emb.weight"}
    assert (incident.diagnosis.cause, incident.diagnosis.op) == ("optimizer", "aten.div_.Tensor")
    assert nonfinite(model, optimizer) == []


def test_stops_when_no_good_state_is_kept(watch, told):
    """Without Rollback the poisoned weights cannot be undone: stop at once, and say what would help."""
    model = Bag(torch.float16)
    sentinel = watch(model, torch.optim.Adam(model.parameters()))
    sentinel.backward(model.loss([1, 2]))
    with pytest.raises(TrainingAborted, match=r"Rollback.*emb\.weight.*eps=1e-08 is 0 in float16"):
        sentinel.step()
    assert told(sentinel) == [(0, "nonfinite_parameter", "aborted")]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_one_inf_gradient_never_reaches_the_moments(
    value, optimizer_class, watch, drive, term, told, nonfinite
):
    """DeepSpeed PR 8035: bf16 has no loss scaler, nothing checks for Inf; Adam's moments keep it for ever.

    Weights restored from a checkpoint are poisoned again by the moments at the next step.
    """
    model = nn.Linear(3, 1).bfloat16()
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    sentinel = watch(model, optimizer)
    one_bad = torch.zeros(1, 3)
    one_bad[0, 1] = value
    step = iter(range(7))

    def loss_of(x):
        loss = model(x).pow(2).mean()
        return loss + term(model.weight, one_bad) if next(step) == 3 else loss

    actions = drive(sentinel, [torch.randn(8, 3).bfloat16() for _ in range(7)], loss_of)
    assert actions == ["continue"] * 3 + ["skip"] + ["continue"] * 3
    assert told(sentinel) == [(3, "nonfinite_gradient", "skipped")]
    (tensor,) = sentinel.incidents[0].tensors
    assert (tensor.name, tensor.nonfinite, tensor.first_index) == ("weight", 1, (0, 1))
    assert nonfinite(model, optimizer) == []


def test_accumulation_overflows_in_bfloat16(watch, drive, term, told, nonfinite):
    """DeepSpeed PR 8035: the sum of two finite bf16 gradients of 3e38 is Inf, with the second of them."""
    model = nn.Linear(3, 1, bias=False).bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sentinel = watch(model, optimizer)
    gradients = [1.0] * 4 + [1.0, 3e38, 3e38, 1.0] + [1.0] * 4
    actions = drive(sentinel, gradients, lambda g: term(model.weight, torch.full((1, 3), g)), accumulate=4)
    assert actions == ["continue", "skip", "continue"]
    assert told(sentinel) == [(1, "nonfinite_gradient", "skipped")]
    assert sentinel.incidents[0].microbatch == 2
    assert nonfinite(model, optimizer) == []


def quadratic(model):
    return lambda x: model(x).pow(2).mean()


class BrokenSchedule(torch.optim.lr_scheduler.LambdaLR):
    """A schedule with a bug: one step has no finite learning rate."""

    def __init__(self, optimizer, at, value):
        super().__init__(optimizer, lambda step: value if step == at else 1.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("at", [3, 15], ids=["early", "late"])
def test_learning_rate_that_is_not_finite(value, optimizer_class, at, watch, drive, nonfinite):
    """A warm-up that divides by zero: gradients are finite, the update is NaN.

    Caught after the step early in the run, and with the next loss at the latest. A schedule that does
    it again after each rollback stops the run with a good state; it must not loop.
    """
    model = nn.Linear(4, 1)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    scheduler = BrokenSchedule(optimizer, at, value)
    rollback = Rollback(every=2, confirm_after=1)
    sentinel = watch(model, optimizer, NanCallback(), rollback, scheduler=scheduler)
    with pytest.raises(TrainingAborted, match="rollbacks"):
        drive(sentinel, [torch.randn(8, 4) for _ in range(100)], quadratic(model))
    first = sentinel.incidents[0]
    assert first.step in (at, at + 1)
    assert str(first.kind) == "nonfinite_parameter"
    assert str(first.outcome) == "rolled_back"
    assert len(sentinel.incidents) == 4
    assert max(rollback.known_good_steps) <= at


@pytest.mark.parametrize("setting", ["lr", "weight_decay", "momentum"])
def test_hyperparameter_set_to_nan_once(setting, watch, drive, told, nonfinite):
    """A user's hook writes NaN into the parameter group: one step is lost, the setting restored with it."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sentinel = watch(model, optimizer, NanCallback(), Rollback(every=1, confirm_after=0))
    step = iter(range(8))

    def loss_of(x):
        if next(step) == 4:
            optimizer.param_groups[0][setting] = torch.nan
        return model(x).pow(2).mean()

    drive(sentinel, [torch.randn(8, 4) for _ in range(8)], loss_of)
    assert told(sentinel) == [(4, "nonfinite_parameter", "rolled_back")]
    assert sentinel.incidents[0].diagnosis.cause == "optimizer"
    assert f"{setting} is nan" in sentinel.incidents[0].message
    assert nonfinite(model, optimizer) == []
    assert sentinel.step_count == 7


@pytest.mark.parametrize("callbacks", [[], [Rollback(every=5, confirm_after=1)]], ids=["alone", "rollback"])
def test_bad_update_in_the_very_last_step(callbacks, watch, told, nonfinite):
    """No later loss and no later check would show it, and then the final weights are saved.

    Closing the run is the last chance: it goes back to the last good state, or says that there is none.
    """
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sentinel = watch(model, optimizer, NanCallback(), *callbacks)
    for step in range(23):
        if step == 22:
            optimizer.param_groups[0]["lr"] = torch.nan
        sentinel.backward(quadratic(model)(torch.randn(8, 4)))
        sentinel.step()
    if callbacks:
        sentinel.close()
        assert nonfinite(model, optimizer) == []
    else:
        with pytest.raises(TrainingAborted, match="weight"):
            sentinel.close()
    assert [(kind, outcome) for _, kind, outcome in told(sentinel)] == [
        ("nonfinite_parameter", "rolled_back" if callbacks else "aborted")
    ]


def test_momentum_overflows(watch, drive, term, told, named, nonfinite):
    """Finite gradients of 2e38 in a row: 0.9 * m + g is Inf in the momentum buffer."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-38, momentum=0.9)
    sentinel = watch(model, optimizer, NanCallback(), Rollback(every=1, confirm_after=0))
    drive(sentinel, [1.0, 2e38, 2e38, 1.0], lambda g: term(model.weight, torch.full((1, 4), g)))
    assert [(step, outcome) for step, _, outcome in told(sentinel)] == [(2, "rolled_back")]
    assert "weight:momentum_buffer" in named(sentinel.incidents[0])
    found = sentinel.incidents[0].diagnosis
    assert (found.cause, found.phase, found.op) == ("optimizer", "optimizer", "aten.add_.Tensor")
    assert nonfinite(model, optimizer) == []


def test_second_moment_overflows_while_weights_stay_finite(watch, drive, told, named, nonfinite):
    """A gradient of 1e25 squared is Inf in Adam's exp_avg_sq: m / sqrt(inf) is 0, the weight is stuck.

    Nothing else is non-finite, ever: no loss, no gradient, no weight. The step is not made.
    """
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    sentinel = watch(model, optimizer, NanCallback(), Rollback(every=1, confirm_after=0))
    drive(sentinel, [1.0, 1e25, 1.0], lambda factor: (model.weight * factor).sum())
    assert told(sentinel) == [(1, "magnitude", "skipped")]
    assert named(sentinel.incidents[0]) == {"weight"}
    found = sentinel.incidents[0].diagnosis
    assert (found.cause, found.phase, found.op) == ("optimizer", "optimizer", "aten.addcmul_.default")
    assert "weight:exp_avg_sq would be Inf" in found.evidence[0]
    assert nonfinite(model, optimizer) == []
    assert sentinel.step_count == 3


def test_second_moment_that_has_overflowed_is_gone_back_from(watch, drive, told, named, nonfinite):
    """Likewise where the loop clips by a bound that bounds nothing: only the state shows it then."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    sentinel = watch(model, optimizer, NanCallback(), Rollback(every=1, confirm_after=0))
    drive(sentinel, [1.0, 1e25, 1.0], lambda factor: (model.weight * factor).sum(), max_norm=math.inf)
    assert told(sentinel) == [(1, "nonfinite_state", "rolled_back")]
    assert named(sentinel.incidents[0]) == {"weight:exp_avg_sq"}
    found = sentinel.incidents[0].diagnosis
    assert (found.cause, found.phase, found.op) == ("optimizer", "optimizer", "aten.addcmul_.default")
    assert nonfinite(model, optimizer) == []
    assert sentinel.step_count == 2


def test_clipping_saves_the_second_moment(watch, drive, nonfinite):
    """The same gradient, clipped by its true norm, is harmless."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    sentinel = watch(model, optimizer)
    actions = drive(sentinel, [1.0, 1e25, 1.0], lambda f: (model.weight * f).sum(), max_norm=1.0)
    assert actions == ["continue"] * 3
    assert sentinel.incidents == ()
    assert nonfinite(model, optimizer) == []
