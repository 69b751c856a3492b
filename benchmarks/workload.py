"""The training step that everything is measured on, and a clock that takes it apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

P = ParamSpec("P")
R = TypeVar("R")

SEQUENCE = 64
VOCABULARY = 256


def model() -> nn.Module:
    """About 5 M parameters in about 75 tensors, the same ones each time."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 256),
        nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
        nn.Linear(256, VOCABULARY),
    )


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())


def batches(tokens: int, count: int = 16) -> list[Tensor]:
    """Return sequences of 64 tokens, `tokens` a batch."""
    generator = torch.Generator().manual_seed(1)
    shape = (max(1, tokens // SEQUENCE), SEQUENCE)
    return [torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(count)]


class Clock:
    """Adds up the time in forward, backward and optimizer; the rest of a step is what the watch costs."""

    def __init__(self) -> None:
        self.now = time.perf_counter
        """What tells the time. `time.thread_time` leaves out what other processes take away."""
        self.inside = 0.0
        self._running = False
        self._installed = False

    def times(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function; its time counts, unless it is called within another one that counts."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._running:
                return function(*args, **kwargs)
            self._running = True
            start = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside += self.now() - start
                self._running = False

        return timed

    def watches_backward(self) -> None:
        """From now on the backward pass counts, whoever begins it: all of them go through this function."""
        if not self._installed:
            torch.autograd.backward = self.times(torch.autograd.backward)
            self._installed = True

    def watches(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer; its step and zero_grad count."""
        own: Any = optimizer
        own.step, own.zero_grad = self.times(optimizer.step), self.times(optimizer.zero_grad)
        return optimizer


CLOCK = Clock()
forward = CLOCK.times(loss_of)


def adamw(net: nn.Module, *, fused: bool = False) -> Optimizer:
    """Return the optimizer of every variant."""
    return CLOCK.watches(torch.optim.AdamW(net.parameters(), 1e-4, fused=fused or None))
