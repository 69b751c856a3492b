import json
import math
import random
import warnings
from collections.abc import Sized
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from gradsentinel.faults import (
    FaultPlan,
    FlipBit,
    MatmulOverflow,
    PoisonActivation,
    PoisonGradient,
    PoisonSample,
    WrongOperator,
    random_faults,
)

EVERY = [
    PoisonSample,
    PoisonActivation,
    PoisonGradient,
    partial(FlipBit, target="parameter"),
    partial(FlipBit, target="gradient"),
    partial(FlipBit, target="activation"),
    MatmulOverflow,
    partial(WrongOperator, operator="sign_flip"),
    partial(WrongOperator, operator="zero", module="head", phase="backward"),
]


def truth(plan):
    """The log in a form in which NaN is equal to NaN."""
    return [injection.as_dict() for injection in plan.log]


def global_random_state():
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],  # noqa: NPY002
    )


def hooks(model):
    return [
        (name, attribute)
        for name, module in model.named_modules()
        for attribute in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_backward_hooks",
            "_forward_hooks_always_called",
        )
        if getattr(module, attribute)
    ] + [name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]


@pytest.mark.parametrize("make", EVERY)
def test_every_fault_happens_once_at_its_step_and_nowhere_else(make, train):
    clean, plan = train(), FaultPlan([make(steps=(3,))], seed=5)
    run = train(plan)
    (injection,) = plan.log
    assert (injection.step, injection.microbatch, injection.rank) == (3, 0, 0)
    assert json.dumps(injection.as_dict(), allow_nan=False)
    assert str(injection.before) != str(injection.after)
    assert run.losses[:3] == clean.losses[:3]
    assert not hooks(run.model)


@pytest.mark.parametrize("make", EVERY)
def test_a_run_without_a_due_fault_is_bit_identical_and_so_are_the_global_generators(make, train):
    clean = train()
    state = global_random_state()
    plan = FaultPlan([make(steps=(100,)), make(steps=(0,), ranks=(1,))], rank=0)
    run = train(plan)
    assert global_random_state() == state
    assert run.losses == clean.losses
    assert all(
        torch.equal(a, b) for a, b in zip(clean.model.parameters(), run.model.parameters(), strict=True)
    )
    assert plan.log == []


@pytest.mark.parametrize("make", EVERY)
def test_the_plan_never_uses_the_global_generators(make, train, tiny):
    train()
    state = global_random_state()
    faulty = FaultPlan([make(steps=(3,))], seed=5)
    train(faulty)
    assert global_random_state() == state  # dropout drew the same numbers, nobody else drew any
    random_faults(tiny(), 20, seed=1, steps=range(5))
    assert len(faulty.log) == 1


def test_the_same_seed_gives_the_same_faults_whatever_the_global_generators_say(train):
    for make in EVERY[:-1]:
        plans = [FaultPlan([make(steps=(2,))], seed=seed) for seed in (7, 7, 8)]
        for number, plan in enumerate(plans):
            random.seed(number)
            train(plan)
        assert truth(plans[0]) == truth(plans[1])
        assert truth(plans[0]) != truth(plans[2])


def test_faults_happen_on_their_ranks_only(train, monkeypatch):
    fault = PoisonGradient(steps=(1,), ranks=(2,))
    elsewhere = PoisonActivation(steps=(1,), ranks=(7,), module="a stage that this rank does not hold")
    for rank in (1, 2):
        plan = FaultPlan([fault, elsewhere], rank=rank)
        train(plan)
        assert [injection.rank for injection in plan.log] == [2] * (rank == 2)
    monkeypatch.setenv("RANK", "2")
    assert FaultPlan([]).rank == 2
    monkeypatch.delenv("RANK")
    assert FaultPlan([]).rank == 0


def test_accumulation_counts_steps_and_hits_the_given_microbatch(train):
    plan = FaultPlan([PoisonGradient(steps=(1,), microbatch=2, parameter="head.bias", index=1)])
    run = train(plan, accumulate=4)
    (injection,) = plan.log
    assert (injection.step, injection.microbatch, injection.where, injection.index) == (
        1,
        2,
        "head.bias",
        (1,),
    )
    assert run.bad(0) == set()
    assert run.bad(1) == {"head.bias"}


