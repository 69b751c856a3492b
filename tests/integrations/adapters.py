"""One small training for every adapter: the same model, batches and faults, through each framework's loop."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import contextlib
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from contract import Outcome
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from gradsentinel import AfterStep, BeforeClip, Callback, Incident, Sentinel, testing
from loops import Net, fingerprint, seed

BATCH = 8
Make = Callable[[], list[Callback]]


class Samples(Dataset):
    """Dicts of one record each, with the number of the micro-batch it belongs to."""

    def __init__(self, count: int, *, bad: tuple[int, ...] = (), without: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(count * BATCH, 6, generator=generator)
        y = torch.randint(4, (count * BATCH,), generator=generator)
        for number in bad:
            x[number * BATCH + 3, 1] = float("nan")
        self.records = [
            {"x": x[i], "y": y[i], "number": torch.tensor(i // BATCH)}
            for i in range(count * BATCH)
            if i // BATCH not in without
        ]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.records[index]


@dataclass
class Trouble:
    """What goes wrong, by the number of the micro-batch."""

    loss: dict[int, float] = field(default_factory=dict)
    """The loss is multiplied by this."""
    gradient: dict[int, float] = field(default_factory=dict)
    """One element of a gradient becomes this."""
    transient: bool = True
    """Only the first time that the micro-batch is computed."""
    raises: dict[int, BaseException] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def strike(self, number: int, model: nn.Module, loss: Tensor) -> Tensor:
        first = number not in self.seen
        self.seen.add(number)
        if number in self.raises:
            raise self.raises[number]
        if self.transient and not first:
            return loss
        if number in self.gradient:
            value = self.gradient[number]

            def spoil(gradient: Tensor) -> Tensor:
                handle.remove()
                gradient = gradient.clone()
                gradient[1, 2] = value
                return gradient

            handle = model.head.weight.register_hook(spoil)
        return loss * self.loss[number] if number in self.loss else loss


@dataclass
class Task:
    """What is trained."""

    count: int = 6
    accumulate: int = 1
    max_norm: float | None = 0.5
    random: bool = False
    bad: tuple[int, ...] = ()
    without: tuple[int, ...] = ()
    trouble: Trouble = field(default_factory=Trouble)
    bf16: bool = False

    def net(self) -> Net:
        seed(0)
        return Net(random=self.random)

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=1e-2)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def data(self) -> Samples:
        return Samples(self.count, bad=self.bad, without=self.without)

    def loader(self) -> DataLoader:
        return DataLoader(self.data(), batch_size=BATCH)

    def loss(self, net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = cross_entropy(net(batch["x"]).float(), batch["y"])
        return self.trouble.strike(int(batch["number"][0]), bare(net), loss)


def bare(net: nn.Module) -> nn.Module:
    for name in ("_original_module", "module"):
        net = getattr(net, name, net)
    return net


@dataclass(kw_only=True)
class Recorder(Callback):
    """Keeps the order of the events, and the state after each step."""

    keeps_states: bool = True
    told: list[str] = field(default_factory=list, repr=False)
    states: list[dict[str, Any]] = field(default_factory=list, repr=False)
    applied: list[bool] = field(default_factory=list, repr=False)
    losses: list[float | None] = field(default_factory=list, repr=False)
    run: Any = field(default=None, repr=False)

    def on_run_start(self, event: Any) -> None:
        self.run = event.run
        self.told.append("run_start")

    def on_step_start(self, event: Any) -> None:
        self.told.append("step_start")

    def on_batch(self, event: Any) -> None:
        self.told.append("batch")

    def on_after_backward(self, event: Any) -> None:
        self.told.append("after_backward")

    def on_before_clip(self, event: BeforeClip) -> None:
        self.told.append("before_clip")

    def on_after_step(self, event: AfterStep) -> None:
        self.told.append("after_step")
        self.applied.append(event.applied)
        self.losses.append(event.loss)
        if not self.keeps_states:
            return
        host = self.run.host
        self.states.append(
            fingerprint(
                {
                    "parameters": dict(host.named_parameters()),
                    "buffers": dict(self.run.scene.buffers.named()),
                    "optimizers": [one.state_dict()["state"] for one in host.optimizers],
                }
            )
        )

    def on_run_end(self, event: Any) -> None:
        self.told.append("run_end")


@dataclass
class Result:
    """What a training came to."""

    net: nn.Module
    optimizer: Any
    scheduler: Any
    incidents: tuple[Incident, ...] = ()
    host: Any = None
    """The framework's own object: a Trainer, an Accelerator, a Fabric."""
    warned: set[str] = field(default_factory=set)

    def outcome(self) -> Outcome:
        """Return it as the contract of all adapters takes it."""
        return Outcome(
            states=[{part: fingerprint(value) for part, value in self.state().items()}],
            incidents=[[one.as_dict() for one in self.incidents]],
            swallowed=[[repr(error) for error in testing.swallowed()]],
        )

    def state(self) -> dict[str, Any]:
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": (self.scheduler.last_epoch, self.scheduler.get_last_lr()),
        }


