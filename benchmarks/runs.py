"""Small real training runs that the benchmarks of detection share: healthy ones, of very different kinds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gradsentinel.demo.data import CharCorpus, stdlib_text
from gradsentinel.demo.model import CharGPT

Batch = tuple[Tensor, ...]


@dataclass(kw_only=True)
class Training:
    """One run: what is trained, and the work of each optimizer step in turn."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    draws: Sequence[Callable[[], Batch]]
    """What draws the batch of each step, one function per optimizer: a GAN's players take turns."""
    losses: Sequence[Callable[[Batch], Tensor]]
    """The loss of a batch, likewise."""
    inputs: Sequence[nn.Module]
    """What is called with the data."""
    schedulers: Sequence[Any] = ()
    max_norm: float | None = None

    @property
    def turns(self) -> Sequence[Callable[[], Tensor]]:
        """Draws a batch and returns its loss, one function per optimizer."""
        return [
            lambda draw=draw, loss=loss: loss(draw())  # type: ignore[misc]
            for draw, loss in zip(self.draws, self.losses, strict=True)
        ]


def warm_up_and_cosine(optimizer: Optimizer, steps: int, warm_up: int, *, cycles: int = 1) -> LambdaLR:
    """A linear warm-up, then a cosine to a tenth; with `cycles` it restarts."""

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, steps - warm_up) * cycles % 1.0
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


@cache
def corpus() -> CharCorpus:
    """The demo's text."""
    return CharCorpus(stdlib_text(600_000))


