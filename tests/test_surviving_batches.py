"""Whatever goes wrong, and whatever the budgets: the end is one that a fault-free run could have had.

Namely the run over the batches that survived: those of dropped steps are missing, and those of steps that
a rollback or a restart took back and that did not come again. It is made by plain torch, and compared bit for
bit.
"""

import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradsentinel import (
    Action,
    BeforeClip,
    Escalation,
    Finding,
    Kind,
    NanCallback,
    Retry,
    Rollback,
    Skip,
    TrainingAborted,
)
from loops import build, differences, make_batches, train_by_hand

FAULTS = ("gradient", "loss", "back", "weight", "moment", "statistic", "forward", "overflow")
OF_THE_STATE = ("weight", "moment", "statistic")
BATCHES = make_batches(14)


@dataclass
class Plan:
    """What goes wrong, by attempted step of each life, and what the run may do about it."""

    lives: list[dict[int, str]]
    settings: dict[str, object]
    rollback: dict[str, Any]
    max_skips: int
    max_retries: int | None
    accumulate: int
    escalation: dict[str, int] | None

    def callbacks(self):
        """Without faults of the state nobody looks at that, and healthy steps take the short way."""
        spoilt = any(fault in OF_THE_STATE for life in self.lives for fault in life.values())
        return [
            NanCallback(state_every=1) if spoilt else NanCallback(state_every=1000, state_warmup=0),
            Skip(max_skips=self.max_skips),
            *([] if self.max_retries is None else [Retry(max_retries=self.max_retries)]),
            Rollback(**self.rollback),
            *([] if self.escalation is None else [Escalation(**self.escalation)]),
        ]


plans = st.builds(
    Plan,
    lives=st.lists(
        st.dictionaries(st.integers(0, 13), st.sampled_from(FAULTS), max_size=6), min_size=1, max_size=3
    ),
    settings=st.fixed_dictionaries(
        {
            "optimizer": st.sampled_from(["sgd", "adamw", "adamw-fused", "adagrad"]),
            "scheduler": st.sampled_from([None, "cosine", "lambda"]),
            "ema": st.booleans(),
            "max_norm": st.sampled_from([None, 0.5]),
        }
    ),
    rollback=st.fixed_dictionaries(
        {
            "every": st.integers(1, 4),
            "confirm_after": st.integers(0, 3),
            "keep": st.integers(1, 3),
            "after": st.integers(1, 3),
            "max_rollbacks": st.integers(0, 3),
            "on_disk": st.integers(0, 2),
            "data": st.sampled_from(["go_on", "replay"]),
        }
    ),
    max_skips=st.integers(0, 3),
    max_retries=st.none() | st.integers(0, 3),
    accumulate=st.integers(1, 2),
    escalation=st.none()
    | st.fixed_dictionaries({"max_skips": st.integers(0, 4), "max_rollbacks": st.integers(0, 3)}),
)


class Survivors:
    """The batches that the state is made of, by step: those of its micro-batches."""

    def __init__(self):
        self.made: list[tuple[int, list[int]]] = []

    def back_to(self, step):
        self.made = [(at, batches) for at, batches in self.made if at < step]

    def state(self, plan):
        reference = build(**plan.settings)
        for _, batches in self.made:  # the last window may be a short one, and its loss is divided alike
            reference.accumulate = plan.accumulate
            train_by_hand(reference, [BATCHES[batch] for batch in batches])
        return reference.state()


def spoil(run, fault):
    """Do the harm that is done behind the loop's back."""
    with torch.no_grad():
        if fault == "weight":
            run.model.head.weight[0, 0] = math.nan
        elif fault == "statistic":
            run.model.norm.running_var[1] = math.inf
        elif fault == "moment":
            for entries in run.optimizers[0].state.values():
                next(value for value in entries.values() if value.dim())[0] = math.nan


def hear(sentinel, faults, asked):
    """Let a function ask for a rollback, if that is to happen: one that listens looks at every step."""
    if "back" in faults.values():
        sentinel.on(
            BeforeClip,
            lambda event: Finding(kind=Kind.SPIKE, value=torch.tensor(asked[0]), action=Action.ROLLBACK),
        )


