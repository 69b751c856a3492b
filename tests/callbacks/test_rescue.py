"""Rescue: a number that does not fit into the dtype costs nothing, and what is no accident is said."""

import copy
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradsentinel import ConfigurationError, Kind, NanCallback, Outcome, Rescue, Retry, Rollback, Sentinel
from gradsentinel.again.widening import Wide, narrow, widen, widened
from loops import differences

BIG = 3e5  # times a standard normal number: beyond float16


class Net(nn.Module):
    """Its first layer overflows float16 on a large input; what comes later is small again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Squash()
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.first(x))


class Squash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x) / 1e6)


def run(
    folder: Any,
    callbacks: list[Any],
    *,
    make: Callable[[], nn.Module] = Net,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = torch.float16,
    big: float = BIG,
    bad: tuple[int, ...] = (2,),
    steps: int = 5,
    call: Callable[[nn.Module], Any] = lambda model: model,
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda out: out.float().square().mean(),
    scaler: Any = None,
) -> tuple[Sentinel, nn.Module]:
    torch.manual_seed(0)
    model = make().to(dtype) if dtype is not None else make()
    called = call(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    batches = [torch.randn(6, 4) for _ in range(steps)]
    for number in bad:
        batches[number] = batches[number] * big

    def forward(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            return loss(module(batch if dtype is None else batch.to(dtype)))

    sentinel = Sentinel(
        called,
        optimizer,
        callbacks=[NanCallback(), *callbacks],
        forward=forward,
        run_dir=folder,
        scaler=scaler,
    )
    with sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(forward(called, batch))
            sentinel.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules() if not kept(module))
    return sentinel, model


def kept(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), Wide)


def outcomes(sentinel: Sentinel) -> list[tuple[int, str]]:
    return [(i.step, str(i.outcome)) for i in sentinel.incidents]


def handled(sentinel: Sentinel) -> list[tuple[int, str]]:
    return [(step, outcome) for step, outcome in outcomes(sentinel) if outcome != "reported"]


def test_autocast_off_for_the_module_that_the_diagnosis_names(tmp_path):
    sentinel, _ = run(tmp_path, [Retry(), Rescue()])
    (incident,) = sentinel.incidents
    assert incident.outcome is Outcome.RESCUED
    assert incident.diagnosis is not None
    assert incident.diagnosis.module == incident.details["rescue"]["module"] != ""
    assert incident.details["rescue"]["dtype"] == "float32"
    assert sentinel.applied_steps == 5


def test_the_gradients_are_those_of_the_wider_dtype(tmp_path):
    _, rescued = run(tmp_path / "half", [Rescue()], big=2e6)
    _, exact = run(tmp_path / "single", [], autocast=None, big=2e6)
    for (name, one), (_, two) in zip(rescued.named_parameters(), exact.named_parameters(), strict=True):
        assert torch.allclose(one, two, rtol=1e-2, atol=1e-9), name


class Chain(nn.Module):
    """Not one module alone is to blame: float16 does not hold what goes from one to the next either."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.c(self.b(self.a(x)) / 1e4)


def test_the_whole_model_if_one_module_is_not_enough(tmp_path):
    sentinel, _ = run(tmp_path, [Rescue()], make=Chain)
    (incident,) = sentinel.incidents
    assert incident.outcome is Outcome.RESCUED
    assert incident.details["rescue"]["module"] == ""