def windows(tokens: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of a text, and the same one character on."""
    start = torch.randint(0, len(tokens) - context - 1, (batch, 1), generator=generator)
    index = start + torch.arange(context + 1)
    piece = tokens[index]
    return piece[:, :-1], piece[:, 1:]


def language_loss(model: CharGPT) -> Callable[[Batch], Tensor]:
    """The model's own loss of tokens and the same one character on."""

    def loss(batch: Batch) -> Tensor:
        found = model(*batch).loss
        assert found is not None
        return found

    return loss


def gpt(seed: int, steps: int) -> Training:
    """The demo's character GPT on Python sources: AdamW, warm-up and cosine, clipped."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = CharGPT(vocab=corpus().vocab, width=48, heads=2, layers=2, context=24, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    return Training(
        model=model,
        optimizers=[optimizer],
        draws=[lambda: windows(corpus().train, 12, 24, generator)],
        losses=[language_loss(model)],
        inputs=[model],
        schedulers=[warm_up_and_cosine(optimizer, steps, 100)],
        max_norm=1.0,
    )


@cache
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's handwritten digits: images [1797, 1, 8, 8] in 0..1, labels."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - an extra

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(found.target)


def classifier(seed: int, steps: int) -> Training:
    """A convolutional classifier with BatchNorm and dropout on noisy digits: SGD with momentum, cosine."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    images, labels = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(24 * 16, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def draw() -> Batch:
        index = torch.randint(0, len(images), (32,), generator=generator)
        noise = 0.2 * torch.randn((32, 1, 8, 8), generator=generator)
        return images[index] + noise, labels[index]

    return Training(
        model=model,
        optimizers=[optimizer],
        draws=[draw],
        losses=[lambda batch: functional.cross_entropy(model(batch[0]), batch[1])],
        inputs=[model],
        schedulers=[warm_up_and_cosine(optimizer, steps, 20)],
    )


def memoriser(seed: int, _steps: int) -> Training:
    """A plain MLP that learns the digits by heart: the loss goes to zero, with a tail of rare large ones."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    images, labels = digits()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def draw() -> Batch:
        index = torch.randint(0, len(images), (32,), generator=generator)
        return images[index], labels[index]

    return Training(
        model=model,
        optimizers=[optimizer],
        draws=[draw],
        losses=[lambda batch: functional.cross_entropy(model(batch[0]), batch[1])],
        inputs=[model],
    )


def gan(seed: int, _steps: int) -> Training:
    """A GAN that learns eight Gaussians on a ring; its two players take turns."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    make = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    judge = nn.Sequential(
        nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1)
    )
    model = nn.ModuleDict({"generator": make, "discriminator": judge})
    first = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
    second = torch.optim.Adam(make.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def points() -> Batch:
        angle = torch.randint(0, 8, (64,), generator=generator) * (math.pi / 4)
        real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn((64, 2), generator=generator)
        return real, torch.randn((64, 8), generator=generator)

    def judge_loss(batch: Batch) -> Tensor:
        real, noise = batch
        fake = make(noise).detach()
        return functional.softplus(-judge(real)).mean() + functional.softplus(judge(fake)).mean()

    return Training(
        model=model,
        optimizers=[first, second],
        draws=[points, lambda: (torch.randn((64, 8), generator=generator),)],
        losses=[judge_loss, lambda batch: functional.softplus(-judge(make(batch[0]))).mean()],
        inputs=[judge],
    )


def diffusion(seed: int, _steps: int) -> Training:
    """A denoiser of points on a spiral: AdamW, constant rate, clipped."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def draw() -> Batch:
        turn = 3 * math.pi * torch.rand((64,), generator=generator).sqrt()
        point = torch.stack([turn.cos(), turn.sin()], 1) * turn[:, None] / 9
        time = torch.rand((64, 1), generator=generator)
        noise = torch.randn((64, 2), generator=generator)
        angle = time * math.pi / 2
        noisy = angle.cos() * point + angle.sin() * noise
        return torch.cat([noisy, time, angle.cos()], 1), noise

    return Training(
        model=model,
        optimizers=[optimizer],
        draws=[draw],
        losses=[lambda batch: functional.mse_loss(model(batch[0]), batch[1])],
        inputs=[model],
        max_norm=1.0,
    )


class LowRank(nn.Module):
    """A frozen linear layer with a low-rank term that is trained, zero at first (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """The layer and its low-rank term."""
        out: Tensor = self.base(x) + 2.0 * (x @ self.down.T @ self.up.T)
        return out


@cache
def _pretrained() -> dict[str, Tensor]:
    run = gpt(1234, 400)
    for _ in steps_of(run, 400):
        pass
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def lora(seed: int, steps: int) -> Training:
    """A low-rank fine-tune of a trained GPT on other text: warm-up, cosine with restarts."""
    torch.manual_seed(seed)
    base = _pretrained()
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = CharGPT(vocab=corpus().vocab, width=48, heads=2, layers=2, context=24)
    model.load_state_dict(base)
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("query", "value"):
            setattr(block.attn, name, LowRank(getattr(block.attn, name)))
        block.mlp.expand = LowRank(block.mlp.expand)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    text = corpus().encode(" ".join(corpus().decode(corpus().validation).upper().split()))

    return Training(
        model=model,
        optimizers=[optimizer],
        draws=[lambda: windows(text, 12, 24, generator)],
        losses=[language_loss(model)],
        inputs=[model],
        schedulers=[warm_up_and_cosine(optimizer, steps, 60, cycles=3)],
        max_norm=1.0,
    )


RUNS: dict[str, Callable[[int, int], Training]] = {
    "gpt": gpt,
    "classifier": classifier,
    "memoriser": memoriser,
    "gan": gan,
    "diffusion": diffusion,
    "lora": lora,
}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """What an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def steps_of(run: Training, count: int) -> Iterator[tuple[int, Tensor]]:
    """Train by hand; yields the player and the loss of each step after its backward pass, before the clip.

    Whoever clears the gradients meanwhile drops the step.
    """
    for number in range(count):
        player = number % len(run.turns)
        optimizer = run.optimizers[player]
        optimizer.zero_grad()
        loss = run.turns[player]()
        loss.backward()
        yield player, loss.detach()
        if run.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters_of(optimizer), run.max_norm)
        optimizer.step()
        for scheduler in run.schedulers:
            scheduler.step()
