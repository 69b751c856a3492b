"""Retry: a transient fault leaves no trace, and a persistent one goes to the next rung."""

import contextlib
import copy
import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradsentinel import (
    Action,
    AfterStep,
    ConfigurationError,
    Detector,
    Finding,
    Kind,
    MagnitudeCallback,
    NanCallback,
    Outcome,
    Rescue,
    Retry,
    Rollback,
    Sentinel,
    Skip,
    SpikeCallback,
    TrainingAborted,
)
from gradsentinel.faults import FaultPlan, MatmulOverflow, PoisonActivation, PoisonGradient
from loops import Training, build, differences, generators, make_batches, train_by_hand

BATCHES = 12


@dataclass
class Ended:
    """What a run left behind, to be compared bit for bit."""

    training: Training
    sentinel: Sentinel
    random: dict[str, Any]
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)

    @property
    def outcomes(self) -> list[tuple[int, str]]:
        return [(incident.step, str(incident.outcome)) for incident in self.sentinel.incidents]


def train(
    make: Callable[[], Training],
    run_dir,
    *,
    faults: Sequence[Any] = (),
    callbacks: Sequence[Any] | None = None,
    count: int = BATCHES,
    forward: Any = "own",
) -> Ended:
    """Run the loop with faults, or without."""
    run = make()
    sentinel = run.sentinel(
        [NanCallback(), Retry()] if callbacks is None else callbacks,
        forward=(lambda _, batch: run.loss(batch)) if forward == "own" else forward,
        run_dir=run_dir,
    )
    ended = Ended(run, sentinel, {})
    sentinel.on(
        AfterStep,
        lambda e: ended.steps.append(
            (e.step, e.iteration, e.applied, e.loss, e.grad_norm, e.learning_rates, e.loss_scale, e.clipped)
        ),
    )
    plan = FaultPlan(faults, seed=3)
    with plan.attach(run.model), sentinel:
        drawn = plan.batches(make_batches(count), accumulate=run.accumulate)
        for batch in sentinel.steps(drawn, accumulate=run.accumulate):
            sentinel.backward(run.loss(batch))
            norm = sentinel.step(max_norm=run.max_norm)
            if norm is not None:
                ended.norms.append(norm)
    ended.random = generators()
    return ended


def assert_same(one: Ended, other: Ended) -> None:
    assert differences(one.training.state(), other.training.state()) == []
    assert differences(one.random, other.random) == []
    assert differences(one.norms, other.norms) == []
    assert list(map(repr, one.steps)) == list(map(repr, other.steps))  # NaN is equal to NaN here
    assert one.sentinel.applied_steps == other.sentinel.applied_steps
    assert one.sentinel.data_position == other.sentinel.data_position


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"random": True},
    "clip": {"random": True, "max_norm": 0.05},
    "accumulate": {"random": True, "accumulate": 3, "max_norm": 0.5},
    "cut short": {"random": True, "accumulate": 5},
    "scaler": {"random": True, "scale": 1024.0, "max_norm": 0.5},
    "scaler and accumulate": {"random": True, "scale": 2.0**10, "accumulate": 2},
    "two optimizers": {"random": True, "two_optimizers": True, "scheduler": "onecycle", "ema": True},
    "two optimizers and a scaler": {"two_optimizers": True, "scale": 64.0, "optimizer": "sgd"},
    "bfloat16": {"random": True, "autocast": torch.bfloat16},
    "fused": {"random": True, "optimizer": "adamw-fused", "scale": 256.0},
}
FAULTS = {
    "activation": PoisonActivation(steps=(1, 3), module="norm"),
    "gradient": PoisonGradient(steps=(1, 3), parameter="head.weight", value=float("inf")),
    "matmul": MatmulOverflow(steps=(1, 3), module="enter"),
}


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_transient_fault_leaves_no_trace(feature, fault, tmp_path):
    def make() -> Training:
        return build(**FEATURES[feature])

    accumulate = FEATURES[feature].get("accumulate", 1)
    due = [step for step in (1, 3) if step * accumulate < BATCHES]
    clean = train(make, tmp_path / "clean")
    faulty = train(make, tmp_path / "faulty", faults=[copy.copy(FAULTS[fault])] if due else [])
    assert clean.outcomes == []
    assert faulty.outcomes == [(step, "retried") for step in due]
    assert_same(clean, faulty)


