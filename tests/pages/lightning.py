"""What docs/lightning.md takes for granted: a Trainer, a detector of one's own, and a loop around Fabric."""

import functools

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer as RealTrainer
from torch import nn

from gradsentinel import Detector

Trainer = functools.partial(RealTrainer, logger=False, accelerator="cpu")


class MyDetector(Detector):
    """Looks at nothing."""


def loss_of(model, batch):
    return model(batch).square().mean()


torch.manual_seed(0)
fabric = Fabric(accelerator="cpu", devices=1)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
loader = [torch.randn(8, 4) for _ in range(3)]
