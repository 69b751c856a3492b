"""What is easily done wrong with the adapters: it is refused with what to do instead, or does no harm."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import pytest
import torch
from drivers import hf, pl
from drivers.bare import forget_accelerator
from safetensors.torch import load_file
from torch import nn
from training import Recorder, Task, Trouble, quiet

from gradsentinel import ConfigurationError, NanCallback, Rollback, Skip, TrainingAborted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAN = float("nan")


def test_the_same_callbacks_in_another_trainer_begin_a_run_of_their_own(tmp_path):
    from gradsentinel.integrations.huggingface import adapt

    record, skip = Recorder(), Skip(max_skips=1)
    shared = [adapt(record), adapt(NanCallback()), adapt(skip)]

    def task():
        return Task(trouble=Trouble(loss={2: NAN}, transient=False))

    hf.train(task(), tmp_path / "one", shared)
    hf.train(task(), tmp_path / "two", shared)  # a budget that was spent would stop it
    steps = [
        [path.name for path in (tmp_path / name / "trainer" / "gradsentinel" / "incidents").iterdir()]
        for name in ("one", "two")
    ]
    assert [[name[:6] for name in names] for names in steps] == [["000002"], ["000002"]]


def test_but_in_the_same_one_they_go_on(tmp_path):
    from gradsentinel.integrations.huggingface import adapt

    record = adapt(Recorder())
    trainer = hf.hf_trainer(Task(), tmp_path, [record, adapt(NanCallback())])
    with quiet():
        trainer.train()
        trainer.train()
    assert record.callback.run.iteration == 12


def test_the_same_callbacks_in_two_trainers_that_train_at_once_are_refused(tmp_path):
    from transformers import TrainerCallback

    from gradsentinel.integrations.huggingface import adapt

    record, lone = adapt(Recorder()), adapt(NanCallback())
    other = hf.hf_trainer(Task(), tmp_path / "other", [adapt(NanCallback()), record])
    caught = []

    class TrainsAnother(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                with pytest.raises(ConfigurationError, match="is watching another Trainer") as error:
                    other.train()
                caught.append(error.value)

    trainer = hf.hf_trainer(Task(nested=True), tmp_path / "one", [lone, record, TrainsAnother()])
    with quiet():
        trainer.train()
        assert len(caught) == 1
        assert len(record.callback.applied) == 6  # it went on as if nothing had been
        assert "training_step" not in vars(other)
        other.train()  # now that the first one is done
    assert other.state.global_step == 6


def test_nor_may_lightnings_trainers_share_them_at_once(tmp_path):
    import lightning.pytorch

    task = Task()
    (record, lone, settings) = pl.native(tmp_path / "run", Recorder(), NanCallback())
    _, other = pl.Lightning().trainer(task, [lone, record, settings])
    module = pl.lightning_module(lightning.pytorch, task, task.net(), manual=False)
    caught = []

    class FitsAnother(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                with pytest.raises(ConfigurationError, match="is watching another Trainer") as error:
                    other.fit(module, task.loader())
                caught.append(error.value)

    pl.fit(task, [record, lone, settings, FitsAnother()])
    assert len(caught) == 1
    assert len(record.callback.applied) == 6
    with quiet():
        other.fit(module, task.loader())
    assert other.global_step == 6


def test_an_earlier_runs_checkpoint_is_not_taken_for_ones_own(tmp_path, caplog):
    old = hf.train(Task(count=4), tmp_path, [], save_strategy="steps", save_steps=3)
    folder = tmp_path / "trainer" / "checkpoint-3"
    before = load_file(folder / "model.safetensors")
    spoilt = Task(trouble=Trouble(loss={3: NAN}, transient=False), max_norm=0.1)
    given = hf.native(tmp_path / "run", NanCallback(action="abort"), Rollback(every=1, confirm_after=0))
    with caplog.at_level("WARNING", logger="gradsentinel"), pytest.raises(TrainingAborted) as caught:
        hf.train(spoilt, tmp_path, given)
    assert old.state.global_step == 4
    assert str(caught.value).endswith(f"good state is {folder}")
    now = load_file(folder / "model.safetensors")
    assert any(not torch.equal(value, before[name]) for name, value in now.items())
    kept = load_file(tmp_path / "trainer" / "earlier-checkpoint-3" / "model.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in kept.items())
    assert "earlier-checkpoint-3" in caplog.text
    assert "resume='auto'" not in str(caught.value)  # there is no Sentinel to give that to


def test_one_that_the_run_has_written_itself_is_left_as_it_is(tmp_path):
    spoilt = Task(trouble=Trouble(loss={3: NAN}, transient=False))
    given = hf.native(tmp_path / "run", NanCallback(action="abort"), Rollback(every=1, confirm_after=0))
    with pytest.raises(TrainingAborted, match=r"checkpoint-3 \(written before\)"):
        hf.train(spoilt, tmp_path, given, save_strategy="steps", save_steps=3)
    assert [path.name for path in (tmp_path / "trainer").glob("*checkpoint*")] == ["checkpoint-3"]


def fabric_loop():
    from lightning.fabric import Fabric

    from gradsentinel.integrations.lightning.fabric import prepare

    tool, net = Fabric(accelerator="cpu", devices=1), nn.Linear(4, 1)
    model, optimizer = tool.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return tool, model, optimizer, prepare


def accelerate_loop():
    from accelerate import Accelerator

    from gradsentinel.integrations.accelerate import prepare

    forget_accelerator()
    tool, net = Accelerator(cpu=True), nn.Linear(4, 1)
    model, optimizer = tool.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return tool, model, optimizer, prepare


@pytest.mark.parametrize("make", [fabric_loop, accelerate_loop])
def test_a_loop_that_is_watched_is_not_watched_twice(tmp_path, make):
    tool, model, optimizer, prepare = make()
    plain = [set(vars(one)) for one in (tool, optimizer)]
    first = prepare(tool, model, optimizer, run_dir=tmp_path / "one")
    with pytest.raises(ConfigurationError, match=r"watched already: close\(\) that sentinel first"):
        prepare(tool, model, optimizer, run_dir=tmp_path / "two")
    assert not (tmp_path / "two").exists()
    first.close()
    assert [set(vars(one)) for one in (tool, optimizer)] == plain
    with prepare(tool, model, optimizer, run_dir=tmp_path / "two"):
        pass
    assert [set(vars(one)) for one in (tool, optimizer)] == plain


@pytest.mark.parametrize("make", [fabric_loop, accelerate_loop])
@pytest.mark.parametrize("kind", ["lightning", "huggingface"])
def test_a_trainers_callback_in_a_loop_is_told_where_to_come_from(tmp_path, make, kind):
    import importlib

    adapter = importlib.import_module(f"gradsentinel.integrations.{kind}")
    tool, model, optimizer, prepare = make()
    with pytest.raises(ConfigurationError, match="from gradsentinel import NanCallback"):
        prepare(tool, model, optimizer, callbacks=[adapter.NanCallback()], run_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="from gradsentinel import NanCallback"):
        adapter.adapt(adapter.NanCallback())


def test_a_class_in_the_list_of_a_trainer_is_named(tmp_path):
    from gradsentinel.integrations.lightning import NanCallback

    with pytest.raises(
        ConfigurationError, match=r"NanCallback is a class; give an instance: NanCallback\(\)"
    ):
        pl.fit(Task(), [NanCallback], default_root_dir=tmp_path)


def test_two_settings_of_one_run_are_refused(tmp_path):
    from gradsentinel.integrations.huggingface import NanCallback, RunSettings

    given = [RunSettings(run_dir=tmp_path / "a"), NanCallback(), RunSettings(run_dir=tmp_path / "b")]
    with pytest.raises(ConfigurationError, match="2 RunSettings in one list of callbacks: give one"):
        hf.train(Task(), tmp_path, given)


def test_going_on_in_the_same_directory_asks_for_no_resume(tmp_path, caplog):
    def run(epochs, path=None):
        given = pl.native(tmp_path / "run", NanCallback(), Rollback(every=2, confirm_after=0, on_disk=1))
        return pl.fit(Task(), given, max_epochs=epochs, path=path)

    run(1).save_checkpoint(tmp_path / "one.ckpt")
    assert list((tmp_path / "run" / "snapshots").iterdir())
    with caplog.at_level("WARNING", logger="gradsentinel"):
        run(2, tmp_path / "one.ckpt")
    assert [one.message for one in caplog.records if one.name == "gradsentinel"] == []