def test_the_fault_may_sit_in_any_micro_batch(tmp_path):
    def make() -> Training:
        return build(random=True, accumulate=3)

    clean = train(make, tmp_path / "clean")
    for microbatch in range(3):
        fault = PoisonActivation(steps=(2,), module="head", microbatch=microbatch)
        faulty = train(make, tmp_path / f"{microbatch}", faults=[fault])
        assert faulty.outcomes == [(2, "retried")]
        assert_same(clean, faulty)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    feature=st.sampled_from(sorted(FEATURES)),
    where=st.lists(
        st.tuples(st.integers(1, 11), st.sampled_from(["activation", "gradient", "spike"])),
        max_size=4,
        unique_by=lambda place: place[0],
    ),
)
def test_any_sequence_of_transient_faults_ends_as_the_clean_run(tmp_path_factory, feature, where):
    def make() -> Training:
        return build(**FEATURES[feature])

    def watch() -> list[Any]:
        return [NanCallback(), MagnitudeCallback(max_global_norm=1e9, action="retry"), Retry()]

    kinds = {
        "activation": lambda step: PoisonActivation(steps=(step,), module="enter", value=float("inf")),
        "gradient": lambda step: PoisonGradient(steps=(step,), parameter="norm.weight"),
        "spike": lambda step: PoisonGradient(steps=(step,), parameter="enter.weight", value=1e30),
    }
    last = (BATCHES - 1) // FEATURES[feature].get("accumulate", 1)
    faults = [kinds[kind](step) for step, kind in where if step <= last]
    folder = tmp_path_factory.mktemp("runs")
    clean = train(make, folder / "clean", callbacks=watch())
    faulty = train(make, folder / "faulty", callbacks=watch(), faults=faults)
    assert clean.outcomes == []
    assert {outcome for _, outcome in faulty.outcomes} <= {"retried"}
    assert len(faulty.outcomes) == len(faults)
    assert_same(clean, faulty)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    faults=st.dictionaries(st.integers(0, 11), st.sampled_from(["once", "always"]), max_size=8),
    max_retries=st.integers(0, 4),
    max_skips=st.integers(0, 5),
)
def test_any_faults_and_budgets_end_as_a_clean_run_of_the_surviving_batches(
    tmp_path_factory, faults, max_retries, max_skips
):
    """Also where the run is aborted: what was applied until then is all there is."""
    run = build(scheduler="lambda", max_norm=0.5, ema=True)
    batches = make_batches(BATCHES)
    plan = FaultPlan(
        [
            PoisonActivation(steps=(step,), module="head", persistent=kind == "always")
            for step, kind in faults.items()
        ]
    )
    callbacks = [NanCallback(), Retry(max_retries=max_retries), Skip(max_skips=max_skips)]
    sentinel = run.sentinel(
        callbacks, forward=lambda _, b: run.loss(b), run_dir=tmp_path_factory.mktemp("runs")
    )
    survivors = []
    with plan.attach(run.model), contextlib.suppress(TrainingAborted), sentinel:
        for number, batch in enumerate(sentinel.steps(plan.batches(batches))):
            sentinel.backward(run.loss(batch))
            sentinel.step(max_norm=run.max_norm)
            if sentinel.applied:
                survivors.append(batches[number])
    clean = build(scheduler="lambda", max_norm=0.5, ema=True)
    train_by_hand(clean, survivors)
    assert differences(clean.state(), run.state()) == []
    once = [step for step, kind in faults.items() if kind == "once"]
    if len(once) <= max_retries:  # whatever was transient is saved
        assert not {i.step for i in sentinel.incidents if not i.cured} & set(once)


class Zoo(nn.Module):
    """Tied, sparse, complex, frozen and unused parameters, checkpointing, and a module that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, sparse=True)
        self.inside = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.inside.weight
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(8))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, index):
        self.calls += 1
        x = self.embed(index).mean(1)
        x = checkpoint(lambda h: self.drop(torch.relu(self.tied(self.inside(h)))), x, use_reentrant=False)
        x = self.norm(x + self.frozen)
        return torch.view_as_real(torch.complex(x, x) * self.turn).pow(2).mean()


def test_a_zoo_of_parameters_comes_through(tmp_path):
    def run(folder: str, *faults: Any) -> tuple[dict[str, Any], Sentinel, int]:
        torch.manual_seed(0)
        model = Zoo()
        sparse = torch.optim.SGD(model.embed.parameters(), lr=0.1)
        dense = torch.optim.SGD([p for n, p in model.named_parameters() if n != "embed.weight"], lr=0.1)
        batches = [torch.randint(12, (6, 3)) for _ in range(8)]
        plan = FaultPlan(faults)
        sentinel = Sentinel(
            model,
            [sparse, dense],
            callbacks=[NanCallback(), Retry()],
            forward=lambda m, batch: m(batch),
            run_dir=tmp_path / folder,
        )
        with plan.attach(model), sentinel:
            for batch in sentinel.steps(plan.batches(batches)):
                sentinel.backward(model(batch))
                sentinel.step()
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: t.detach() for name, t in state.items()}, sentinel, model.calls

    clean, _, calls = run("clean")
    faulty, sentinel, calls_too = run(
        "faulty",
        PoisonActivation(steps=(2, 5), module="norm", value=float("inf")),
        PoisonGradient(steps=(4,), parameter="turn"),
    )
    assert [incident.outcome for incident in sentinel.incidents] == [Outcome.RETRIED] * 3
    assert differences(clean, faulty) == []
    assert calls == calls_too == 8


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # the diagnosis traces modules
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_is_computed_again_as_compiled_code(backend, tmp_path):
    def make() -> Training:
        run = build(random=False, max_norm=0.5)
        run.model.drop = nn.Dropout(0.2)
        run.called = torch.compile(run.model, backend=backend)
        return run

    class Once(Detector):
        """Suspects what is fine, once: a hook in the model would compile it anew."""

        def on_before_clip(self, event):
            bad = event.step == 3
            return Finding(kind=Kind.NONFINITE_GRADIENT, value=torch.tensor(bad), action=Action.RETRY)

    def run(folder: str, *more: Any) -> Ended:
        return train(make, tmp_path / folder, callbacks=[NanCallback(), *more, Retry()], count=6)

    clean, faulty = run("clean"), run("faulty", Once())
    torch.compiler.reset()
    assert faulty.outcomes == [(3, "retried")]
    assert_same(clean, faulty)


def test_a_loop_with_its_own_backward_call_is_retried_too(tmp_path):
    def run(folder: str, bad: int | None) -> tuple[dict[str, Tensor], Sentinel]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        batches = [torch.randn(5, 4) for _ in range(6)]
        sentinel = Sentinel(
            model,
            optimizer,
            callbacks=[NanCallback(), Retry()],
            forward=lambda m, batch: m(batch).square().mean(),
            run_dir=tmp_path / folder,
        )
        with sentinel:
            for step, batch in enumerate(sentinel.steps(batches)):
                loss = model(batch).square().mean()
                (loss * float("nan") if step == bad else loss).backward()
                sentinel.step()
        return {n: p.detach() for n, p in model.named_parameters()}, sentinel

    clean, _ = run("clean", None)
    faulty, sentinel = run("faulty", 3)
    assert [incident.outcome for incident in sentinel.incidents] == [Outcome.RETRIED]
    assert differences(clean, faulty) == []


def test_several_epochs_over_one_batch_are_retried_with_the_right_random_state(tmp_path):
    """As PPO does it: the batch's random state is that of the first pass, not of this one."""

    def run(folder: str, bad: tuple[int, int] | None) -> tuple[dict[str, Tensor], Tensor, Sentinel]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        batches = [torch.randn(5, 4) for _ in range(3)]

        def loss_of(m, batch):
            return m(batch).square().mean()

        sentinel = Sentinel(
            model, optimizer, callbacks=[NanCallback(), Retry()], forward=loss_of, run_dir=tmp_path / folder
        )
        with sentinel:
            for number, batch in enumerate(sentinel.steps(batches)):
                for epoch in range(3):
                    loss = loss_of(model, batch)
                    sentinel.backward(loss * float("nan") if (number, epoch) == bad else loss)
                    sentinel.step()
        return {n: p.detach() for n, p in model.named_parameters()}, torch.get_rng_state(), sentinel

    *clean, _ = run("clean", None)
    *faulty, sentinel = run("faulty", (1, 2))
    assert [(i.step, i.outcome) for i in sentinel.incidents] == [(5, Outcome.RETRIED)]
    assert differences(clean, faulty) == []