def test_steps_may_be_a_function(train):
    plan = FaultPlan([PoisonActivation(steps=lambda step: step % 3 == 2, module="head", value=1.5)])
    train(plan)
    assert [injection.step for injection in plan.log] == [2, 5]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda **w: PoisonActivation(module="blocks.1.mlp", **w),
        lambda **w: PoisonGradient(parameter="enter.weight", **w),
        lambda **w: FlipBit(target="gradient", name="head.weight", bit=30, **w),
        lambda **w: MatmulOverflow(module="blocks.0.attn", **w),
        lambda **w: WrongOperator(module="blocks.0.mlp", operator="uninitialised_rows", **w),
        lambda **w: WrongOperator(module="head", operator="uninitialised_rows", phase="backward", **w),
    ],
)
def test_a_replay_is_clean_after_a_transient_fault_and_bad_again_after_a_persistent_one(
    make, persistent, tiny, loader
):
    model = tiny().eval()
    plan = FaultPlan([make(steps=(1,), persistent=persistent)])

    def gradients(batch):
        model.zero_grad()
        model(batch).pow(2).mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    right = gradients(loader[1])
    with plan.attach(model):
        for step, batch in enumerate(plan.batches(loader[:3])):
            first, second = gradients(batch), gradients(batch)
            if step == 1:
                assert not all(map(torch.equal, first, right))
                assert all(map(torch.equal, second, right)) != persistent
                assert not persistent or all(
                    torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)
                )
    assert len(plan.log) == (2 if persistent else 1)


def test_a_persistent_fault_of_one_microbatch_follows_it_into_replays(tiny, loader):
    model = tiny().eval()
    plan = FaultPlan([PoisonActivation(steps=(0,), microbatch=1, module="head", persistent=True)])
    with plan.attach(model):
        step = []
        for batch in plan.batches(loader[:4], accumulate=4):
            model(batch)
            step.append(batch)
        assert [i.microbatch for i in plan.log] == [1]
    plan = FaultPlan([PoisonActivation(steps=(0,), microbatch=1, module="head", persistent=True)])
    with plan.attach(model):
        step = []
        for number, batch in enumerate(plan.batches(loader[:4], accumulate=4)):
            model(batch)
            step.append(batch)
            if number == 3:
                assert [bool(model(b.clone()).isfinite().all()) for b in step] == [True, False, True, True]
    assert [i.microbatch for i in plan.log] == [1, 1]


def test_a_loop_of_its_own_can_say_where_it_is(tiny, loader):
    model = tiny()
    plan = FaultPlan([PoisonSample(steps=(5,), microbatch=1), PoisonActivation(steps=(5,), module="head")])
    with plan.attach(model):
        for microbatch in range(2):
            with plan.at(5, microbatch):
                batch = plan.poison(loader[microbatch])
                assert bool(batch.isfinite().all()) == (microbatch == 0)
                model(batch)
        with plan.at(5):  # a step that is done again is clean
            assert model(plan.poison(loader[0])).isfinite().all()
    assert [(i.kind, i.microbatch) for i in plan.log] == [("poison_activation", 0), ("poison_sample", 1)]


def test_batches_has_a_length_counts_on_over_epochs_and_can_start_later(loader):
    plan = FaultPlan([PoisonSample(steps=(9, 21))])
    batches = plan.batches(loader)
    assert len(batches) == 8
    bad = [not b.isfinite().all() for _ in range(2) for b in batches]
    assert bad.index(True) == 9
    assert [not b.isfinite().all() for b in plan.batches(iter(loader), start=20)].index(True) == 1
    assert not isinstance(plan.batches(iter(loader)), Sized)


