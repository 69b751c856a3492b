"""One small training for every adapter: the same model, batches and faults, through each framework's loop."""

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from outcomes import Outcome
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from gradsentinel import AfterStep, BeforeClip, Callback, Incident, testing
from loops import Net, fingerprint, seed

BATCH = 8


class Samples(Dataset):
    """Dicts of one record each, with the number of the micro-batch it belongs to."""

    def __init__(
        self,
        count: int,
        *,
        bad: tuple[int, ...] = (),
        no_class: tuple[int, ...] = (),
        without: tuple[int, ...] = (),
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(count * BATCH, 6, generator=generator)
        y = torch.randint(4, (count * BATCH,), generator=generator)
        for number in bad:
            x[number * BATCH + 3, 1] = float("nan")
        for number in no_class:
            y[number * BATCH + 5] = 4
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
    meanwhile: dict[int, Callable[[], Any]] = field(default_factory=dict)
    """Something else happens in this process, the first time."""
    seen: set[int] = field(default_factory=set)

    def strike(self, number: int, model: nn.Module, loss: Tensor) -> Tensor:
        first = number not in self.seen
        self.seen.add(number)
        if number in self.raises:
            raise self.raises[number]
        if first and number in self.meanwhile:
            self.meanwhile[number]()
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
    flat: bool = False
    """The learning rate stays as it is."""
    bad: tuple[int, ...] = ()
    no_class: tuple[int, ...] = ()
    """One label of these is none of the four classes."""
    without: tuple[int, ...] = ()
    trouble: Trouble = field(default_factory=Trouble)
    runs: int = 1
    """So often the same objects are trained, one run after the other."""
    nested: bool = False
    """Another training of this process is in the midst of a step."""
    begins: Callable[[], Any] = lambda: None
    """Called when all is set up, before the first run."""

    def net(self) -> Net:
        seed(0)
        return Net(random=self.random)

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=1e-2)

    def rate(self, step: int) -> float:
        return 1.0 if self.flat else 1 / (1 + step)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)

    def data(self) -> Samples:
        return Samples(self.count, bad=self.bad, no_class=self.no_class, without=self.without)

    def loader(self) -> DataLoader:
        return DataLoader(self.data(), batch_size=BATCH)

    def loss(self, net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = cross_entropy(net(batch["x"]).float(), batch["y"])
        return self.trouble.strike(int(batch["number"][0]), bare(net), loss)

    def divided(self, net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The loss as a loop divides it that accumulates by itself."""
        loss = self.loss(net, batch)
        return loss / self.accumulate if self.accumulate > 1 else loss

    def ends_step(self, number: int, loader: DataLoader) -> bool:
        """Say whether a step is due behind the micro-batch that is the `number`-th, from 1."""
        return number % self.accumulate == 0 or number == len(loader)


def bare(net: nn.Module) -> nn.Module:
    for name in ("_original_module", "module", "module"):
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
    norms: list[float] = field(default_factory=list, repr=False)
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
        self.norms.append(float(event.gradients.total_norm))

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
    """Has last_epoch and get_last_lr."""
    incidents: tuple[Incident, ...] = ()
    """Of all its runs."""
    host: Any = None
    """The framework's own object: a Trainer, an Accelerator, a Fabric."""
    warned: set[str] = field(default_factory=set)
    holds_schedule: bool = True

    def outcome(self) -> Outcome:
        """Return it as the contract of all adapters takes it."""
        return Outcome(
            states=[{part: fingerprint(value) for part, value in self.state().items()}],
            incidents=[[one.as_dict() for one in self.incidents]],
            swallowed=[[repr(error) for error in testing.swallowed()]],
        )

    def state(self) -> dict[str, Any]:
        state = {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.holds_schedule:
            state["scheduler"] = (self.scheduler.last_epoch, self.scheduler.get_last_lr())
        return state


class Driver:
    """Trains a task through one adapter; with callbacks None, without GradSentinel.

    A driver for a further framework is all that the contract needs to be held on its adapter.
    """

    name: str
    lacks: ClassVar[Mapping[str, str]] = {}
    """What this adapter cannot do, and why: batches, loss, accumulate, retry, schedule, checkpoint, draws."""
    package: str | None = None
    """The package that is watched; None for torch."""
    hidden: Sequence[str] = ()
    """The modules that are not there where it is not installed."""
    module = ""
    """What users import of GradSentinel."""
    oldest = ""
    """The oldest release of the package that is supported."""
    named = ""
    """The package's name in messages, where that is another one."""
    rivals: Sequence[str] = ()
    """Other packages with the same content, that must not be in use while it is looked for."""

    def train(
        self, task: Task, folder: Path, callbacks: Sequence[Callback] | None, **settings: Any
    ) -> Result:
        raise NotImplementedError

    def task(self, **settings: Any) -> Task:
        """A task in which a schedule that moves on after a dropped step makes no difference."""
        return Task(**settings, flat="schedule" in self.lacks)

    def window(self, accumulate: int) -> list[str]:
        """The events between the start of a step and its end, as the adapter's page has them."""
        return ["batch", "after_backward"] * accumulate

    def begin(self) -> None:
        """Do what brings the framework in, without any training."""
        raise NotImplementedError

    def saved(self, where: Path) -> Mapping[str, Tensor]:
        """The network's weights in the framework's own checkpoint."""
        raise NotImplementedError

    def parts(self, result: Result) -> list[Any]:
        """The framework's objects whose methods may have been wrapped."""
        return []


def raw(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


@contextlib.contextmanager
def quiet() -> Any:
    """Collect what the frameworks warn of: this machine, their own dependencies."""
    found: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found.update(str(one.message) for one in caught)
