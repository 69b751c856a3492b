"""What a Lightning checkpoint holds of the run is found again, whatever became of the list of callbacks."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import warnings

import pytest
import torch
from drivers.pl import Lightning, fit, lightning_module
from training import Task, Trouble

from gradsentinel import Detector

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAN = float("nan")


class Counter(Detector):
    """Remembers how many steps it has seen."""

    def __init__(self):
        self.steps = 0

    def on_after_step(self, event):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def switch():
    pass


def lists(folder):
    """The callbacks that write the checkpoint, and those that go on from it."""
    from gradsentinel.integrations.lightning import (
        MagnitudeCallback,
        NanCallback,
        Rollback,
        RunSettings,
        SafeMode,
        SpikeCallback,
        adapt,
    )

    def where(name):
        return RunSettings(run_dir=folder / name)

    def mode():
        return SafeMode(switches={"flash": (lambda: None, switch)})

    count = [adapt(Counter()) for _ in range(14)]
    return {
        "same": ([NanCallback(), count[0], where("a")], [NanCallback(), count[1], where("b")]),
        "another directory": ([where("a"), NanCallback(), count[2]], [where("b"), NanCallback(), count[3]]),
        "a setting": (
            [NanCallback(state_every=50), count[4], where("a")],
            [NanCallback(state_every=60), count[5], where("b")],
        ),
        "first gone": ([NanCallback(), count[6], where("a")], [count[7], SpikeCallback(), where("b")]),
        "a new first": ([count[8], where("a")], [Rollback(), NanCallback(), count[9], where("b")]),
        "an address": ([mode(), count[10], where("a")], [mode(), count[11], where("b")]),
        "two of a kind": (
            [
                MagnitudeCallback(max_global_norm=1e8),
                MagnitudeCallback(max_global_norm=1e9),
                count[12],
                where("a"),
            ],
            [
                MagnitudeCallback(max_global_norm=1e7),
                MagnitudeCallback(max_global_norm=1e9),
                count[13],
                where("b"),
            ],
        ),
    }


CHANGES = (
    "same",
    "another directory",
    "a setting",
    "first gone",
    "a new first",
    "an address",
    "two of a kind",
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_is_taken_up_whatever_became_of_the_list(tmp_path, change):
    first, second = lists(tmp_path)[change]
    written = fit(Task(), first, max_epochs=1)
    written.save_checkpoint(tmp_path / "one.ckpt")
    keys = [
        key
        for key in torch.load(tmp_path / "one.ckpt", weights_only=True)["callbacks"]
        if "gradsentinel" in key
    ]
    assert "gradsentinel.Counter" in keys
    assert all("0x" not in key for key in keys)
    fit(Task(), second, max_epochs=2, path=tmp_path / "one.ckpt")
    counter = next(one.callback for one in second if isinstance(one.callback, Counter))
    assert counter.steps == 12
    engine = next(one for one in second if one._ended is not None)._ended[1]
    assert (engine["step"], engine["iteration"]) == (12, 12)


def test_what_the_added_rungs_have_spent_comes_along(tmp_path):
    from gradsentinel.integrations.lightning import NanCallback, Rollback

    spoilt = Task(trouble=Trouble(loss={2: NAN}, transient=False))
    written = fit(spoilt, [NanCallback()], max_epochs=1, default_root_dir=tmp_path)
    written.save_checkpoint(tmp_path / "one.ckpt")
    second = [Rollback(), NanCallback()]
    fit(Task(), second, max_epochs=2, path=tmp_path / "one.ckpt", default_root_dir=tmp_path)
    assert second[0]._ended[1]["callbacks"]["Skip"] == {"spent": [2]}


def test_one_written_without_us_is_said_to_hold_nothing_and_nothing_else_is(tmp_path, caplog):
    fit(Task(), [], max_epochs=1).save_checkpoint(tmp_path / "alone.ckpt")
    first, second = lists(tmp_path)["a setting"]
    with caplog.at_level("WARNING", logger="gradsentinel"):
        fit(Task(), first, max_epochs=2, path=tmp_path / "alone.ckpt").save_checkpoint(tmp_path / "two.ckpt")
    assert caplog.text.count("written without GradSentinel") == 1
    caplog.clear()
    task = Task()
    pl, trainer = Lightning().trainer(task, second, max_epochs=3)
    module = lightning_module(pl, task, task.net(), manual=False)
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("WARNING", logger="gradsentinel"):
        warnings.simplefilter("always")
        trainer.fit(module, task.loader(), ckpt_path=tmp_path / "two.ckpt")
    assert not [one for one in caught if "need to be provided" in str(one.message)]
    assert "without GradSentinel" not in caplog.text


@pytest.mark.parametrize("ours_first", [True, False])
def test_the_gate_stands_until_the_last_checkpoint_is_written(tmp_path, ours_first):
    import lightning.pytorch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from gradsentinel.integrations.lightning import NanCallback, Rollback, RunSettings

    class Late(lightning.pytorch.Callback):
        def on_train_end(self, trainer, pl_module):
            with torch.no_grad():
                pl_module.net.head.weight[0, 0] = NAN

    ours = [NanCallback(), Rollback(every=2, confirm_after=1), RunSettings(run_dir=tmp_path / "run")]
    keep = ModelCheckpoint(
        dirpath=tmp_path / "kept", save_last=True, every_n_train_steps=1000, save_on_train_epoch_end=False
    )
    given = [*ours, Late(), keep] if ours_first else [Late(), *ours, keep]
    trainer = fit(Task(), given, enable_checkpointing=True, default_root_dir=tmp_path)
    saved = torch.load(tmp_path / "kept" / "last.ckpt", weights_only=False)["state_dict"]
    assert all(bool(torch.isfinite(value).all()) for value in saved.values())
    assert len(list((tmp_path / "run" / "incidents").iterdir())) == 1
    assert not {"on_train_end", "optimizer_step"} & vars(trainer.strategy).keys()
    assert "save_checkpoint" not in vars(trainer)
