"""The Hugging Face Trainer."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file
from torch import nn
from training import BATCH, Driver, Result, Task, quiet, raw

from drivers.bare import forget_accelerator
from drivers.pl import incidents_of


class ForTrainer(nn.Module):
    """Returns the loss as transformers' models do."""

    def __init__(self, net: nn.Module, task: Task) -> None:
        super().__init__()
        self.net = net
        self._task = [task]

    @property
    def head(self) -> nn.Module:
        return self.net.head

    def forward(self, x, y, number):
        return {"loss": self._task[0].loss(self.net, {"x": x, "y": y, "number": number})}


def hf_trainer(
    task: Task, folder: Path, callbacks: list[Any], *, shuffled: bool = False, **settings: Any
) -> Any:
    from torch.utils.data import SequentialSampler, default_collate
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(self.train_dataset)

    net = task.net()
    model = ForTrainer(net, task)
    optimizer = task.optimizer(net)
    arguments = {
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": task.accumulate,
        "num_train_epochs": 1,
        "max_grad_norm": 0.0 if task.max_norm is None else task.max_norm,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "average_tokens_across_devices": False,
        **settings,
    }
    if not task.nested:
        forget_accelerator()
    trainer = (Trainer if shuffled else InOrder)(
        model=model,
        args=TrainingArguments(str(folder / "trainer"), **arguments),
        train_dataset=task.data(),
        eval_dataset=task.data(),
        data_collator=default_collate,
        optimizers=(optimizer, task.scheduler(optimizer)),
        callbacks=callbacks,
    )
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return trainer


class HuggingFace(Driver):
    name = "huggingface"
    lacks: ClassVar = {"draws": "the Trainer does it"}
    package = "transformers"
    hidden = ("transformers",)
    module = "gradsentinel.integrations.huggingface"
    oldest = "5.0"

    def settings(self, folder, callbacks):
        from gradsentinel.integrations.huggingface import RunSettings, adapt

        if callbacks is None:
            return []
        return [*(adapt(one) for one in callbacks), RunSettings(run_dir=folder)]

    def train(self, task, folder, callbacks, **settings):
        natives = self.settings(folder, callbacks)
        trainer = hf_trainer(task, folder, natives, **settings)
        incidents = ()
        task.begins()
        with quiet() as warned:
            for _ in range(task.runs):
                trainer.train()
                incidents += incidents_of(natives)
        optimizer, scheduler = raw(trainer.optimizer), trainer.lr_scheduler
        return Result(trainer.model.net, optimizer, scheduler, incidents, trainer, warned)

    def begin(self):
        import gradsentinel.integrations.huggingface  # noqa: F401 - that is what may fail

    def saved(self, where):
        return load_file(where / "model.safetensors")

    def parts(self, result):
        loader = result.host.callback_handler.train_dataloader
        return [
            result.host,
            result.host.accelerator,
            result.host.optimizer,
            result.optimizer,
            loader.base_dataloader,
        ]


def native(folder, *given):
    return HuggingFace().settings(folder, given)


def train(task, folder, given, *, resume=None, **settings):
    """Train with the Trainer however it is set."""
    trainer = hf_trainer(task, folder, given, **settings)
    with quiet():
        trainer.train(resume_from_checkpoint=resume)
    return trainer