class Halves(nn.Module):
    """Half precision in every place that a module has: buffers, a recurrent layer, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.tied = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.tied.weight
        self.last = nn.Linear(8, 1)
        self.checkpointing = False

    def forward(self, x):
        h = self.enter(x).square() / 1e6
        h = self.norm(h)
        h, _ = self.recurrent(h[:, None])
        inside = lambda h: self.again(torch.tanh(self.tied(h[:, 0])))  # noqa: E731
        h = checkpoint(inside, h, use_reentrant=False) if self.checkpointing else inside(h)
        return self.last(h)


def Checkpointed() -> nn.Module:
    model = Halves()
    model.checkpointing = True
    return model


@pytest.mark.parametrize("make", [Halves, Checkpointed])
def test_weights_in_half_precision_are_widened(tmp_path, make):
    sentinel, model = run(tmp_path, [Rescue()], make=make, dtype=torch.float16, autocast=None, big=3e3)
    (incident,) = sentinel.incidents
    assert incident.outcome is Outcome.RESCUED
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert {b.dtype for n, b in model.named_buffers() if "num" not in n} == {torch.float16}
    assert torch.isfinite(model.norm.running_var).all()


def test_statistics_that_do_not_fit_into_their_buffer_are_no_rescue(tmp_path):
    """The loss is finite in float32, but the running variance would be infinite in float16."""
    sentinel, model = run(tmp_path, [Rescue()], make=Halves, dtype=torch.float16, autocast=None, big=6e4)
    assert outcomes(sentinel) == [(2, "skipped")]
    assert all(torch.isfinite(b).all() for b in model.buffers())


class Cancels(nn.Module):
    """Divides by what is left of a number after a large one came and went: in bfloat16, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)

    def forward(self, x):
        h = self.enter(x).abs() + 0.5
        large = 0.1 * x.abs().amax().square()
        return h / ((h + large) - large)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_bfloat16_is_widened_for_its_precision(tmp_path, dtype):
    sentinel, _ = run(
        tmp_path, [Rescue()], make=Cancels, dtype=dtype, autocast=None if dtype else torch.bfloat16, big=30
    )
    (incident,) = sentinel.incidents
    assert incident.outcome is Outcome.RESCUED
    assert incident.details["rescue"]["dtype"] == "float32"


def test_a_loss_outside_of_the_model_is_widened_too(tmp_path):
    def loss(out: torch.Tensor) -> torch.Tensor:
        return ((out.half() + 1) * 6e4).square().float().sqrt().mean()

    sentinel, _ = run(tmp_path, [Rescue()], bad=(), loss=loss)
    rescued = [i for i in sentinel.incidents if i.outcome is Outcome.RESCUED]
    assert len(rescued) == sentinel.applied_steps == 5
    assert all(i.details["rescue"]["everything"] for i in rescued)


def test_what_computes_in_float32_is_computed_in_float64(tmp_path):
    """The square of 1e25 does not fit into float32, its root does."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x):
            return self.linear(x).square().sqrt()

    sentinel, model = run(
        tmp_path, [Retry(), Rescue()], make=Root, autocast=None, big=1e25, loss=lambda out: out.mean() / 1e25
    )
    (incident,) = sentinel.incidents
    assert incident.outcome is Outcome.RESCUED
    assert incident.details["rescue"]["dtype"] == "float64"
    assert model.linear.weight.dtype is torch.float32


def test_the_dtype_can_be_chosen(tmp_path):
    sentinel, _ = run(tmp_path, [Rescue(dtype="float64")])
    assert sentinel.incidents[0].details["rescue"]["dtype"] == "float64"


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # the diagnosis traces modules
def test_compiled_code_is_rescued_as_it_is_written(tmp_path):
    sentinel, _ = run(tmp_path, [Rescue()], call=lambda model: torch.compile(model, backend="eager"))
    torch.compiler.reset()
    assert outcomes(sentinel) == [(2, "rescued")]


def test_with_a_grad_scaler_the_scale_stays_as_it_is(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    sentinel, _ = run(tmp_path, [Rescue()], scaler=scaler)
    assert outcomes(sentinel) == [(2, "rescued")]
    assert scaler.get_scale() == 4.0
    assert sentinel.applied_steps == 5


def test_what_is_not_finite_in_any_dtype_is_dropped(tmp_path):
    sentinel, _ = run(tmp_path, [Rescue()], loss=lambda out: (out - out).sqrt().div(out - out).mean(), bad=())
    assert {outcome for _, outcome in outcomes(sentinel)} == {"skipped"}
    assert any("in a wider dtype" in note for note in sentinel.incidents[0].notes)


def test_a_transient_fault_is_not_called_a_rescue(tmp_path):
    """Nothing narrow took part, so the wider dtype cannot be what helped."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    sentinel = Sentinel(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        callbacks=[NanCallback(), Rescue()],
        forward=lambda m, batch: m(batch).square().mean(),
        run_dir=tmp_path,
    )
    with sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(4, 4) for _ in range(4)])):
            loss = model(batch).square().mean()
            sentinel.backward(loss * float("nan") if number == 2 else loss)
            sentinel.step()
    assert outcomes(sentinel) == [(2, "retried")]


def test_the_budget_ends(tmp_path):
    sentinel, _ = run(tmp_path, [Rescue(max_rescues=1)], bad=(1, 3))
    assert outcomes(sentinel) == [(1, "rescued"), (3, "skipped")]
    assert any("budget of 1 rescues" in note for note in sentinel.incidents[1].notes)


