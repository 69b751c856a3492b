"""What docs/accelerate.md takes for granted: an Accelerator and what it prepares."""

import torch
from accelerate import Accelerator

from gradsentinel.demo.model import CharGPT

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = CharGPT(vocab=16, width=8, heads=2, layers=1, context=8)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
tokens = torch.randint(16, (3, 2, 9))
loader = [{"tokens": one[:, :-1], "targets": one[:, 1:]} for one in tokens]
