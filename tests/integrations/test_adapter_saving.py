"""What a program saves by calls of its own: nothing of a bad state, in a run or after its bad end."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drivers import hf, pl
from drivers.bare import forget_accelerator
from ranks import run_ranks
from safetensors.torch import load_file
from training import Recorder, Task, Trouble, quiet

from gradsentinel import NanCallback, Rollback, TrainingAborted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAN = float("nan")
REFUSED = "no checkpoint is written of this state"


def blind() -> NanCallback:
    """Looks at the state at the start and at the end only."""
    return NanCallback(state_warmup=0, state_every=1000)


def rollback() -> Rollback:
    return Rollback(every=1, confirm_after=1)


def spoil(model: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = NAN


def sound(folder: Path) -> bool:
    return all(
        bool(torch.isfinite(value).all()) for value in load_file(folder / "model.safetensors").values()
    )


def at_step(step: int, act: Callable[[Any], None], event: str = "on_step_end") -> Any:
    """A callback of the program's own, which is given the model after a step."""
    from transformers import TrainerCallback

    class Own(TrainerCallback):
        pass

    def call(self, args, state, control, model=None, **kwargs):
        if state.global_step == step:
            act(model)

    setattr(Own, event, call)
    return Own()


# -- Hugging Face ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_save_model_gives_the_state_before_or_stops_the_run(tmp_path, first):
    def run(folder, *given):
        def act(model):
            spoil(model)
            trainer.save_model(str(folder / "mine"))

        own, ours = at_step(4, act), hf.native(folder / "run", blind(), *given)
        trainer = hf.hf_trainer(Task(), folder, [own, *ours] if first else [*ours, own])
        with quiet():
            trainer.train()
        return trainer

    trainer = run(tmp_path / "healed", rollback())
    assert sound(tmp_path / "healed" / "mine")
    assert trainer.state.global_step == 6
    with pytest.raises(TrainingAborted, match=REFUSED):
        run(tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "mine").exists()


@pytest.mark.parametrize("event", ["on_optimizer_step", "on_step_end"])
def test_a_save_changes_nothing_of_a_run_that_is_well(tmp_path, event):
    """Among its steps is a dropped one, after which the program saves before we have heard of its end."""

    def run(name, act):
        trouble = Trouble(loss={2: NAN}, transient=False)
        ours = hf.native(tmp_path / name / "run", NanCallback(), rollback())
        own = at_step(2 if event == "on_optimizer_step" else 3, lambda _: act(trainer), event)
        trainer = hf.hf_trainer(Task(trouble=trouble), tmp_path / name, [own, *ours])
        with quiet():
            trainer.train()
        weights = [value.tolist() for value in trainer.model.state_dict().values()]
        return weights, [line["loss"] for line in trainer.state.log_history if "loss" in line]

    saved = run("saved", lambda trainer: trainer.save_model(str(tmp_path / "mine")))
    assert saved == run("alone", lambda _: None)
    assert sound(tmp_path / "mine")


def test_after_a_bad_end_save_model_writes_nothing_until_the_model_is_good_again(tmp_path, caplog):
    ours = hf.native(tmp_path / "run", NanCallback())
    own = at_step(3, spoil)
    trainer = hf.hf_trainer(Task(), tmp_path, [own, *ours])
    good = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with quiet(), pytest.raises(TrainingAborted):
        trainer.train()
    with caplog.at_level("ERROR", logger="gradsentinel"):
        trainer.save_model(str(tmp_path / "bad"))
    assert REFUSED in caplog.text
    assert not (tmp_path / "bad").exists()
    trainer.model.load_state_dict(good)
    trainer.save_model(str(tmp_path / "good"))
    assert sound(tmp_path / "good")
    trainer.remove_callback(own)
    trainer.optimizer.state.clear()
    with quiet():
        trainer.train()
    assert "save_model" not in vars(trainer)


def test_after_an_error_of_somebody_elses_a_good_model_is_saved_as_ever(tmp_path):
    task = Task(trouble=Trouble(raises={2: OSError("mine")}))
    trainer = hf.hf_trainer(task, tmp_path, hf.native(tmp_path / "run", NanCallback()))
    with quiet(), pytest.raises(OSError, match="mine"):
        trainer.train()
    assert "save_model" not in vars(trainer)
    trainer.save_model(str(tmp_path / "mine"))
    assert sound(tmp_path / "mine")


def save_on_the_first_rank(rank: int, folder: Path) -> tuple[list[str], bool, int]:
    """Only rank 0 saves, as programs do: the others are not there to be asked."""

    def act(model: Any) -> None:
        spoil(model)
        if rank == 0:
            trainer.save_model(str(folder / "mine"))

    record = Recorder()
    ours = hf.native(folder / "run", record, blind(), rollback())
    trainer = hf.hf_trainer(Task(count=12), folder, [*ours, at_step(2, act)], ddp_backend="gloo")
    trainer.train()
    finite = all(bool(torch.isfinite(value).all()) for value in trainer.model.state_dict().values())
    return [str(one.outcome) for one in record.run.incidents], finite, trainer.state.global_step


@pytest.mark.multiprocess
def test_one_rank_alone_saves_nothing_of_a_bad_state_and_all_are_put_right(tmp_path):
    for outcomes, finite, steps in run_ranks(save_on_the_first_rank, 2, tmp_path, tmp_path):
        assert outcomes == ["rolled_back"]
        assert finite
        assert steps == 6
    assert not (tmp_path / "mine").exists()


# -- Lightning ------------------------------------------------------------------------------------------


def test_after_a_bad_end_save_checkpoint_writes_nothing_until_another_fit(tmp_path, caplog):
    import lightning.pytorch

    class Spoils(lightning.pytorch.Callback):
        on = True

        def on_train_batch_end(self, trainer, pl_module, *args):
            if self.on and trainer.global_step == 3:
                spoil(pl_module)

    own, task = Spoils(), Task()
    _, trainer = pl.Lightning().trainer(task, [*pl.native(tmp_path / "run", NanCallback()), own])
    module = pl.lightning_module(lightning.pytorch, task, task.net(), manual=False)
    with quiet(), pytest.raises(TrainingAborted):
        trainer.fit(module, task.loader())
    with caplog.at_level("ERROR", logger="gradsentinel"):
        trainer.save_checkpoint(tmp_path / "bad.ckpt")
    assert REFUSED in caplog.text
    assert not (tmp_path / "bad.ckpt").exists()
    own.on = False
    with quiet():
        trainer.fit(pl.lightning_module(lightning.pytorch, task, task.net(), manual=False), task.loader())
    assert "save_checkpoint" not in vars(trainer)
    trainer.save_checkpoint(tmp_path / "good.ckpt")
    assert (tmp_path / "good.ckpt").exists()


# -- loops ----------------------------------------------------------------------------------------------


def test_accelerates_save_model_is_checked(tmp_path):
    from accelerate import Accelerator

    from gradsentinel.integrations.accelerate import prepare

    forget_accelerator()
    task, tool = Task(), Accelerator(cpu=True)
    net = task.net()
    model, optimizer = tool.prepare(net, task.optimizer(net))
    with prepare(
        tool, model, optimizer, callbacks=[blind(), rollback()], run_dir=tmp_path / "run"
    ) as sentinel:
        for batch in sentinel.steps(task.loader()):
            tool.backward(task.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        spoil(model)
        tool.save_model(model, str(tmp_path / "mine"))
    assert sound(tmp_path / "mine")
    assert "save_model" not in vars(tool)