def test_many_rescues_of_a_module_give_a_recommendation(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "gradsentinel"):
        sentinel, model = run(tmp_path, [Rescue(recommend_after=2)], bad=(1, 2, 3), steps=6)
    rescued = [i for i in sentinel.incidents if i.outcome is Outcome.RESCUED]
    assert [i.step for i in rescued] == [1, 2, 3]
    name = rescued[0].details["rescue"]["module"]
    assert any(f"{name} needed float32 in 2 steps: keep it in float32" in note for note in rescued[1].notes)
    (said,) = [i for i in sentinel.incidents if i.kind is Kind.CUSTOM]
    assert said.outcome is Outcome.REPORTED
    assert "keep it in float32" in said.message
    assert not any(kept(module) for module in model.modules())


def test_keep_fp32_widens_the_module_for_good(tmp_path):
    callback = Rescue(recommend_after=1, keep_fp32=True)
    sentinel, model = run(tmp_path, [callback], bad=(1, 3, 4), steps=6)
    rescued = [i for i in sentinel.incidents if i.outcome is Outcome.RESCUED]
    assert [i.step for i in rescued] == [1]  # the later ones do not overflow any more
    name = rescued[0].details["rescue"]["module"]
    assert kept(model.get_submodule(name))
    assert callback.state_dict()["kept"] == {name: "float32"}


def test_what_is_kept_in_fp32_stays_so_after_a_restart(tmp_path):
    before = Rescue(recommend_after=1, keep_fp32=True)
    run(tmp_path / "before", [before], bad=(1,))
    state = copy.deepcopy(before.state_dict())
    early, late = Rescue(keep_fp32=True), Rescue(keep_fp32=True)
    early.load_state_dict(state)
    sentinel, _ = run(tmp_path / "early", [early], bad=(1,))
    assert outcomes(sentinel) == []
    torch.manual_seed(0)
    model = Net()
    with Sentinel(model, torch.optim.SGD(model.parameters(), 0.1), callbacks=[NanCallback(), late]):
        late.load_state_dict(state)
    assert any(kept(module) for module in model.modules())


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"max_rescues": -1}, "max_rescues"),
        ({"window": 0}, "window"),
        ({"recommend_after": 0}, "recommend_after"),
        ({"dtype": "half"}, "float64"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong, match):
    with pytest.raises(ConfigurationError, match=match):
        Rescue(**wrong)


# -- modules that compute in a wider dtype ---------------------------------------------------------