# -- a GradScaler's overflows ----------------------------------------------------------------------


def test_an_overflow_that_comes_back_is_left_to_the_scaler(tmp_path):
    """The scale grows until it overflows: with Retry the run is the same as without, bit for bit."""

    def make() -> Training:
        run = build(random=True, autocast=torch.float16)
        run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        return run

    without = train(make, tmp_path / "without", callbacks=[NanCallback()], count=40)
    run = train(make, tmp_path / "with", count=40)
    assert not all(applied for _, _, applied, *_ in without.steps)
    assert_same(without, run)
    assert all(incident.outcome is Outcome.REPORTED for incident in run.sentinel.incidents)
    assert 1 <= len(run.sentinel.incidents) <= 3  # it learns which scales are too large


def scaled(batches, run_dir, **scaler):
    """Run a model without a learning rate, whose gradient is twice the batch's value times the loss scale."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss_of(m, batch):
        with torch.autocast("cpu", torch.float16):
            return m(batch).sum().float()

    with Sentinel(
        model,
        optimizer,
        callbacks=[NanCallback(), Retry()],
        forward=loss_of,
        scaler=torch.amp.GradScaler("cpu", **scaler),
        run_dir=run_dir,
    ) as sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(loss_of(model, batch))
            sentinel.step()
    return sentinel


@pytest.mark.parametrize(("passed", "told"), [(3, 0), (30, 1)])
def test_an_overflow_soon_after_the_search_belongs_to_the_search(passed, told, tmp_path):
    """Half of a scale that was too large lets some batches pass and not others: no incident, no warning.

    Once it has let many pass, an overflow is looked at.
    """
    batches = [torch.ones(2, 4)] * (passed + 10) + [torch.full((2, 4), 2.5)]
    sentinel = scaled(batches, tmp_path, init_scale=2.0**24)
    assert 0 < len(batches) - sentinel.applied_steps < 12
    assert [incident.kind for incident in sentinel.incidents] == ["loss_scale"] * told


def test_a_scale_at_the_edge_is_told_of_once(tmp_path):
    """The scale grows to where some batches overflow, again and again: that is where it belongs."""
    # 1.9 overflows at 2**15, which 0.9 passes.
    batches = [*[torch.full((2, 4), 0.9)] * 29, torch.full((2, 4), 1.9)] * 6
    sentinel = scaled(batches, tmp_path, init_scale=2.0**13, growth_interval=12)
    assert len(batches) - sentinel.applied_steps > 3
    assert len(sentinel.incidents) == 1


def test_overflows_can_be_left_alone(tmp_path):
    fault = PoisonGradient(steps=(3,), parameter="head.weight", value=float("inf"))
    ended = train(
        lambda: build(scale=1024.0),
        tmp_path,
        faults=[fault],
        callbacks=[NanCallback(), Retry(overflows=False)],
    )
    assert ended.outcomes == []
    assert ended.training.scaler.get_scale() < 1024.0 * 2**4


# -- handing over ----------------------------------------------------------------------------------


def test_a_persistent_fault_goes_to_the_next_rung(tmp_path):
    fault = PoisonActivation(steps=(2,), module="head", persistent=True)
    ended = train(lambda: build(random=True), tmp_path, faults=[fault])
    (incident,) = ended.sentinel.incidents
    assert incident.outcome is Outcome.SKIPPED
    assert any("not transient" in note for note in incident.notes)
    assert ended.sentinel.applied_steps == BATCHES - 1


def test_after_a_retry_in_vain_the_step_is_dropped_exactly(tmp_path):
    """What the retry did to buffers, gradients and random state is gone, as if it had not been there."""
    fault = PoisonActivation(steps=(2,), module="head", persistent=True)

    def run(folder: str, *more: Any) -> Ended:
        callbacks = [NanCallback(), *more]
        return train(lambda: build(random=True), tmp_path / folder, faults=[fault], callbacks=callbacks)

    assert_same(run("without"), run("with", Retry(attempts=3)))


def test_bad_data_is_not_computed_again(tmp_path):
    calls = []
    run = build()
    batches = make_batches(4)
    batches[2]["x"][0, 0] = float("nan")

    def forward(_: nn.Module, batch: Any) -> Tensor:
        calls.append(batch)
        return run.loss(batch)

    sentinel = run.sentinel([NanCallback(), Retry()], forward=forward, run_dir=tmp_path)
    with sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(run.loss(batch))
            sentinel.step()
    assert [i.outcome for i in sentinel.incidents] == [Outcome.SKIPPED]
    # The diagnosis only tries it without the bad value, to be sure that this is what spoilt the step.
    assert calls
    assert all(bool(torch.isfinite(call["x"]).all()) for call in calls)


def test_the_budget_is_for_saved_steps_in_a_window(tmp_path):
    fault = PoisonActivation(steps=(1, 2, 3, 8), module="head")
    ended = train(build, tmp_path, faults=[fault], callbacks=[NanCallback(), Retry(max_retries=2, window=6)])
    assert ended.outcomes == [(1, "retried"), (2, "retried"), (3, "skipped"), (8, "retried")]
    assert any("budget" in note for note in ended.sentinel.incidents[2].notes)


def test_a_second_attempt_may_help_where_the_first_did_not(tmp_path):
    clean = train(lambda: build(random=True), tmp_path / "clean")

    def make() -> Training:
        run = build(random=True)
        passes: list[nn.Parameter] = []

        def spoil(parameter: nn.Parameter) -> None:  # a replay does not come by here
            passes.append(parameter)
            if sum(p is parameter for p in passes) == (4 if parameter is run.model.head.bias else 5):
                parameter.grad[1] = float("nan")

        for parameter in (run.model.head.bias, run.model.enter.bias):
            parameter.register_post_accumulate_grad_hook(spoil)
        return run

    faulty = train(make, tmp_path / "faulty")
    (incident,) = faulty.sentinel.incidents
    assert incident.outcome is Outcome.RETRIED
    assert incident.details["retry"]["attempts"] == 2
    assert_same(clean, faulty)


def test_without_forward_it_says_so_once_and_hands_over(tmp_path, caplog):
    fault = PoisonActivation(steps=(2, 4), module="head")
    with caplog.at_level(logging.WARNING, "gradsentinel"):
        ended = train(build, tmp_path, faults=[fault], forward=None)
    assert ended.outcomes == [(2, "skipped"), (4, "skipped")]
    assert sum("Retry can do nothing" in record.message for record in caplog.records) == 1
    assert any("forward=" in note for note in ended.sentinel.incidents[0].notes)


@pytest.mark.expects_swallowed
@pytest.mark.parametrize(
    "forward",
    [
        lambda model, batch: 1 / 0,
        lambda model, batch: None,
        lambda model, batch: model(batch["x"]),
        lambda model, batch: model(batch["x"]).mean().detach(),
        lambda model, batch: torch.empty(10**15),
    ],
    ids=["raises", "no tensor", "no scalar", "detached", "out of memory"],
)
def test_a_forward_that_fails_hands_over(tmp_path, forward):
    fault = PoisonActivation(steps=(2,), module="head")
    ended = train(lambda: build(random=True), tmp_path / "faulty", faults=[fault], forward=forward)
    assert ended.outcomes == [(2, "skipped")]
    assert any("computing the step again failed" in note for note in ended.sentinel.incidents[0].notes)
    plain = train(lambda: build(random=True), tmp_path / "plain", faults=[fault], callbacks=[NanCallback()])
    assert_same(plain, ended)


def test_a_batch_that_the_loop_wrote_to_is_not_computed_again(tmp_path):
    run = build()

    def loss_of(batch):
        batch["x"].mul_(0.5)
        return run.loss(batch)

    sentinel = run.sentinel([NanCallback(), Retry()], forward=lambda _, b: loss_of(b), run_dir=tmp_path)
    with sentinel:
        for number, batch in enumerate(sentinel.steps(make_batches(4))):
            loss = loss_of(batch)
            sentinel.backward(loss * float("nan") if number == 2 else loss)
            sentinel.step()
    (incident,) = sentinel.incidents
    assert incident.outcome is Outcome.SKIPPED
    assert any("written to the batch" in note for note in incident.notes)


def test_a_forward_that_takes_its_batch_apart_may_do_so_again(tmp_path):
    run = build()

    def forward(_: nn.Module, batch: Any) -> Tensor:
        return run.loss({"y": batch.pop("y"), "x": batch.pop("x")})

    sentinel = run.sentinel([NanCallback(), Retry()], forward=forward, run_dir=tmp_path)
    with sentinel:
        for number, batch in enumerate(sentinel.steps(make_batches(4))):
            loss = run.loss(batch)
            sentinel.backward(loss * float("nan") if number == 2 else loss)
            sentinel.step()
    assert [i.outcome for i in sentinel.incidents] == [Outcome.RETRIED]


def test_the_step_of_one_of_two_optimizers_is_not_computed_again(tmp_path):
    run = build(two_optimizers=True)
    sentinel = run.sentinel([NanCallback(), Retry()], forward=lambda _, b: run.loss(b), run_dir=tmp_path)
    with sentinel:
        for number, batch in enumerate(sentinel.steps(make_batches(4))):
            loss = run.loss(batch)
            sentinel.backward(loss * float("nan") if number == 2 else loss)
            sentinel.step(optimizer=run.optimizers[1])
            for optimizer in run.optimizers:
                optimizer.zero_grad()
    (incident,) = sentinel.incidents
    assert incident.outcome is Outcome.SKIPPED
    assert any("some of the optimizers" in note for note in incident.notes)


def test_a_micro_batch_with_two_backward_passes_is_not_computed_again(tmp_path):
    run = build()
    sentinel = run.sentinel([NanCallback(), Retry()], forward=lambda _, b: run.loss(b), run_dir=tmp_path)
    with sentinel:
        for number, batch in enumerate(sentinel.steps(make_batches(4))):
            sentinel.backward(run.loss(batch))
            loss = run.loss(batch)
            sentinel.backward(loss * float("nan") if number == 2 else loss)
            sentinel.step()
    (incident,) = sentinel.incidents
    assert incident.outcome is Outcome.SKIPPED
    assert any("exactly one backward pass" in note for note in incident.notes)


def test_a_forward_that_computes_something_else_is_not_used(tmp_path):
    """Two micro-batches whose finite losses both came out otherwise: one fault does not do that."""
    run = build(accumulate=3)
    sentinel = run.sentinel(
        [NanCallback(), Retry()], forward=lambda _, batch: run.loss(batch) * 3, run_dir=tmp_path
    )
    with sentinel:
        for number, batch in enumerate(sentinel.steps(make_batches(6), accumulate=3)):
            loss = run.loss(batch)
            sentinel.backward(loss * float("nan") if number == 4 else loss)
            sentinel.step()
    (incident,) = sentinel.incidents
    assert incident.outcome is Outcome.SKIPPED
    assert any("another loss than the loop" in note for note in incident.notes)


def test_a_forward_whose_loss_is_far_from_all_others_is_not_used(tmp_path):
    """The loop's own loss was finite and like that of the step before: it is forward= that is wrong."""
    run = build()
    sentinel = run.sentinel(
        [NanCallback(), Retry()], forward=lambda _, batch: run.loss(batch) * 8, run_dir=tmp_path
    )
    plan = FaultPlan([PoisonGradient(steps=(3,), parameter="head.bias")])
    with plan.attach(run.model), sentinel:
        for batch in sentinel.steps(plan.batches(make_batches(6))):
            sentinel.backward(run.loss(batch))
            sentinel.step()
    (incident,) = sentinel.incidents
    assert incident.outcome is Outcome.SKIPPED
    assert any("exactly what the loop computes" in note for note in incident.notes)