class Adapter:
    """Trains a task through one framework; with callbacks None, without GradSentinel."""

    name: str
    retries = True
    """True if a step can be computed again."""

    def train(self, task: Task, folder: Path, callbacks: Sequence[Callback] | None) -> Result:
        raise NotImplementedError

    @contextlib.contextmanager
    def incidents_in(self, folder: Path) -> Any:
        yield


class Plain(Adapter):
    name = "plain"

    def train(self, task, folder, callbacks):
        net = task.net()
        optimizer = task.optimizer(net)
        scheduler = task.scheduler(optimizer)
        result = Result(net, optimizer, scheduler)
        if callbacks is None:
            window = 0
            loader = task.loader()
            for number, batch in enumerate(loader, 1):
                (task.loss(net, batch) / task.accumulate).backward()
                window += 1
                if window == task.accumulate or number == len(loader):
                    if task.max_norm is not None:
                        nn.utils.clip_grad_norm_(net.parameters(), task.max_norm)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    window = 0
            return result
        with Sentinel(
            net, optimizer, callbacks=callbacks, scheduler=scheduler, run_dir=folder, forward=task.loss
        ) as sentinel:
            for batch in sentinel.steps(task.loader(), accumulate=task.accumulate):
                sentinel.backward(task.loss(net, batch))
                sentinel.step(max_norm=task.max_norm)
            result.incidents = sentinel.incidents
        return result


def lightning_module(pl: Any, task: Task, net: nn.Module, *, manual: bool) -> Any:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.automatic_optimization = not manual
            self.window = 0

        def training_step(self, batch, batch_idx):
            loss = task.loss(self.net, batch)
            self.log("loss", loss.detach(), on_step=True)
            if not manual:
                return loss
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            self.manual_backward(loss / task.accumulate if task.accumulate > 1 else loss)
            self.window += 1
            if self.window == task.accumulate or self.trainer.is_last_batch:
                if task.max_norm is not None:
                    self.clip_gradients(
                        optimizer, gradient_clip_val=task.max_norm, gradient_clip_algorithm="norm"
                    )
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                self.window = 0
            return None

        def configure_optimizers(self):
            optimizer = task.optimizer(self.net)
            scheduler = task.scheduler(optimizer)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Module()


class Lightning(Adapter):
    name = "lightning"
    package = "lightning.pytorch"
    manual = False

    def settings(self, folder: Path, callbacks: Sequence[Callback] | None) -> list[Any]:
        from gradsentinel.integrations.lightning import RunSettings, adapt

        if callbacks is None:
            return []
        return [*(adapt(one) for one in callbacks), RunSettings(run_dir=folder)]

    def trainer(self, task: Task, callbacks: list[Any], **settings: Any) -> Any:
        import importlib

        pl = importlib.import_module(self.package)
        settings = {
            "max_epochs": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        }
        if not self.manual:
            settings |= {"accumulate_grad_batches": task.accumulate, "gradient_clip_val": task.max_norm}
        return pl, pl.Trainer(callbacks=callbacks, **settings)

    def train(self, task, folder, callbacks, **settings):
        natives = self.settings(folder, callbacks)
        pl, trainer = self.trainer(task, natives, **settings)
        net = task.net()
        module = lightning_module(pl, task, net, manual=self.manual)
        with quiet() as warned:
            trainer.fit(module, task.loader())
        incidents = ()
        if callbacks is not None:
            incidents = tuple(next(one.callback for one in natives if hasattr(one, "told")).run.incidents)
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        return Result(net, trainer.optimizers[0], scheduler, incidents, trainer, warned)


class PytorchLightning(Lightning):
    name = "pytorch_lightning"
    package = "pytorch_lightning"


