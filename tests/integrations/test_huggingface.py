"""The Hugging Face Trainer: what it may be told to do, and what its log and checkpoints hold."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import json
import math
from pathlib import Path

import pytest
import torch
from drivers.bare import forget_accelerator
from drivers.hf import hf_trainer, native, train
from training import Recorder, Task, Trouble, quiet

from gradsentinel import (
    Action,
    MagnitudeCallback,
    NanCallback,
    Outcome,
    Retry,
    Rollback,
)
from loops import differences, seed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAN = float("nan")


def state_of(trainer):
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "log": [
            {k: v for k, v in line.items() if "time" not in k and "per_second" not in k}
            for line in trainer.state.log_history
        ],
    }


def test_a_trainer_takes_them_literally_and_writes_beside_its_own_output(tmp_path):
    from gradsentinel.integrations.huggingface import NanCallback, Rollback

    task = Task(trouble=Trouble(loss={2: NAN}, transient=False))
    trainer = train(task, tmp_path, [Rollback(), NanCallback()])
    assert trainer.lr_scheduler.last_epoch == 5
    assert trainer.state.global_step == 6
    (incident,) = (tmp_path / "trainer" / "gradsentinel" / "incidents").iterdir()
    assert json.loads((incident / "incident.json").read_text())["outcome"] == "skipped"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"bf16": True},
        {"fp16": True},
        {"max_steps": 4},
        {"num_train_epochs": 2},
        {"logging_nan_inf_filter": False},
        {"eval": True},
    ],
    ids=lambda one: next(iter(one)),
)
def test_a_healthy_run_is_untouched_with_its_log(tmp_path, settings):
    def run(name, given):
        seed(5)
        more = dict(settings)
        if more.pop("eval", None):
            more |= {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
            more["prediction_loss_only"] = True
        trainer = hf_trainer(Task(count=5, accumulate=2, random=True), tmp_path / name, given, **more)
        with quiet():
            trainer.train()
        return trainer

    alone = run("alone", [])
    watched = run(
        "watched", native(tmp_path, Recorder(), NanCallback(), Rollback(every=2, confirm_after=1), Retry())
    )
    assert differences(state_of(alone), state_of(watched)) == []


@pytest.mark.parametrize("filtered", [True, False])
def test_the_log_shows_a_nan_loss_whatever_the_filter_and_keeps_the_trainers_own_lines(tmp_path, filtered):
    task = Task(trouble=Trouble(loss={2: NAN}, transient=False))
    trainer = train(task, tmp_path, native(tmp_path / "run", NanCallback()), logging_nan_inf_filter=filtered)
    history = trainer.state.log_history
    (told,) = [line for line in history if "gradsentinel_action" in line]
    assert told["gradsentinel_action"] == "skip"
    assert told["gradsentinel_incident"] == "000002-nonfinite_loss"
    assert math.isnan(told["gradsentinel_loss"])
    losses = [line["loss"] for line in history if "loss" in line]
    assert len(losses) == 6
    assert math.isnan(losses[2]) is not filtered
    assert math.isfinite(losses[3])
    assert losses[2] == losses[1] or not filtered  # there is no step beside it that its line could be about
    (end,) = [line for line in history if "train_loss" in line]
    assert math.isfinite(end["train_loss"])
    data = json.loads(next((tmp_path / "run" / "incidents").iterdir()).joinpath("incident.json").read_text())
    assert data["loss"] == "nan"


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_healed_step_leaves_no_trace_in_the_log(tmp_path, accumulate, filtered):
    def losses(name, trouble, *given):
        seed(5)
        task = Task(count=12, accumulate=accumulate, random=True, trouble=trouble)
        trainer = train(task, tmp_path / name, list(given), logging_steps=2, logging_nan_inf_filter=filtered)
        history = trainer.state.log_history
        return [
            line.get("loss", line.get("train_loss"))
            for line in history
            if "train_loss" in line or "loss" in line
        ]

    record = Recorder()
    alone = losses("alone", Trouble())
    healed = losses(
        "healed", Trouble(loss={7: NAN}), *native(tmp_path / "run", record, NanCallback(), Retry())
    )
    assert [one.outcome for one in record.run.incidents] == [Outcome.RETRIED]
    assert healed == alone


@pytest.mark.slow
@pytest.mark.parametrize("where", [0, 2, 5])
@pytest.mark.parametrize("value", [NAN, 1e4])
def test_a_dropped_step_is_in_no_mean(tmp_path, where, value):
    record = Recorder()
    watch = [NanCallback(), MagnitudeCallback(max_global_norm=500.0, action="skip")]
    trainer = train(
        Task(trouble=Trouble(loss={where: value}, transient=False)),
        tmp_path,
        native(tmp_path / "run", record, *watch),
        logging_steps=6,
    )
    assert record.applied.count(False) == 1
    made = [loss for number, loss in enumerate(record.losses) if number != where]
    # In its place is the mean of those before it; of a first step 0, as with the Trainer's own filter.
    instead = sum(made[:where]) / where if where else 0.0
    (line,) = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert line == pytest.approx((sum(made) + instead) / 6, rel=1e-5)


def test_events_go_into_the_files_of_the_trainers_own_tensorboard_callback(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from gradsentinel.integrations.huggingface import NanCallback, TensorBoardCallback

    board = tmp_path / "board"
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(board))
    task = Task(trouble=Trouble(loss={2: NAN}, transient=False))
    train(task, tmp_path, [TensorBoardCallback(), NanCallback()], report_to=["tensorboard"])
    assert len(list(tmp_path.rglob("events.out.tfevents.*"))) == 1
    read = EventAccumulator(str(board))
    read.Reload()
    tags = read.Tags()
    assert {"train/loss", "gradsentinel/grad_norm", "gradsentinel/skipped"} <= set(tags["scalars"])
    assert "gradsentinel/incident/text_summary" in tags["tensors"]


def test_the_loss_is_the_mean_of_the_microbatches_however_it_is_normalised(tmp_path):
    record = Recorder()
    trainer = train(Task(accumulate=2), tmp_path, native(tmp_path / "run", record, NanCallback()))
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert record.losses == pytest.approx(logged, rel=1e-5)


def small_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config)


def sentences(count: int = 24):
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(32, (8,), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in found]


def language(folder: Path, model, given, *, spoil=None, trainer=None, **settings):
    from transformers import Trainer, TrainingArguments

    base = trainer or Trainer

    class Spoilt(base):
        calls = 0

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            self.calls += 1
            return loss * NAN if self.calls == spoil else loss

    arguments = {
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "dataloader_pin_memory": False,
        "learning_rate": 1e-2,
        **settings,
    }
    forget_accelerator()
    made = Spoilt(
        model=model,
        args=TrainingArguments(str(folder), **arguments),
        train_dataset=sentences(),
        callbacks=given,
    )
    with quiet():
        made.train()
    return made


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_transformers_model_retries_bit_for_bit_with_losses_normalised_by_tokens(tmp_path, accumulate):
    settings = {"gradient_accumulation_steps": accumulate, "max_steps": 3}
    alone = language(tmp_path / "a", small_model(), [], **settings)
    record = Recorder()
    given = native(tmp_path / "run", record, NanCallback(), Retry())
    spoilt = language(tmp_path / "b", small_model(), given, spoil=2 * accumulate, **settings)
    assert differences(alone.model.state_dict(), spoilt.model.state_dict()) == []
    assert [one.outcome for one in record.run.incidents] == [Outcome.RETRIED]


def test_lora_trains_heals_and_rolls_back(tmp_path):
    from peft import LoraConfig, get_peft_model

    def model():
        with quiet():
            return get_peft_model(small_model(), LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1))

    alone = language(tmp_path / "a", model(), [])
    record = Recorder()
    given = native(tmp_path / "run", record, NanCallback(), Retry())
    retried = language(tmp_path / "b", model(), given, spoil=3)
    assert differences(alone.model.state_dict(), retried.model.state_dict()) == []
    assert [one.outcome for one in record.run.incidents] == [Outcome.RETRIED]
    names = [tensor.name for tensor in record.run.incidents[0].tensors]
    assert names
    assert all("lora_" in name for name in names)
    back = Recorder()
    nan = NanCallback(action=Action.ROLLBACK)
    given = native(tmp_path / "back", back, nan, Rollback(every=1, confirm_after=1))
    rolled = language(tmp_path / "c", model(), given, spoil=3)
    assert [one.outcome for one in back.run.incidents] == [Outcome.ROLLED_BACK]
    assert all(torch.isfinite(p).all() for p in rolled.model.parameters())


@pytest.mark.slow
def test_trls_sft_trainer_is_a_trainer_like_any_other(tmp_path):
    pytest.importorskip("trl", reason="trl has left Python 3.10 behind")
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    tokenizer = make_tokenizer(PreTrainedTokenizerFast)
    words = ["to be or not to be", "that is the question", "to sleep no more", "be not that"]

    def run(name, given, spoil=None):
        class Spoilt(SFTTrainer):
            calls = 0

            def compute_loss(self, model, inputs, return_outputs=False, **kwargs):  # noqa: FBT002 - as theirs
                found = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
                self.calls += 1
                return found * NAN if self.calls == spoil else found

        forget_accelerator()
        config = SFTConfig(
            str(tmp_path / name),
            per_device_train_batch_size=2,
            max_steps=3,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            save_strategy="no",
            max_length=16,
            dataloader_pin_memory=False,
            learning_rate=1e-2,
            gradient_checkpointing=False,
            logging_steps=1,
        )
        with quiet():
            trainer = Spoilt(
                model=small_model(),
                args=config,
                train_dataset=Dataset.from_dict({"text": words * 4}),
                processing_class=tokenizer,
                callbacks=given,
            )
            trainer.train()
        return trainer

    alone = run("a", [])
    record = Recorder()
    retried = run("b", native(tmp_path / "run", record, NanCallback(), Retry()), spoil=2)
    assert [one.outcome for one in record.run.incidents] == [Outcome.RETRIED]
    assert differences(alone.model.state_dict(), retried.model.state_dict()) == []


def make_tokenizer(kind):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    words = ["to", "be", "or", "not", "that", "is", "the", "question", "sleep", "no", "more"]
    numbers = {word: number for number, word in enumerate([*special.values(), *words])}
    plain = Tokenizer(WordLevel(numbers, special["unk_token"]))
    plain.pre_tokenizer = Whitespace()
    return kind(tokenizer_object=plain, **special)
