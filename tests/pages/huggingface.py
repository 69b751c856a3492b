"""What docs/huggingface.md takes for granted: a model, arguments and data for a Trainer."""

from torch import nn
from transformers import Trainer, TrainingArguments

model = nn.Linear(4, 1)
arguments = TrainingArguments(output_dir="out", report_to=[], use_cpu=True)
data = [{"x": [0.0] * 4}]
__all__ = ["Trainer", "arguments", "data", "model"]