class Manual(Lightning):
    name = "lightning, manual optimization"
    manual = True
    retries = False


class Fabric(Adapter):
    name = "fabric"

    def train(self, task, folder, callbacks, **settings):
        from lightning.fabric import Fabric as LightningFabric

        from gradsentinel.integrations.lightning.fabric import prepare

        fabric = LightningFabric(accelerator="cpu", devices=1, **settings)
        net = task.net()
        inner = task.optimizer(net)
        scheduler = task.scheduler(inner)
        model, optimizer = fabric.setup(net, inner)
        result = Result(net, inner, scheduler, host=fabric)

        def forward(model, batch):
            loss = task.loss(model, batch)
            return loss / task.accumulate if task.accumulate > 1 else loss

        sentinel = None
        if callbacks is not None:
            sentinel = prepare(
                fabric,
                model,
                optimizer,
                callbacks=callbacks,
                scheduler=scheduler,
                forward=forward,
                run_dir=folder,
            )
        with sentinel or contextlib.nullcontext():
            loader = task.loader()
            window = 0
            for number, batch in enumerate(sentinel.steps(loader) if sentinel else loader, 1):
                fabric.backward(forward(model, batch))
                window += 1
                if window == task.accumulate or number == len(loader):
                    if task.max_norm is not None:
                        fabric.clip_gradients(
                            model, optimizer, max_norm=task.max_norm, error_if_nonfinite=sentinel is None
                        )
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    window = 0
        if sentinel:
            result.incidents = sentinel.incidents
        return result


class Accelerate(Adapter):
    name = "accelerate"

    def train(self, task, folder, callbacks, **settings):
        from accelerate import Accelerator

        from gradsentinel.integrations.accelerate import prepare

        forget_accelerator()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=task.accumulate, **settings)
        net = task.net()
        inner = task.optimizer(net)
        plain_scheduler = task.scheduler(inner)
        model, optimizer, loader, scheduler = accelerator.prepare(net, inner, task.loader(), plain_scheduler)
        result = Result(net, inner, plain_scheduler, host=accelerator)
        sentinel = None
        if callbacks is not None:
            sentinel = prepare(
                accelerator,
                model,
                optimizer,
                callbacks=callbacks,
                scheduler=scheduler,
                forward=task.loss,
                run_dir=folder,
            )
        with sentinel or contextlib.nullcontext():
            for batch in sentinel.steps(loader) if sentinel else loader:
                with accelerator.accumulate(model):
                    accelerator.backward(task.loss(model, batch))
                    if accelerator.sync_gradients and task.max_norm is not None:
                        accelerator.clip_grad_norm_(model.parameters(), task.max_norm)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        if sentinel:
            result.incidents = sentinel.incidents
        return result


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


def hf_trainer(task: Task, folder: Path, callbacks: list[Any], **settings: Any) -> Any:
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
    forget_accelerator()
    trainer = InOrder(
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


class HuggingFace(Adapter):
    name = "huggingface"

    def settings(self, folder: Path, callbacks: Sequence[Callback] | None) -> list[Any]:
        from gradsentinel.integrations.huggingface import RunSettings, adapt

        if callbacks is None:
            return []
        return [*(adapt(one) for one in callbacks), RunSettings(run_dir=folder)]

    def train(self, task, folder, callbacks, **settings):
        natives = self.settings(folder, callbacks)
        trainer = hf_trainer(task, folder, natives, **settings)
        with quiet() as warned:
            trainer.train()
        incidents = ()
        if callbacks is not None:
            incidents = tuple(next(one.callback for one in natives if hasattr(one, "told")).run.incidents)
        scheduler = trainer.lr_scheduler
        return Result(trainer.model.net, raw(trainer.optimizer), scheduler, incidents, trainer, warned)


def raw(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def forget_accelerator() -> None:
    """Accelerate keeps one state per process, which another test may have set up otherwise."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if not gc.get_freeze_count():  # the Trainer collects garbage several times a run; this makes that quick
        gc.collect()
        gc.freeze()


@contextlib.contextmanager
def quiet() -> Any:
    """Collect what the frameworks warn of: this machine, their own dependencies."""
    found: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found.update(str(one.message) for one in caught)


ADAPTERS = [Plain(), Lightning(), PytorchLightning(), Manual(), Fabric(), Accelerate(), HuggingFace()]
