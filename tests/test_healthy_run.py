"""P1: a healthy run ends bit for bit where it would have ended without GradSentinel."""

import shutil

import pytest
import torch

from gradsentinel import (
    MagnitudeCallback,
    NanCallback,
    Rollback,
    Sentinel,
    SnapshotSaver,
    TensorBoardCallback,
)
from loops import Training, build, differences, finish, generators, make_batches, train_by_hand, train_watched

STEPS = 12


def all_callbacks():
    return [
        NanCallback(),
        MagnitudeCallback(max_global_norm=1e6, max_parameter_norm=1e6, max_value=1e6),
        Rollback(every=5, confirm_after=2),
        SnapshotSaver(),
        TensorBoardCallback(),
    ]


def outcome(run: Training):
    return {**run.state(), "losses": run.losses, "norms": run.norms, "generators": generators()}


def compare(settings, run_dir, *, batches=None):
    """Train twice from the same start, and hold the two outcomes against each other."""
    batches = batches or make_batches(STEPS)
    reference = build(**settings)
    train_by_hand(reference, batches)
    expected = outcome(reference)
    watched = build(**settings)
    with watched.sentinel(all_callbacks(), run_dir=run_dir) as sentinel:
        finish(train_watched(watched, sentinel, batches))
        assert sentinel.incidents == ()
    assert differences(outcome(watched), expected) == []
    return sentinel, reference


@pytest.mark.parametrize("max_norm", [None, 1.2], ids=["unclipped", "clipped"])
@pytest.mark.parametrize(
    "optimizer",
    ["sgd", "adamw", "adamw-foreach", "adamw-fused", "adamw-amsgrad", "rmsprop", "adagrad"],
)
def test_optimizers(optimizer, max_norm, run_dir):
    sentinel, reference = compare({"optimizer": optimizer, "max_norm": max_norm, "random": True}, run_dir)
    assert sentinel.applied_steps == STEPS
    assert max_norm is None or min(reference.norms) < max_norm < max(
        reference.norms
    )  # both branches of the clip


@pytest.mark.parametrize("scheduler", ["onecycle", "lambda", "cosine"])
def test_schedulers(scheduler, run_dir):
    compare({"scheduler": scheduler, "max_norm": 1.0, "random": True}, run_dir)


@pytest.mark.parametrize("max_norm", [None, 1.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("batches", [12, 14], ids=["whole windows", "short last window"])
def test_accumulation(batches, max_norm, run_dir):
    sentinel, _ = compare(
        {"accumulate": 4, "max_norm": max_norm, "scheduler": "cosine", "random": True},
        run_dir,
        batches=make_batches(batches),
    )
    assert sentinel.applied_steps == -(-batches // 4)


def test_average_of_the_weights(run_dir):
    compare({"ema": True, "random": True, "max_norm": 1.0}, run_dir)


def test_two_optimizers(run_dir):
    compare({"two_optimizers": True, "scheduler": "cosine", "random": True, "max_norm": 1.0}, run_dir)


@pytest.mark.parametrize("max_norm", [None, 1.0], ids=["unclipped", "clipped"])
def test_bfloat16_autocast(max_norm, run_dir):
    compare({"autocast": torch.bfloat16, "max_norm": max_norm, "random": True}, run_dir)


# torch's own remark on every loop whose first steps overflow; the loop by hand makes it too
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw-fused"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_float16_with_a_scaler_that_still_searches(optimizer, accumulate, run_dir):
    settings = {
        "optimizer": optimizer,
        "autocast": torch.float16,
        "scale": 2.0**22,
        "scheduler": "onecycle",
        "accumulate": accumulate,
        "max_norm": 1.0,
        "random": True,
    }
    sentinel, reference = compare(settings, run_dir, batches=make_batches(STEPS * accumulate))
    skips = [
        event for event in sentinel._watch.run.directory.read_events() if event["event"] == "scaler_skip"
    ]
    assert len(skips) >= 2, "the scale is high enough to make the first steps overflow"
    assert sentinel.applied_steps == STEPS - len(skips) > 3
    assert reference.scaler.get_scale() < 2.0**22


def test_a_loop_without_steps(run_dir):
    batches = make_batches(STEPS)
    reference = build(random=True, scheduler="cosine", max_norm=1.0)
    train_by_hand(reference, batches)
    expected = outcome(reference)
    watched = build(random=True, scheduler="cosine", max_norm=1.0)
    with watched.sentinel(all_callbacks(), run_dir=run_dir) as sentinel:
        for batch in batches:
            loss = watched.loss(batch)
            watched.losses.append(loss.detach())
            loss.backward()
            watched.norms.append(sentinel.step(max_norm=1.0))
    assert differences(outcome(watched), expected) == []
    assert sentinel.incidents == ()


def test_a_loop_that_cannot_be_edited(run_dir):
    settings = {"random": True, "scheduler": "cosine", "max_norm": 1.0, "optimizer": "adamw-fused"}
    batches = make_batches(STEPS)
    reference = build(**settings)
    train_by_hand(reference, batches)
    expected = outcome(reference)
    watched = build(**settings)
    with (
        Sentinel(watched.model, watched.optimizers, callbacks=all_callbacks(), run_dir=run_dir) as sentinel,
        sentinel.attached(),
    ):
        train_by_hand(watched, batches)
    assert differences(outcome(watched), expected) == []
    assert sentinel.incidents == ()
    assert sentinel.step_count == STEPS


# torch's compiler imports its own deprecated parts
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:Skipping serialization of skipfiles:UserWarning")  # torch 2.6, of itself
@pytest.mark.slow
@pytest.mark.skipif(
    not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")),
    reason="torch.compile needs a C++ compiler",
)
def test_a_compiled_model(run_dir):
    def compiled():
        run = build(max_norm=1.0)
        run.called = torch.compile(run.model)
        return run

    batches = make_batches(6)
    reference = compiled()
    train_by_hand(reference, batches)
    expected = outcome(reference)
    watched = compiled()
    with watched.sentinel(all_callbacks(), run_dir=run_dir) as sentinel:
        finish(train_watched(watched, sentinel, batches))
    assert differences(outcome(watched), expected) == []
    assert sentinel.incidents == ()
