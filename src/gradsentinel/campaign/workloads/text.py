"""The text model that the plain and the Lightning runs train, its loss and its batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradsentinel.demo.data import CharCorpus, Windows, batches, stdlib_text
from gradsentinel.demo.model import CharGPT

Batch = dict[str, Any]

WIDTH, HEADS, LAYERS, CONTEXT, RECORDS = 32, 2, 2, 24, 8
LEARNING_RATE, MAX_NORM, DROPOUT = 3e-3, 1.0, 0.05
_BYTES = 400_000
_HELD_OUT = 256
"""Windows of held-out text that the final loss is taken from."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A task: real text, a small GPT, AdamW."""

    steps: int
    seed: int

    def model(self) -> CharGPT:
        """Build the model, the same weights for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return CharGPT(
                vocab=corpus().vocab,
                width=WIDTH,
                heads=HEADS,
                layers=LAYERS,
                context=CONTEXT,
                dropout=DROPOUT,
            )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer."""
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)

    def batches(self) -> list[Batch]:
        """Return the batches of the run, in order."""
        loader = batches(corpus(), batch_size=RECORDS, steps=self.steps, context=CONTEXT, seed=self.seed)
        return [{**batch, "mask": torch.ones(batch["tokens"].shape)} for batch in loader]


@lru_cache(maxsize=1)
def corpus() -> CharCorpus:
    """Return the text, read once a process."""
    return CharCorpus(stdlib_text(_BYTES))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the characters that the mask has, each record with its weight.

    The attention logits are float16, as under mixed precision on an accelerator.
    """
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(batch["tokens"]).logits
    losses = functional.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none")
    per_record = (losses * batch["mask"]).sum(dim=1) / batch["mask"].sum(dim=1)
    loss: Tensor = (per_record * batch["weight"]).sum() / batch["weight"].sum()
    return loss


def held_out_loss(model: nn.Module) -> float:
    """Return the loss on text that was never trained on."""
    windows = Windows(corpus().validation, CONTEXT)
    some = [windows[i * (len(windows) // _HELD_OUT)] for i in range(_HELD_OUT)]
    tokens = torch.stack([w["tokens"] for w in some])
    targets = torch.stack([w["targets"] for w in some])
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(tokens).logits
        loss = functional.cross_entropy(logits.transpose(1, 2), targets)
    model.train(training)
    return float(loss)


class LossScale:
    """The scale of a GradScaler as an attribute, for a fault to sit in."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    @property
    def scale(self) -> float:
        """The factor that losses are multiplied by."""
        return float(self._scaler.get_scale())

    @scale.setter
    def scale(self, value: float) -> None:
        if self._scaler._scale is None:
            self._scaler._init_scale = value
        else:
            self._scaler._scale.fill_(value)
