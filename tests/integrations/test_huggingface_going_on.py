"""How a Hugging Face Trainer's run ends, and goes on: from a checkpoint, or by another `train()`."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import pytest
from drivers.hf import hf_trainer, native, train
from training import Recorder, Task, Trouble, quiet

from gradsentinel import NanCallback, Retry, Skip, TrainingAborted
from loops import differences

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAN = float("nan")


def test_a_run_goes_on_from_a_checkpoint_with_its_counters_and_budgets(tmp_path):
    task = {"num_train_epochs": 2, "save_strategy": "epoch"}
    whole = train(Task(random=True), tmp_path / "whole", [], **task)
    first, second = Recorder(), Recorder()
    spoilt = Task(random=True, trouble=Trouble(loss={3: NAN}))
    train(spoilt, tmp_path / "cut", native(tmp_path / "a", first, NanCallback(), Retry()), **task)
    resumed = train(
        Task(random=True),
        tmp_path / "cut",
        native(tmp_path / "b", NanCallback(), second, Retry()),
        resume=str(tmp_path / "cut" / "trainer" / "checkpoint-6"),
        **task,
    )
    assert differences(whole.model.state_dict(), resumed.model.state_dict()) == []
    assert second.run.step == second.run.iteration == 12
    assert len(second.applied) == 6
    assert second.run.remember()["Retry"]["budget"] == {"spent": [3]}
    assert resumed.state.global_step == 12


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_that_goes_on_in_an_epoch_with_a_dropped_batch_loses_none_of_the_others(tmp_path, workers):
    """The dropped one is on the run's list by then, and the Trainer counts four batches from the start."""
    settings = {"save_strategy": "steps", "save_steps": 2, "dataloader_num_workers": workers}
    first, second = Recorder(), Recorder()
    spoilt = Task(random=True, count=12, accumulate=2, trouble=Trouble(loss={1: NAN}, transient=False))
    whole = train(spoilt, tmp_path, native(tmp_path / "run", first, NanCallback()), **settings)
    resumed = train(
        Task(random=True, count=12, accumulate=2),
        tmp_path,
        native(tmp_path / "run", second, NanCallback()),
        resume=str(tmp_path / "trainer" / "checkpoint-2"),
        **settings,
    )
    assert first.applied == [False, True, True, True, True, True]
    assert differences(whole.model.state_dict(), resumed.model.state_dict()) == []
    assert second.losses == first.losses[2:]


def test_an_aborted_run_can_be_resumed_from_the_checkpoint_it_left(tmp_path):
    spoilt = Task(trouble=Trouble(loss={3: NAN}))
    given = native(tmp_path / "a", NanCallback(), Skip(max_skips=0))
    with pytest.raises(TrainingAborted):
        train(spoilt, tmp_path, given, save_strategy="steps", save_steps=100)
    resumed = train(Task(), tmp_path, native(tmp_path / "b", NanCallback()), resume=True)
    whole = train(Task(), tmp_path / "whole", [])
    assert differences(whole.model.state_dict(), resumed.model.state_dict()) == []


def test_train_twice_and_an_interrupted_train_leave_nothing_behind(tmp_path):
    record = Recorder()
    given = native(tmp_path / "run", record, NanCallback())
    error = OSError("mine")
    task = Task(trouble=Trouble(raises={2: error}))
    trainer = hf_trainer(task, tmp_path, given)
    with quiet(), pytest.raises(OSError, match="mine") as caught:
        trainer.train()
    assert caught.value is error
    assert record.told[-1] == "run_end"
    assert not vars(trainer).keys() & {"training_step", "_save_checkpoint", "_run_epoch"}
    assert not vars(trainer.accelerator).keys() & {"backward", "clip_grad_norm_", "clip_grad_value_"}
    task.trouble.raises.clear()
    with quiet():
        trainer.train()
    again = given[0].callback
    assert again is not record
    assert len(again.applied) == 6


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin", "on_evaluate", "on_train_end"])
def test_an_error_outside_of_an_epoch_ends_the_run_too(tmp_path, event):
    """Another Trainer could not write to the same place otherwise."""
    from transformers import TrainerCallback

    class Raises(TrainerCallback):
        pass

    error = OSError("mine")

    def raises(*args, **kwargs):
        raise error

    setattr(Raises, event, raises)
    record = Recorder()
    given = [*native(tmp_path / "run", record, NanCallback()), Raises()]
    settings = {"eval_strategy": "steps", "eval_on_start": True} if event == "on_evaluate" else {}
    trainer = hf_trainer(Task(), tmp_path, given, prediction_loss_only=True, **settings)
    with quiet(), pytest.raises(OSError, match="mine") as caught:
        trainer.train()
    assert caught.value is error
    assert record.told[-1] == "run_end"
    assert not vars(trainer).keys() & {"training_step", "_save_checkpoint", "_run_epoch", "_evaluate"}
    assert not vars(trainer.callback_handler).keys() & {"call_event"}
    assert not vars(given[-1]).keys() & {"on_train_begin"}
    again = train(Task(), tmp_path, native(tmp_path / "run", NanCallback()))
    assert again.state.global_step == 6