def test_a_real_spike_is_not_mistaken_for_a_fault(tmp_path):
    """Computed again the gradients are as large as before: nobody steps with them."""

    def make() -> Training:
        return build(random=True)

    batches = make_batches(BATCHES)
    run = make()
    watch = [NanCallback(), MagnitudeCallback(max_global_norm=50.0, action="retry"), Retry()]

    def loss_of(batch: Any) -> Tensor:
        return run.loss(batch) * (1e6 if batch is batches[5] else 1.0)

    def forward(_: nn.Module, batch: Any) -> Tensor:
        same = torch.equal(batch["x"], batches[5]["x"])
        return run.loss(batch) * (1e6 if same else 1.0)

    sentinel = run.sentinel(watch, forward=forward, run_dir=tmp_path)
    with sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(loss_of(batch))
            sentinel.step(max_norm=1.0)
    (incident,) = sentinel.incidents
    assert (incident.kind, incident.outcome) == (Kind.MAGNITUDE, Outcome.SKIPPED)
    assert sentinel.applied_steps == BATCHES - 1


def test_a_rollback_follows_retries_in_vain(tmp_path):
    """A rollback still has its snapshots, and the retries before it did no harm to them."""
    fault = PoisonActivation(steps=range(4, 7), module="head", persistent=True)
    callbacks = [NanCallback(), Retry(), Rollback(every=2, confirm_after=1, after=3, max_rollbacks=1)]
    ended = train(lambda: build(random=True), tmp_path, faults=[fault], callbacks=callbacks)
    assert "rolled_back" in [outcome for _, outcome in ended.outcomes]
    assert all(torch.isfinite(p).all() for p in ended.training.model.parameters())


