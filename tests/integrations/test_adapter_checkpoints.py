"""A framework's checkpoint is never written from a bad state, by whichever way it is written."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drivers import hf, pl
from drivers.bare import forget_accelerator
from safetensors.torch import load_file
from torch import Tensor
from training import Recorder, Task, Trouble, quiet

from gradsentinel import NanCallback, Rollback, TrainingAborted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAN = float("nan")
REFUSED = "no checkpoint is written of this state"


def poison(host: Any, where: str) -> None:
    with torch.no_grad():
        if where == "weight":
            next(iter(host.named_parameters()))[1].view(-1)[0] = NAN
        else:
            next(iter(host.optimizers[0].state.values()))["exp_avg"].view(-1)[0] = NAN


class Poison(Recorder):
    """Puts a NaN into the state behind everybody's back, after a given step."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def on_after_step(self, event):
        super().on_after_step(event)
        if event.step == 3:
            poison(self.run.host, self.where)


def blind() -> NanCallback:
    """Looks at the state at the start and at the end only."""
    return NanCallback(state_warmup=0, state_every=1000)


def rollback() -> Rollback:
    return Rollback(every=2, confirm_after=1)


def all_finite(saved: Any) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in tensors(saved))


def sound(path: Path) -> bool:
    """What Lightning's own callbacks keep in there begins with infinities."""
    saved = torch.load(path, weights_only=False)
    return all_finite([saved["state_dict"], saved["optimizer_states"]])


def tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(part)


@pytest.fixture(params=["weight", "moment"])
def where(request):
    return request.param


# -- Lightning ------------------------------------------------------------------------------------------


def fit(folder: Path, where: str, *given: Any, task: Task | None = None, first: Any = (), last: Any = ()):
    ours = pl.native(folder / "run", Poison(where), blind(), *given)
    return pl.fit(task or Task(), [*first, *ours, *last], enable_checkpointing=True, default_root_dir=folder)


def checkpoint(folder: Path, **settings: Any):
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(dirpath=folder, save_top_k=-1, **settings)


@pytest.mark.parametrize("settings", [{"every_n_train_steps": 2}, {"every_n_epochs": 1}], ids=str)
def test_model_checkpoint_gets_the_state_before_or_nothing(tmp_path, where, settings):
    fit(tmp_path, where, rollback(), last=[checkpoint(tmp_path / "healed", **settings)])
    found = list((tmp_path / "healed").glob("*.ckpt"))
    assert len(found) == (3 if "every_n_train_steps" in settings else 1)
    assert all(sound(path) for path in found)
    found_by = REFUSED if "every_n_train_steps" in settings else "the state itself is bad"
    with pytest.raises(TrainingAborted, match=found_by):
        fit(tmp_path / "b", where, first=[checkpoint(tmp_path / "stopped", **settings)])
    left = list((tmp_path / "stopped").glob("*.ckpt"))
    assert len(left) == (1 if "every_n_train_steps" in settings else 0)  # of step 2


