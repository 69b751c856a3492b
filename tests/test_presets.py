"""The recommended callbacks: they work together, with everything that goes wrong in one run."""

import importlib.util

import pytest
from torch import nn

import gradsentinel
from gradsentinel import Rollback, Sentinel
from gradsentinel.callbacks import TensorBoardCallback
from loops import Spoiler, build, finish, make_batches, train_watched


def names(callbacks):
    return [type(callback).__name__ for callback in callbacks]


def test_without_a_directory_nothing_is_kept_on_disk():
    callbacks = gradsentinel.standard()
    assert "TensorBoardCallback" not in names(callbacks)
    (rollback,) = [callback for callback in callbacks if isinstance(callback, Rollback)]
    assert rollback.on_disk == 0


def test_with_one_two_states_and_tensorboard_if_it_is_installed(run_dir, monkeypatch):
    callbacks = gradsentinel.standard(run_dir)
    assert isinstance(callbacks[-1], TensorBoardCallback)
    (rollback,) = [callback for callback in callbacks if isinstance(callback, Rollback)]
    assert rollback.on_disk == 2
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert names(gradsentinel.standard(run_dir)) == names(callbacks)[:-1]
    assert not run_dir.exists(), "asking for them must not make anything"


def test_each_call_gives_callbacks_of_its_own():
    first, second = gradsentinel.standard(), gradsentinel.standard()
    assert not {id(callback) for callback in first} & {id(callback) for callback in second}


def test_a_run_with_all_of_them_survives_what_comes(run_dir):
    run = build(random=True, scheduler="cosine", ema=True, max_norm=1.0)
    forward = lambda model, batch: nn.functional.cross_entropy(model(batch["x"]).float(), batch["y"])  # noqa: E731
    callbacks = gradsentinel.standard(run_dir)
    with run.sentinel(callbacks, run_dir=run_dir, forward=forward, resume="auto") as sentinel:
        spoiler = Spoiler("gradient", frozenset({5}))
        batches = Spoiler("input", frozenset({9})).batches(make_batches(30))
        finish(train_watched(run, sentinel, batches, spoil=spoiler))
    assert [(i.step, str(i.outcome)) for i in sentinel.incidents] == [(5, "retried"), (9, "skipped")]
    assert sentinel.applied_steps == 29
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())
    assert {path.name for path in run_dir.iterdir()} >= {
        "events-rank0.jsonl",
        "incidents",
        "escalation.json",
        "skipped-batches.json",
    }
    assert list(run_dir.glob("events.out.tfevents.*"))


@pytest.mark.parametrize("run_dir", ["runs/x", None])
def test_it_takes_a_string_or_nothing(run_dir):
    assert len(gradsentinel.standard(run_dir)) >= 9


def test_a_loop_without_forward_works_with_them_too(run_dir):
    run = build()
    with Sentinel(
        run.model, run.optimizers, callbacks=gradsentinel.standard(run_dir), run_dir=run_dir
    ) as sentinel:
        finish(train_watched(run, sentinel, make_batches(6), spoil=Spoiler("loss", frozenset({3}))))
    assert [str(incident.outcome) for incident in sentinel.incidents] == ["skipped"]