@pytest.mark.parametrize(
    ("wrap", "steps"), [(list, [0, 0, 0, 1, 1, 2, 2, 2]), (iter, [0, 0, 0, 1, 1, 1, 2, 2])]
)
def test_the_last_step_of_a_loader_ends_with_it_if_its_length_is_known(wrap, steps):
    plan = FaultPlan([PoisonSample(steps=range(9), persistent=True)])
    for length in (5, 3):
        for _ in plan.batches(wrap([torch.zeros(2)] * length), accumulate=3):
            pass
    assert [i.step for i in plan.log] == steps


def test_detach_removes_everything_in_the_middle_of_a_step_and_after_an_error(tiny, loader):
    model = tiny()
    plan = FaultPlan([make(steps=range(10)) for make in EVERY if make(steps=(0,)).needs_model])
    attachment = plan.attach(model)
    stream = iter(plan.batches(loader))
    next(stream)
    assert hooks(model)
    with pytest.warns(RuntimeWarning, match="did not happen"):
        attachment.detach()
    assert not hooks(model)
    log = len(plan.log)
    for batch in stream:
        model(batch).sum().backward()
    attachment.detach()  # twice does no harm
    assert len(plan.log) == log

    def fail():
        with plan.attach(model):
            for _ in plan.batches(loader):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not hooks(model)


def test_a_fault_that_does_not_happen_is_said_at_the_end_of_its_step(tiny, loader):
    model = tiny()
    plan = FaultPlan([PoisonGradient(steps=(1,), parameter="head.weight")])
    with plan.attach(model):
        stream = iter(plan.batches(loader))
        next(stream)
        next(stream)
        with pytest.warns(RuntimeWarning, match=r"poison_gradient \(fault 0 .* step 1 .*backward"):
            next(stream)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stream.close()


@pytest.mark.parametrize(
    ("fault", "nearest"),
    [
        (PoisonActivation(steps=(1,), module="block.0.atn"), "'blocks.0.attn'"),
        (MatmulOverflow(steps=(1,), module="heads"), "'head'"),
        (WrongOperator(steps=(1,), operator="zero", module="blocks.2.*"), "'blocks.1'"),
        (PoisonGradient(steps=(1,), parameter="enter.wieght"), "'enter.weight'"),
        (FlipBit(steps=(1,), target="parameter", name="head.bais"), "'head.bias'"),
    ],
)
def test_an_unknown_name_is_refused_at_attach_with_the_nearest(fault, nearest, tiny):
    plan = FaultPlan([fault])
    with pytest.raises(ValueError, match="the model has no") as error:
        plan.attach(tiny())
    assert nearest in str(error.value)


def test_what_cannot_be_hit_is_refused_at_attach(tiny):
    model = tiny()
    model.head.bias.requires_grad_(False)
    for fault, error, message in [
        (PoisonGradient(steps=(1,), parameter="head.bias"), ValueError, "frozen"),
        (PoisonGradient(steps=(1,), parameter="head.weight", index=99), IndexError, "16 elements"),
        (FlipBit(steps=(1,), target="parameter", name="head.weight", index=(2, 0)), IndexError, "outside"),
        (FlipBit(steps=(1,), target="gradient", name="head.weight", bit=32), ValueError, "bits 0 to 31"),
    ]:
        with pytest.raises(error, match=message):
            FaultPlan([fault]).attach(model)
    with pytest.raises(ValueError, match="no module this fault"):
        FaultPlan([MatmulOverflow(steps=(1,))]).attach(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="no trained parameter"):
        FaultPlan([PoisonGradient(steps=(1,))]).attach(nn.ReLU())


def test_a_pattern_or_nothing_lets_the_seed_choose(tiny, train):
    def hit(seed, name):
        plan = FaultPlan([FlipBit(steps=(0,), target="gradient", name=name)], seed=seed)
        train(plan)
        return plan.log[0].where

    assert {hit(seed, "blocks.*.mlp.*") for seed in range(12)} == {
        f"blocks.{i}.mlp.{leaf}" for i in (0, 1) for leaf in ("weight", "bias")
    }
    assert len({hit(seed, None) for seed in range(12)}) > 4