def live(plan, run, folder, faults, survivors):
    """One process's life; True if it came to the end of the data."""
    asked, fault, armed = [False], None, []
    run.model.enter.register_forward_hook(lambda _, __, output: output * armed.pop() if armed else None)

    def forward(_, batch):
        return run.loss(batch)

    with run.sentinel(plan.callbacks(), run_dir=folder, resume="auto", forward=forward) as sentinel:
        survivors.back_to(sentinel.step_count)
        hear(sentinel, faults, asked)
        position = sentinel.data_position
        if position["epoch"]:
            return True
        window: list[int] = []
        for attempt, batch in enumerate(sentinel.steps(BATCHES, accumulate=plan.accumulate)):
            fault, step = faults.get(attempt), sentinel.step_count
            window.append(next(n for n, one in enumerate(BATCHES) if one is batch))
            asked[0] = asked[0] or fault == "back"
            if fault in {
                "forward",
                "overflow",
            }:  # a passing one: it makes the loss NaN, or only statistics Inf
                armed.append(math.nan if fault == "forward" else 1e30)
            loss = run.loss(batch)
            sentinel.backward(loss * math.nan if fault == "loss" else loss)
            if fault == "gradient":
                run.model.head.bias.grad[1] = math.inf
            if sentinel.step(max_norm=run.max_norm) is None:
                continue
            asked[0] = False
            if sentinel.step_count <= step:
                survivors.back_to(sentinel.step_count)
            elif sentinel.applied:
                survivors.made.append((step, window))
            window = []
            if fault in OF_THE_STATE:
                spoil(run, fault)
        return fault not in OF_THE_STATE  # nobody has looked since


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("value", [math.nan, 1.0])
def test_a_last_window_whose_last_batch_is_left_out_is_stepped(accumulate, value, tmp_path):
    """After a restart nothing comes behind the batch before it: that one has to be stepped with."""
    last = len(BATCHES) - 1
    bad = [*BATCHES[:last], {**BATCHES[last], "x": BATCHES[last]["x"] * value}]

    def live(*, until_it_fails):
        run = build(accumulate=accumulate)
        callbacks = [NanCallback(state_every=1), Skip(max_skips=0), Rollback(max_rollbacks=0)]
        with run.sentinel(callbacks, run_dir=tmp_path, resume="auto") as sentinel:
            for number, batch in enumerate(sentinel.steps(bad, accumulate=accumulate)):
                sentinel.backward(run.loss(batch))
                if until_it_fails and number == last:
                    run.model.head.bias.grad[1] = math.inf
                sentinel.step()
        return sentinel

    with pytest.raises(TrainingAborted):
        live(until_it_fails=True)
    sentinel = live(until_it_fails=False)
    first = sentinel._watch.run.resumed_from * accumulate
    assert first < last
    assert sum(one.left_out for one in sentinel._watch.run.skipped.entries) == 1
    assert sentinel.applied_steps == -(-(last - first) // accumulate)


@pytest.mark.slow
@pytest.mark.timeout(600)  # hundreds of small trainings
@settings(max_examples=25)
@example(
    Plan(
        lives=[{12: "gradient"}, {}],
        settings={"optimizer": "sgd", "scheduler": None, "ema": False, "max_norm": None},
        rollback={"every": 1, "confirm_after": 0, "keep": 1, "after": 1, "max_rollbacks": 0},
        max_skips=0,
        max_retries=None,
        accumulate=2,
        escalation=None,
    )
)
@given(plans)
def test_any_faults_and_budgets(plan):
    folder, survivors = Path(tempfile.mkdtemp()), Survivors()
    try:
        for faults in plan.lives:
            run = build(**plan.settings)
            try:
                if live(plan, run, folder, faults, survivors):
                    assert differences(run.state(), survivors.state(plan)) == []
                    return
            except TrainingAborted:
                pass
        left = build(**plan.settings)  # what is on disk when nobody starts it again
        with left.sentinel([NanCallback()], run_dir=folder, resume="auto") as sentinel:
            survivors.back_to(sentinel.step_count)
        assert differences(left.state(), survivors.state(plan)) == []
    finally:
        shutil.rmtree(folder)


def test_healthy_steps_of_such_a_run_take_the_short_way(tmp_path):
    """Else the test above would say nothing of it."""
    plan = Plan(
        lives=[{4: "gradient"}],
        settings={"optimizer": "adamw", "scheduler": None, "ema": False, "max_norm": 0.5},
        rollback={"every": 4},
        max_skips=1,
        max_retries=1,
        accumulate=1,
        escalation=None,
    )
    run = build(**plan.settings)
    glanced = []
    with run.sentinel(
        plan.callbacks(), run_dir=tmp_path, forward=lambda _, batch: run.loss(batch)
    ) as sentinel:
        for batch in sentinel.steps(BATCHES):
            sentinel.backward(run.loss(batch))
            sentinel.step(max_norm=run.max_norm)
            glanced.append(sentinel._decision.glanced)
    assert sum(glanced) > len(BATCHES) // 2
