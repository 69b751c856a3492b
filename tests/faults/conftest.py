"""A small model with the usual parts, and a loop that trains it as a plain script would."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradsentinel.faults import FaultPlan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.mlp = nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.drop(self.attn(x, x, x, need_weights=False)[0])
        return x + torch.relu(self.mlp(x))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Run:
    """What a training run leaves behind."""

    def __init__(
        self, model: nn.Module, losses: list[float], gradients: list[dict[str, torch.Tensor]]
    ) -> None:
        self.model = model
        self.losses = losses
        self.gradients = gradients

    def bad(self, step: int) -> set[str]:
        """Names of the parameters whose gradient was not finite at a step."""
        return {name for name, g in self.gradients[step].items() if not g.isfinite().all()}


@pytest.fixture
def tiny() -> Callable[[], Tiny]:
    def build() -> Tiny:
        torch.manual_seed(1)
        return Tiny()

    return build


@pytest.fixture
def loader() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(3, 5, 4, generator=generator) for _ in range(8)]


@pytest.fixture
def train(tiny, loader) -> Callable[..., Run]:
    """Train with a plan, or without one; `around` wraps the model, as torch.compile does."""

    def loop(
        plan: FaultPlan | None = None, *, accumulate: int = 1, model=None, around=lambda model: model
    ) -> Run:
        model = model or tiny()
        called = around(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses, gradients = [], []
        torch.manual_seed(3)
        attachment = plan.attach(called) if plan else None
        batches = plan.batches(loader, accumulate=accumulate) if plan else loader
        for number, batch in enumerate(batches):
            loss = called(batch).pow(2).mean()
            loss.backward()
            losses.append(loss.item())
            if number % accumulate == accumulate - 1:
                gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
                optimizer.step()
                optimizer.zero_grad()
        if attachment:
            attachment.detach()
        return Run(model, losses, gradients)

    return loop