def test_a_plan_is_used_as_it_should_be(tiny, loader):
    with pytest.raises(RuntimeError, match=r"call plan\.attach"):
        next(iter(FaultPlan([PoisonGradient(steps=(1,))]).batches(loader)))
    plan = FaultPlan([])
    plan.attach(tiny())
    with pytest.raises(RuntimeError, match="attached already"):
        plan.attach(tiny())
    with pytest.raises(ValueError, match="accumulate=0"):
        plan.batches(loader, accumulate=0)
    with pytest.raises(ValueError, match="start=-1"):
        plan.batches(loader, start=-1)
    with pytest.raises(ValueError, match="list of faults"):
        FaultPlan(PoisonSample(steps=(1,)))
    with pytest.raises(ValueError, match="is no fault"):
        FaultPlan(["nan"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 3}, r"steps=\(3,\)"),
        ({"steps": ()}, "steps is empty"),
        ({"steps": "all"}, "collection of numbers"),
        ({"steps": (-1,)}, "contains -1"),
        ({"steps": range(-2, 3)}, "contains -2"),
        ({"steps": (1,), "ranks": 0}, r"ranks=\(0,\)"),
        ({"steps": (1,), "microbatch": -1}, "microbatch=-1"),
        ({"steps": (1,), "value": "nan"}, r"math\.nan"),
        ({"steps": (1,), "position": -1}, "position=-1"),
        ({"steps": (1,), "index": (0, -1)}, "index="),
        ({"steps": (1,), "field": 0}, "field=0"),
    ],
)
def test_settings_are_checked_and_the_message_says_what_to_give(arguments, message):
    with pytest.raises(ValueError, match=message):
        PoisonSample(**arguments)


def test_settings_of_the_other_faults_are_checked_too():
    for make, message in [
        (lambda: FlipBit(steps=(1,), target="weight"), "parameter, gradient, activation"),
        (lambda: FlipBit(steps=(1,), target="gradient", bit=-1), "bit=-1"),
        (lambda: FlipBit(steps=(1,), target="gradient", path="0"), "no meaning"),
        (lambda: MatmulOverflow(steps=(1,), dtype=torch.int8), r"torch\.float16"),
        (lambda: MatmulOverflow(steps=(1,), nth=-1), "nth=-1"),
        (lambda: WrongOperator(steps=(1,), operator="wrong"), "uninitialised_rows, sign_flip, zero"),
        (lambda: WrongOperator(steps=(1,), operator="zero", phase="both"), "forward, backward"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_random_faults_are_seeded_concrete_and_spread_over_kinds_steps_and_ranks(tiny, train):
    faults = random_faults(tiny(), 60, seed=4, steps=range(3, 8), ranks=(0, 1))
    assert repr(faults) == repr(random_faults(tiny(), 60, seed=4, steps=range(3, 8), ranks=(0, 1)))
    assert repr(faults) != repr(random_faults(tiny(), 60, seed=5, steps=range(3, 8), ranks=(0, 1)))
    assert len({type(fault) for fault in faults}) == 6
    assert {step for fault in faults for step in fault.steps} == set(range(3, 8))
    assert {rank for fault in faults for rank in fault.ranks} == {0, 1}
    for fault in random_faults(tiny(), 12, seed=6, steps=range(8)):
        plan = FaultPlan([fault])
        train(plan)
        assert [(i.kind, i.step) for i in plan.log] == [(fault.kind, next(iter(fault.steps)))]
    with pytest.raises(ValueError, match="steps is empty"):
        random_faults(tiny(), 1, steps=())


def test_the_log_is_strict_json_even_for_complex_and_non_finite_numbers(loader):
    plan = FaultPlan([PoisonSample(steps=(0,), value=-math.inf)])
    next(iter(plan.batches([torch.ones(2, 2)])))
    assert plan.log[0].as_dict() == {
        "step": 0,
        "microbatch": 0,
        "rank": 0,
        "kind": "poison_sample",
        "target": "sample",
        "where": "",
        "index": list(plan.log[0].index),
        "before": 1.0,
        "after": "-inf",
        "bit": None,
        "elements": 1,
        "op": None,
    }