def test_a_modules_own_call_of_save_checkpoint_is_checked(tmp_path, where):
    import lightning.pytorch

    class Saves(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 3:
                trainer.save_checkpoint(tmp_path / "mine.ckpt")

    with pytest.raises(TrainingAborted, match=REFUSED):
        fit(tmp_path, where, last=[Saves()])
    assert not (tmp_path / "mine.ckpt").exists()
    fit(tmp_path / "b", where, rollback(), last=[Saves()])
    assert sound(tmp_path / "mine.ckpt")


@pytest.mark.parametrize("kind", ["OnExceptionCheckpoint", "ModelCheckpoint"])
@pytest.mark.parametrize("first", [True, False])
def test_one_that_is_written_on_an_exception_is_left_out_and_the_exception_passes(
    tmp_path, where, kind, first, caplog
):
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    def run(folder, poisoned):
        error = RuntimeError("mine")
        saves = (
            OnExceptionCheckpoint(folder)
            if kind == "OnExceptionCheckpoint"
            else checkpoint(folder, every_n_train_steps=100, save_on_exception=True)
        )
        task = Task(trouble=Trouble(raises={4: error}))
        ours = pl.native(folder / "run", Poison(where) if poisoned else Recorder(), blind())
        given = [saves, *ours] if first else [*ours, saves]
        _, trainer = pl.Lightning().trainer(
            task, given, enable_checkpointing=True, default_root_dir=folder, logger=False
        )
        import lightning.pytorch

        module = pl.lightning_module(lightning.pytorch, task, task.net(), manual=False)
        with quiet(), pytest.raises(RuntimeError, match="mine") as caught:
            trainer.fit(module, task.loader())
        assert caught.value is error
        assert ("save_checkpoint" in vars(trainer)) is poisoned  # what is left of a bad end stays refused
        assert not {"teardown", "optimizer_step"} & vars(trainer.strategy).keys()
        return list(folder.glob("*.ckpt"))

    assert run(tmp_path / "bad", poisoned=True) == []
    assert REFUSED in caplog.text
    (written,) = run(tmp_path / "good", poisoned=False)
    assert sound(written)


def test_a_run_that_is_aborted_leaves_no_bad_checkpoint_of_anybodys(tmp_path, where):
    last = checkpoint(tmp_path / "kept", every_n_train_steps=2, save_on_exception=True, save_last=True)
    with pytest.raises(TrainingAborted):
        fit(tmp_path, where, last=[last])
    found = [*(tmp_path / "kept").glob("*.ckpt"), *(tmp_path / "run").glob("*.ckpt")]
    assert found
    assert all(sound(path) for path in found)


# -- Hugging Face ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"save_steps": 2}, {"save_strategy": "epoch"}], ids=str)
def test_the_trainers_checkpoints_are_of_the_state_before_or_not_there(tmp_path, where, settings):
    settings = {"save_strategy": "steps", **settings}

    def train(folder, *given):
        ours = hf.native(folder / "run", Poison(where), blind(), *given)
        return hf.train(Task(), folder, ours, **settings)

    train(tmp_path / "healed", rollback())
    found = sorted((tmp_path / "healed" / "trainer").glob("checkpoint-*"))
    steps = (2, 4, 6) if "save_steps" in settings else (6,)
    assert [path.name for path in found] == [f"checkpoint-{step}" for step in steps]
    for path in found:
        assert all_finite(load_file(path / "model.safetensors"))
        assert all_finite(torch.load(path / "optimizer.pt", weights_only=False))
    with pytest.raises(
        TrainingAborted, match=REFUSED if "save_steps" in settings else "the state itself is bad"
    ):
        train(tmp_path / "stopped")
    names = [one.name for one in (tmp_path / "stopped" / "trainer").glob("checkpoint-*")]
    assert names == (["checkpoint-2"] if "save_steps" in settings else [])


def test_one_that_a_signal_asks_for_in_the_midst_of_a_step_is_checked_and_ends_no_step(tmp_path):
    """With enable_jit_checkpoint the Trainer saves between clipping and the optimizer's step."""
    record = Recorder()
    task = Task()
    before = signal.getsignal(signal.SIGTERM)
    given = hf.native(tmp_path / "run", record, NanCallback())
    trainer = hf.hf_trainer(task, tmp_path, given, enable_jit_checkpoint=True)
    manager = next(
        one.jit_manager for one in trainer.callback_handler.callbacks if hasattr(one, "jit_manager")
    )

    def ask() -> None:
        manager.is_checkpoint_requested = True

    task.trouble.meanwhile[3] = ask
    with quiet():
        trainer.train()
    signal.signal(signal.SIGTERM, before)
    assert len(record.applied) == trainer.state.global_step == 4
    assert record.told.count("before_clip") == record.told.count("after_step") == 4
    assert [path.name for path in (tmp_path / "trainer").glob("checkpoint-*")] == ["checkpoint-3"]


# -- loops ----------------------------------------------------------------------------------------------


def test_accelerates_state_is_never_saved_when_bad(tmp_path, where):
    from accelerate import Accelerator

    from gradsentinel.integrations.accelerate import prepare

    forget_accelerator()
    task, tool = Task(), Accelerator(cpu=True)
    net = task.net()
    model, optimizer = tool.prepare(net, task.optimizer(net))
    sentinel = prepare(tool, model, optimizer, run_dir=tmp_path / "run")
    for batch in sentinel.steps(task.loader()):
        tool.backward(task.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    tool.save_state(str(tmp_path / "good"))
    poison(sentinel._engine.host, where)
    with pytest.raises(TrainingAborted, match=REFUSED):
        tool.save_state(str(tmp_path / "bad"))
    assert (tmp_path / "good").is_dir()
    assert not (tmp_path / "bad").exists()
    with pytest.raises(TrainingAborted):
        sentinel.check_state()
    sentinel._wraps.undo()


def test_fabrics_save_is_checked_and_heals_with_a_rollback(tmp_path, where):
    from lightning.fabric import Fabric

    from gradsentinel.integrations.lightning.fabric import prepare

    task, tool = Task(), Fabric(accelerator="cpu", devices=1)
    net = task.net()
    model, optimizer = tool.setup(net, task.optimizer(net))
    sentinel = prepare(tool, model, optimizer, callbacks=[blind(), rollback()], run_dir=tmp_path / "run")
    for batch in sentinel.steps(task.loader()):
        tool.backward(task.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    poison(sentinel._engine.host, where)
    tool.save(tmp_path / "healed.ckpt", {"model": model, "optimizer": optimizer})
    assert all_finite(torch.load(tmp_path / "healed.ckpt", weights_only=False))
    sentinel.close()
