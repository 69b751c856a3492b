"""Small trainings, by hand and watched by a Sentinel, whose states are compared bit for bit."""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gradsentinel import Sentinel

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: AdamW(p, lr=1e-2, foreach=False),
    "adamw-foreach": lambda p: AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "adamw-amsgrad": lambda p: AdamW(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: Adagrad(p, lr=1e-2),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "onecycle": lambda o: OneCycleLR(o, max_lr=0.02, total_steps=64),
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=20),
}


class Jitter(nn.Module):
    """Scales its input by numbers from the generators of Python and NumPy."""

    def forward(self, x):
        if not self.training:
            return x
        return x * (1 + 0.01 * random.random() + 0.01 * float(np.random.rand()))  # noqa: NPY002 - the global one


class Net(nn.Module):
    """A classifier of 6 numbers into 4 classes; random=True adds dropout and other draws."""

    def __init__(self, *, random: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Sequential(nn.Dropout(0.2), Jitter()) if random else nn.Identity()
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.enter(x)))))


Batch = dict[str, Tensor]


def make_batches(count: int, *, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(8, 6, generator=generator),
            "y": torch.randint(4, (8,), generator=generator),
        }
        for _ in range(count)
    ]


@dataclass(kw_only=True)
class Training:
    """One run's ingredients, and what it has computed so far."""

    model: nn.Module
    optimizers: list[Optimizer]
    schedulers: list[Any] = field(default_factory=list)
    scaler: Any = None
    ema: Any = None
    autocast: torch.dtype | None = None
    accumulate: int = 1
    max_norm: float | None = None
    called: nn.Module | None = None
    """What the loop calls, where that is not the model itself, as with torch.compile."""
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)

    def loss(self, batch: Batch) -> Tensor:
        context = (
            contextlib.nullcontext()
            if self.autocast is None
            else torch.autocast("cpu", dtype=self.autocast, cache_enabled=False)
        )
        with context:
            logits = (self.model if self.called is None else self.called)(batch["x"])
            return cross_entropy(logits.float(), batch["y"])

    def state(self) -> dict[str, Any]:
        """Everything a step may change, but the random generators."""
        return {
            "parameters": {name: p.detach() for name, p in self.model.named_parameters()},
            "buffers": dict(self.model.named_buffers()),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
        }

    def sentinel(self, callbacks: Sequence[Any], **settings: Any) -> Sentinel:
        return Sentinel(
            self.model if self.called is None else self.called,
            self.optimizers,
            callbacks=callbacks,
            scheduler=self.schedulers or None,
            scaler=self.scaler,
            ema=self.ema,
            **settings,
        )


def seed(number: int) -> None:
    """Set the generators of PyTorch, Python and NumPy."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the global one


def build(
    *,
    optimizer: str = "adamw",
    scheduler: str | None = None,
    random: bool = False,
    ema: bool = False,
    scale: float | None = None,
    two_optimizers: bool = False,
    **settings: Any,
) -> Training:
    """Build a training; the same arguments give the same one, bit for bit."""
    seed(0)
    model = Net(random=random)
    make = OPTIMIZERS[optimizer]
    parts = [model.enter, model.norm] if two_optimizers else [model]
    optimizers = [make([p for part in parts for p in part.parameters()])]
    if two_optimizers:
        optimizers.append(make(model.head.parameters()))
    return Training(
        model=model,
        optimizers=optimizers,
        schedulers=[SCHEDULERS[scheduler](o) for o in optimizers] if scheduler else [],
        scaler=None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3),
        ema=AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if ema else None,
        **settings,
    )


def train_by_hand(run: Training, batches: Sequence[Batch]) -> None:  # noqa: C901 - a loop is what it is
    """The loop as one writes it without GradSentinel."""
    for number, batch in enumerate(batches, start=1):
        loss = run.loss(batch)
        run.losses.append(loss.detach())
        part = loss / run.accumulate if run.accumulate > 1 else loss
        (part if run.scaler is None else run.scaler.scale(part)).backward()
        if number % run.accumulate and number < len(batches):
            continue
        if run.scaler is not None:
            for optimizer in run.optimizers:
                run.scaler.unscale_(optimizer)
        if run.max_norm is not None:
            run.norms.append(nn.utils.clip_grad_norm_(run.model.parameters(), run.max_norm))
        for optimizer in run.optimizers:
            if run.scaler is None:
                optimizer.step()
            else:
                run.scaler.step(optimizer)
        if run.scaler is not None:
            run.scaler.update()
        for scheduler in run.schedulers:
            scheduler.step()
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        if run.ema is not None:
            run.ema.update_parameters(run.model)


def train_watched(
    run: Training, sentinel: Sentinel, batches: Sequence[Batch], *, spoil: "Spoiler | None" = None
) -> Iterator[int]:
    """The same loop with GradSentinel; yields the number of micro-batches done after each."""
    for number, batch in enumerate(sentinel.steps(batches, accumulate=run.accumulate)):
        loss = run.loss(batch)
        if spoil is not None:
            loss = spoil.loss(number, loss)
            spoil.arm(number, run.model)
        run.losses.append(loss.detach())
        sentinel.backward(loss)
        norm = sentinel.step(max_norm=run.max_norm)
        if norm is not None and run.max_norm is not None:
            run.norms.append(norm)
        yield number + 1


@dataclass
class Spoiler:
    """Puts a value into the loss, the input or one gradient of given micro-batches."""

    where: str
    at: frozenset[int]
    value: float = float("nan")

    def batches(self, batches: Sequence[Batch]) -> list[Batch]:
        if self.where != "input":
            return list(batches)
        return [
            {**batch, "x": self._put(batch["x"])} if number in self.at else batch
            for number, batch in enumerate(batches)
        ]

    def loss(self, number: int, loss: Tensor) -> Tensor:
        return loss * self.value if self.where == "loss" and number in self.at else loss

    def arm(self, number: int, model: nn.Module) -> None:
        """Spoil the gradient that the next backward pass makes, if it is this micro-batch's turn."""
        if self.where != "gradient" or number not in self.at:
            return

        def spoil(gradient: Tensor) -> Tensor:
            handle.remove()
            gradient = gradient.clone()
            gradient[1, 2] = self.value
            return gradient

        handle = model.head.weight.register_hook(spoil)

    def _put(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[3, 1] = self.value
        return x


def finish(steps: Iterator[int]) -> None:
    """Run a loop that yields to its end."""
    for _ in steps:
        pass


def generators() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 - the global one is what is saved and restored
    }


def fingerprint(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a nested state by its path; tensors as dtype, shape and bytes, so that NaN equals NaN."""
    if isinstance(value, Tensor):
        flat = value.detach().resolve_conj().contiguous().reshape(-1)
        content = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
        return {path: (value.dtype, tuple(value.shape), content)}
    if isinstance(value, np.ndarray):
        return {path: (value.dtype, value.shape, value.tobytes())}
    if isinstance(value, Mapping):
        items = [(str(key), entry) for key, entry in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(index), entry) for index, entry in enumerate(value)]
    else:
        return {path: repr(value)}
    leaves = {f"{path}()": len(items)}
    for key, entry in items:
        leaves.update(fingerprint(entry, f"{path}/{key}"))
    return leaves


def differences(one: Any, two: Any) -> list[str]:
    """The paths at which two nested states are not the same, bit for bit."""
    left, right = fingerprint(one), fingerprint(two)
    return [path for path in {**left, **right} if left.get(path) != right.get(path)]