def test_widened_modules_are_the_same_again_afterwards():
    model = Halves().half()
    before = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    flat = model.recurrent._flat_weights
    x = torch.randn(3, 4).half()
    with widened([model], torch.float32):
        assert model(x).dtype is torch.float16
    with pytest.raises(RuntimeError, match="shapes"), widened([model], torch.float32):
        model(x.t())
    assert before == {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    assert model.recurrent._flat_weights is flat
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_somebody_elses_forward_is_kept_and_called():
    model = nn.Linear(2, 2)
    calls = []

    def wrapped(x):
        calls.append(x.dtype)
        return nn.functional.linear(x, model.weight, model.bias)

    model.forward = wrapped
    with widened([model], torch.float64):
        model(torch.randn(1, 2))
    assert calls == [torch.float64]
    assert model.forward is wrapped


def test_a_copy_of_a_wide_model_computes_with_its_own_weights():
    model = nn.Sequential(nn.Linear(2, 2)).half()
    made = widen(model[0], torch.float32)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.zero_()
    x = torch.ones(1, 2).half()
    assert not model(x).eq(0).any()
    assert twin(x).eq(0).all()
    narrow(made)
    assert kept(twin[0])
    assert not kept(model[0])


def test_a_wide_model_can_be_saved():
    model = nn.Sequential(nn.Linear(2, 2)).half()
    widen(model, torch.float32)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    x = torch.ones(1, 2).half()
    assert differences(model(x), loaded(x)) == []


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ([Rollback(every=2, confirm_after=0)], "no matter of precision"),
        ([], "far from any healthy one"),  # without an earlier state nobody knows that a bit was flipped
    ],
)
def test_a_flipped_bit_in_a_weight_is_not_rescued_step_after_step(more, note, tmp_path):
    """In float64 everything is finite, but it is the state that is bad: a snapshot is what helps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def forward(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return module(batch).square().mean()

    callbacks = [NanCallback(), Rescue(), *map(copy.copy, more)]
    sentinel = Sentinel(model, optimizer, callbacks=callbacks, forward=forward, run_dir=tmp_path)
    with sentinel:
        for step, batch in enumerate(sentinel.steps([torch.randn(6, 4) for _ in range(10)])):
            if step == 5:
                with torch.no_grad():
                    model.weight[0, 0] = 1e37
            sentinel.backward(forward(model, batch))
            sentinel.step()
    assert "rescued" not in [outcome for _, outcome in outcomes(sentinel)]
    assert outcomes(sentinel)[-1][1] == ("rolled_back" if more else "skipped")
    assert bool(model.weight.abs().max() < 10) == bool(more)
    assert any(note in text for text in sentinel.incidents[0].notes)


def test_a_weight_that_has_outgrown_itself_is_gone_back_from_at_once(tmp_path):
    """A layer norm keeps the loss of the float64 step small; all weights have moved since the snapshot."""

    def forward(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return module(batch).square().mean()

    def trained(folder: Any, *more: Any) -> Sentinel:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        callbacks = [NanCallback(), Rescue(), *more]
        sentinel = Sentinel(model, optimizer, callbacks=callbacks, forward=forward, run_dir=folder)
        with sentinel:
            for number, batch in enumerate(sentinel.steps([torch.randn(6, 4) for _ in range(10)])):
                if number == 5:
                    with torch.no_grad():
                        model[0].weight[0, 0] = -3e37
                sentinel.backward(forward(model, batch))
                sentinel.step()
        return sentinel

    gone_back = trained(tmp_path / "back", Rollback())
    assert handled(gone_back) == [(5, "rolled_back")]
    (note,) = (text for text in gone_back.incidents[0].notes if "known-good state of step 0" in text)
    assert note.startswith("0.weight is up to 3e+37")
    no_way_back = [trained(tmp_path / "alone"), trained(tmp_path / "spent", Rollback(max_rollbacks=0))]
    for sentinel in no_way_back:
        assert handled(sentinel) == [(step, "rescued") for step in range(5, 10)]


def test_what_is_rescued_step_after_step_is_gone_back_from_once(tmp_path):
    """The state may have gone bad where nothing shows it; what comes back after that is a matter of dtype."""
    sentinel, _ = run(tmp_path, [Rescue(), Rollback()], bad=tuple(range(2, 12)), steps=12)
    assert handled(sentinel) == [
        *((step, "rescued") for step in (2, 3, 4)),
        (5, "rolled_back"),
        *((step, "rescued") for step in range(6)),
    ]
    (gone_back,) = (one for one in sentinel.incidents if one.outcome is Outcome.ROLLED_BACK)
    assert any("first.linear had to be rescued in each of the last 3 steps" in t for t in gone_back.notes)


def test_a_sound_step_ends_a_row_of_rescues(tmp_path):
    sentinel, _ = run(tmp_path, [Rescue(), Rollback()], bad=(2, 3, 5, 6, 8, 9, 10, 11), steps=13)
    rescued = [(step, "rescued") for step in (2, 3, 5, 6, 8, 9, 10)]
    assert handled(sentinel) == [*rescued, (11, "rolled_back")]


def test_a_step_that_bad_records_spoil_is_not_made_finite_by_force(tmp_path):
    """Two records outweigh all others and their sum overflows: in float64 the step would learn only them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    batches = [{"x": torch.randn(8, 4), "y": torch.randn(8), "weight": torch.ones(8)} for _ in range(6)]
    batches[4]["weight"][:2], batches[4]["y"][:2] = 3e38, 3.0

    def loss_of(model, batch):
        squares = (model(batch["x"]).squeeze(1) - batch["y"]).square()
        return (squares * batch["weight"]).sum() / batch["weight"].sum()

    callbacks = [NanCallback(), Retry(), Rescue(), Rollback()]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=tmp_path, forward=loss_of) as sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(loss_of(model, batch))
            sentinel.step()
    (incident,) = sentinel.incidents
    assert (incident.step, incident.outcome) == (4, Outcome.SKIPPED)
    assert incident.diagnosis.cause == "data"
    assert [sample.position for sample in incident.samples] == [0, 1]
    assert "rescue" not in incident.details