def test_retries_come_before_rescues_whatever_the_order_in_the_list(tmp_path):
    fault = PoisonActivation(steps=(2,), module="head")
    ended = train(build, tmp_path, faults=[fault], callbacks=[NanCallback(), Rescue(), Retry()])
    assert ended.outcomes == [(2, "retried")]


def test_the_numbers_of_the_step_are_those_of_the_second_computation(tmp_path):
    fault = PoisonActivation(steps=(2,), module="head")
    ended = train(lambda: build(random=True), tmp_path, faults=[fault])
    (incident,) = ended.sentinel.incidents
    _, _, _, loss, norm, *_ = ended.steps[2]
    assert incident.details["retry"] == {"attempts": 1, "loss": loss, "grad_norm": norm}
    assert float(ended.norms[2]) == norm


@pytest.mark.parametrize("wrong", [{"max_retries": -1}, {"window": 0}, {"attempts": 0}])
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigurationError, match="attempts at least 1"):
        Retry(**wrong)


def test_what_was_spent_survives_a_restart(tmp_path):
    fault = PoisonActivation(steps=(1, 2), module="head")
    first = Retry(max_retries=3)
    train(build, tmp_path, faults=[fault], callbacks=[NanCallback(), first])
    second = Retry(max_retries=3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second._budget.left(3) == 1
    assert second.state_dict() == first.state_dict()


def test_a_healthy_run_is_bit_identical_with_it(tmp_path):
    def make() -> Training:
        return build(random=True, scale=1024.0, accumulate=2, ema=True, scheduler="cosine")

    without = train(make, tmp_path / "without", callbacks=[NanCallback()])
    assert_same(without, train(make, tmp_path / "with"))


def test_a_step_that_the_device_has_dropped_is_not_computed_again(tmp_path, caplog):
    """And an overflow stays the GradScaler's business: nobody has the device drop the step for it."""

    def run(folder: str, *more: Any) -> Ended:
        made = build(random=True, optimizer="adamw-fused", scale=1024.0)
        sentinel = made.sentinel(
            [NanCallback(), *more],
            forward=lambda _, b: made.loss(b),
            run_dir=tmp_path / folder,
            guard="device",
        )
        fault = PoisonGradient(steps=(5,), parameter="head.weight", value=float("inf"))
        plan = FaultPlan([fault])
        with plan.attach(made.model), sentinel:
            for batch in sentinel.steps(plan.batches(make_batches(BATCHES))):
                sentinel.backward(made.loss(batch))
                sentinel.step()
        return Ended(made, sentinel, generators())

    with caplog.at_level(logging.WARNING, "gradsentinel"):
        without, retrying = run("without"), run("with", Retry())
    assert "needs guard='host'" in caplog.text
    assert without.outcomes == retrying.outcomes == []
    assert differences(without.training.state(), retrying.training.state()) == []


def test_retried_steps_do_not_add_up_to_a_rollback(tmp_path):
    """They were made after all: nothing persists, and they prove a snapshot like any other step."""
    fault = PoisonActivation(steps=(3, 4, 5, 6), module="head")
    keep = Rollback(every=2, confirm_after=3, after=2)
    clean = train(lambda: build(random=True), tmp_path / "clean", callbacks=[NanCallback(), keep])
    keep_too = Rollback(every=2, confirm_after=3, after=2)
    callbacks = [NanCallback(), Retry(), keep_too]
    faulty = train(lambda: build(random=True), tmp_path / "faulty", faults=[fault], callbacks=callbacks)
    assert faulty.outcomes == [(step, "retried") for step in (3, 4, 5, 6)]
    assert [incident.severity.label for incident in faulty.sentinel.incidents] == ["warning"] * 4
    assert keep_too.known_good_steps == keep.known_good_steps
    assert_same(clean, faulty)


@pytest.mark.parametrize("where", ["closure", "module", "numpy", "legacy numpy", "python"])
def test_a_generator_of_the_program_s_own_is_told_and_goes_on_as_if_it_had_drawn_once(where, tmp_path):
    """Of the step that is computed again the numbers are others; of the steps after it they are the same."""

    def life(folder: str, bad: int | None) -> tuple[list[float], Sentinel]:
        torch.manual_seed(0)
        model = nn.Linear(6, 1)
        own: Any = {
            "numpy": np.random.default_rng(3),
            "legacy numpy": np.random.RandomState(3),
            "python": random.Random(3),
        }.get(where, torch.Generator().manual_seed(3))
        if where == "module":
            model.own = own
        drawn, of_the_loop = [], []

        def noise(model: nn.Module) -> Tensor:
            if where.endswith("numpy"):
                return torch.from_numpy(own.standard_normal((8, 6))).float()
            if where == "python":
                return torch.tensor([own.gauss(0, 1) for _ in range(48)]).view(8, 6)
            return torch.randn(8, 6, generator=model.own if where == "module" else own)

        def forward(model: nn.Module, batch: Tensor) -> Tensor:
            added = noise(model)
            drawn.append(float(added[0, 0]))
            return model(batch + added).square().mean()

        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with Sentinel(
            model, optimizer, callbacks=[NanCallback(), Retry()], run_dir=tmp_path / folder, forward=forward
        ) as sentinel:
            for number, batch in enumerate(sentinel.steps([torch.ones(8, 6)] * 6)):
                loss = forward(model, batch)
                of_the_loop.append(drawn[-1])
                sentinel.backward(loss * math.nan if number == bad else loss)
                sentinel.step()
        return of_the_loop, sentinel

    expected, _ = life("clean", None)
    drawn, sentinel = life("faulty", 2)
    incident = sentinel.incidents[0]
    assert incident.outcome is Outcome.RETRIED
    assert "no batch is lost" in incident.recovery
    assert any("a generator of its own" in note for note in incident.notes)
    assert drawn == expected


# -- spikes that are only to be reported ------------------------------------------------------------


SPIKE_AT = 30


def spiking(
    run_dir,
    *,
    transient: bool,
    callbacks: Sequence[Any] | None = None,
    times: float = 40.0,
    at: Sequence[int] = (SPIKE_AT,),
    forward: Any = None,
    count: int = SPIKE_AT + 6,
    **settings: Any,
) -> Ended:
    """Train with a loss that is larger in some steps: in the loop alone, or in forward= as well."""
    run = build(**{"random": True, "max_norm": 0.5, **settings})
    batches = make_batches(count * run.accumulate)
    wanted = [batches[step * run.accumulate]["x"] for step in at]

    def bad(batch: Any) -> bool:
        return any(torch.equal(batch["x"], x) for x in wanted)

    def same(_: nn.Module, batch: Any) -> Tensor:
        return run.loss(batch) * (times if bad(batch) and not transient else 1.0)

    sentinel = run.sentinel(
        [NanCallback(), SpikeCallback(), Retry()] if callbacks is None else callbacks,
        forward=forward or same,
        run_dir=run_dir,
    )
    ended = Ended(run, sentinel, {})
    with sentinel:
        for batch in sentinel.steps(batches, accumulate=run.accumulate):
            sentinel.backward(run.loss(batch) * (times if bad(batch) else 1.0))
            norm = sentinel.step(max_norm=run.max_norm)
            if norm is not None:
                ended.norms.append(norm)
    ended.random = generators()
    return ended


def weights_of(ended: Ended) -> dict[str, Any]:
    return ended.training.state()


@pytest.mark.parametrize(
    "feature", ["plain", "dropout", "accumulate", "scaler", "two optimizers", "bfloat16"]
)
def test_a_spike_that_does_not_come_back_leaves_no_trace(feature, tmp_path):
    """Also one that would only have been reported."""
    settings = {**FEATURES[feature]}
    clean = spiking(tmp_path / "clean", transient=True, times=1.0, **settings)
    faulty = spiking(tmp_path / "faulty", transient=True, **settings)
    assert clean.outcomes == []
    assert faulty.outcomes == [(SPIKE_AT, "retried")]
    assert differences(weights_of(clean), weights_of(faulty)) == []
    assert differences(clean.random, faulty.random) == []
    assert differences(clean.norms, faulty.norms) == []
    assert faulty.sentinel.applied_steps == clean.sentinel.applied_steps


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_a_spike_that_comes_back_is_made_as_it_is_bit_for_bit(feature, tmp_path):
    settings = {"accumulate": 1, **FEATURES[feature]}
    only_told = [NanCallback(), SpikeCallback(recheck=False), Retry()]
    without = spiking(tmp_path / "without", transient=False, callbacks=only_told, **settings)
    checked = spiking(tmp_path / "checked", transient=False, **settings)
    assert without.outcomes == checked.outcomes == [(SPIKE_AT, "reported")]
    assert differences(weights_of(without), weights_of(checked)) == []
    assert differences(without.random, checked.random) == []
    assert differences(without.norms, checked.norms) == []
    (incident,) = checked.sentinel.incidents
    assert (incident.action, incident.severity.label) == (Action.WARN, "warning")
    assert "computed again it is the same" in incident.recovery
    assert checked.sentinel.applied_steps == without.sentinel.applied_steps


def _fails(_: nn.Module, batch: Any) -> Tensor:
    raise RuntimeError("not twice")


def _not_finite(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]).sum() * math.nan


