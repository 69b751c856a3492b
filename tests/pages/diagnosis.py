"""What docs/diagnosis.md takes for granted."""

import torch
from torch import nn

from gradsentinel import NanCallback, Rollback, Sentinel

model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
__all__ = ["NanCallback", "Rollback", "Sentinel", "model", "optimizer"]
