"""What the first block of docs/evidence.md takes for granted."""

import torch
from torch import nn

from gradsentinel import NanCallback, Rollback, Sentinel, SnapshotSaver

model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())


def loss(model, batch):
    return model(batch).mean()


__all__ = ["NanCallback", "Rollback", "Sentinel", "SnapshotSaver", "loss", "model", "optimizer"]