class _Unlike:
    """Gives another loss each time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return model(batch["x"]).square().mean() * self.calls


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (_fails, "the step is made as it is"),
        (_not_finite, "that was another fault"),
        (_Unlike(), "does not come out the same each time"),
        (lambda model, batch: model(batch["x"]).square().mean() * 1e9, "which may be wrong"),
        (lambda model, batch: model(batch["x"]).square().mean(), "which may be wrong"),
    ],
    ids=["raises", "not finite", "another each time", "far out, too", "other operators"],
)
def test_a_spike_that_cannot_be_computed_again_is_made_as_it_is(forward, said, tmp_path):
    """Whatever becomes of the second computation: a healthy step is never worse off for it."""
    only_told = [NanCallback(), SpikeCallback(recheck=False), Retry()]
    without = spiking(tmp_path / "without", transient=False, callbacks=only_told)
    checked = spiking(tmp_path / "checked", transient=False, forward=forward)
    assert checked.outcomes == [(SPIKE_AT, "reported")]
    assert said in checked.sentinel.incidents[0].recovery
    assert differences(weights_of(without), weights_of(checked)) == []
    assert differences(without.random, checked.random) == []


@pytest.mark.parametrize("feature", ["plain", "scaler"])
def test_what_a_second_computation_overflows_in_is_not_held_against_the_step(feature, tmp_path):
    """The scaler must not drop the loop's step for an overflow that only the second computation had."""

    def forward(model: nn.Module, batch: Any) -> Tensor:
        weight = next(model.parameters())
        return (
            model(batch["x"]).square().mean() + (weight * 0).sqrt().sum()
        )  # finite, with gradients that are not

    settings = {**FEATURES[feature]}
    only_told = [NanCallback(), SpikeCallback(recheck=False), Retry()]
    without = spiking(tmp_path / "without", transient=False, callbacks=only_told, **settings)
    checked = spiking(tmp_path / "checked", transient=False, forward=forward, **settings)
    assert checked.outcomes == [(SPIKE_AT, "reported")]
    assert "that was another fault" in checked.sentinel.incidents[0].recovery
    assert differences(weights_of(without), weights_of(checked)) == []
    assert checked.sentinel.applied_steps == without.sentinel.applied_steps


class Remembering(nn.Module):
    """Has all that a forward pass may leave behind, and a parameter that the loop does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.spare = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.temperature, self.hidden, self.total = 1.0, torch.zeros(4), torch.zeros(())
        self.freed, self.swapped = torch.ones(3), torch.ones(3)
        self.freed.untyped_storage().resize_(0)  # as of a whole parameter that is sharded again
        self.seen: list[float] = []
        self.by_size: dict[int, int] = {}
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("meta", torch.empty(3, device="meta"))
        self.register_buffer("complex", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("cached", None)
        self.register_buffer("as_long_as_the_batch", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.temperature *= 0.99
        self.total += 1
        self.swapped.data = x[:, 0].clone()
        self.seen.append(self.temperature)
        self.by_size[len(x)] = self.by_size.get(len(x), 0) + 1
        out = self.norm(self.layer(x)) / self.temperature + self.hidden
        self.hidden = out.mean(0).detach() * 0.1
        self.cached = x.clone()
        self.as_long_as_the_batch = x[:, 0].clone()
        return nn.functional.dropout(out, 0.2)

    def left(self) -> list[Any]:
        own = [self.temperature, self.hidden, self.total, list(self.seen), dict(self.by_size), self.swapped]
        return [*own, self.cached, self.as_long_as_the_batch, *self.norm.buffers(), *self.parameters()]


@pytest.mark.parametrize("forward", ["the same", "fails late", "another parameter"])
def test_a_spike_that_stands_leaves_what_modules_remember_as_the_loop_left_it(forward, tmp_path):
    def life(folder: str, *, recheck: bool) -> tuple[list[Any], Sentinel]:
        torch.manual_seed(0)
        model = Remembering()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        batches = [(torch.randn(4 + number % 2, 4), torch.randn(4 + number % 2, 4)) for number in range(40)]
        batches[34][1].mul_(12)
        made: list[Any] = []
        used: list[Any] = []
        optimizer.register_step_pre_hook(lambda *_: used.append(model.layer.weight.grad))

        def loss_of(model: nn.Module, batch: Any) -> Tensor:
            return (model(batch[0]) - batch[1]).square().mean()

        def again(model: nn.Module, batch: Any) -> Tensor:
            loss = loss_of(model, batch)
            if forward == "fails late":
                raise RuntimeError("not twice")
            return loss + 1e-3 * model.spare(batch[0]).sum() if forward == "another parameter" else loss

        callbacks = [NanCallback(), SpikeCallback(recheck=recheck), Retry()]
        run_dir = tmp_path / folder
        with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir, forward=again) as sentinel:
            for batch in sentinel.steps(batches):
                sentinel.backward(loss_of(model, batch))
                made.append(model.layer.weight.grad)
                sentinel.step()
        assert all(one is other for one, other in zip(made, used, strict=True))
        return model.left(), sentinel

    expected, _ = life("told", recheck=False)
    left, sentinel = life("checked", recheck=True)
    assert [(one.step, one.outcome) for one in sentinel.incidents] == [(34, Outcome.REPORTED)]
    assert "made as it is" in sentinel.incidents[0].recovery
    assert differences(dict(enumerate(left)), dict(enumerate(expected))) == []


@pytest.mark.expects_swallowed
def test_a_second_opinion_that_fails_does_not_stop_a_run_whose_step_may_stand(tmp_path, monkeypatch):
    def fails(*_: Any) -> str:
        raise RuntimeError("no opinion")

    only_told = [NanCallback(), SpikeCallback(recheck=False), Retry()]
    without = spiking(tmp_path / "without", transient=False, callbacks=only_told)
    monkeypatch.setattr("gradsentinel.callbacks.retry._doubt", fails)
    checked = spiking(tmp_path / "checked", transient=True)
    assert checked.outcomes == [(SPIKE_AT, "reported")]
    assert "computing the step again failed: RuntimeError: no opinion" in checked.sentinel.incidents[0].notes
    assert differences(weights_of(without), weights_of(checked)) == []
    assert differences(without.random, checked.random) == []


def test_an_explosion_that_is_only_a_little_smaller_the_second_time_is_no_transient_fault(tmp_path):
    """As with a temperature that falls with each forward pass."""
    passes = []

    def shrinking(run: Training) -> Callable[[nn.Module, Any], Tensor]:
        def forward(_: nn.Module, batch: Any) -> Tensor:
            passes.append(1)
            return run.loss(batch) * 1e7 * 0.98 ** len(passes)

        return forward

    run = build(max_norm=0.5)
    callbacks = [NanCallback(), SpikeCallback(), Retry()]
    with run.sentinel(callbacks, forward=shrinking(run), run_dir=tmp_path) as sentinel:
        for number, batch in enumerate(sentinel.steps(make_batches(SPIKE_AT + 3))):
            sentinel.backward(run.loss(batch) * (1e7 if number == SPIKE_AT else 1.0))
            sentinel.step(max_norm=0.5)
    assert [(one.step, one.outcome) for one in sentinel.incidents] == [(SPIKE_AT, Outcome.SKIPPED)]
    assert "computed again, the step fails again: the fault is not transient" in sentinel.incidents[0].notes


def test_what_stays_outside_is_computed_again_only_once(tmp_path):
    retry = Retry()
    later = range(SPIKE_AT, SPIKE_AT + 5)
    ended = spiking(
        tmp_path, transient=False, at=later, callbacks=[NanCallback(), SpikeCallback(), retry], count=40
    )
    assert ended.outcomes == [(SPIKE_AT, "reported")]
    assert ended.sentinel.incidents[0].details["repeated"] == 4
    assert retry._real.left(ended.sentinel.applied_steps) == 4


def test_a_run_that_has_spikes_is_not_computed_twice_for_ever(tmp_path):
    """After five that came out the same the sixth is only told."""
    retry = Retry()
    at = range(SPIKE_AT, SPIKE_AT + 21, 3)
    callbacks = [NanCallback(), SpikeCallback(), retry]
    ended = spiking(tmp_path, transient=False, at=at, callbacks=callbacks, count=56)
    said = [incident.recovery for incident in ended.sentinel.incidents]
    assert sum("computed again it is the same" in text for text in said) == 5
    assert retry._real.left(ended.sentinel.applied_steps) == 0
    assert ended.sentinel.applied_steps == 56


def test_a_spike_that_somebody_else_wants_dropped_does_not_stand(tmp_path):
    callbacks = [
        NanCallback(),
        SpikeCallback(),
        MagnitudeCallback(max_global_norm=8.0, action="skip"),
        Retry(),
    ]
    ended = spiking(tmp_path, transient=False, callbacks=callbacks)
    assert ended.outcomes == [(SPIKE_AT, "skipped")]


def test_an_explosion_that_comes_back_is_still_dropped(tmp_path):
    ended = spiking(tmp_path, transient=False, times=1e7)
    assert ended.outcomes == [(SPIKE_AT, "skipped")]


def test_without_forward_a_spike_is_told_as_ever(tmp_path):
    run = build(max_norm=0.5)
    batches = make_batches(SPIKE_AT + 3)
    with run.sentinel([NanCallback(), SpikeCallback(), Retry()], run_dir=tmp_path) as sentinel:
        for number, batch in enumerate(sentinel.steps(batches)):
            sentinel.backward(run.loss(batch) * (40.0 if number == SPIKE_AT else 1.0))
            sentinel.step(max_norm=0.5)
    (incident,) = sentinel.incidents
    assert (incident.step, incident.outcome, incident.recovery) == (SPIKE_AT, Outcome.REPORTED, "")
