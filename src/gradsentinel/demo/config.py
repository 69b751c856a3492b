"""The numbers of the demonstration run, in one place."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """The sizes and hyperparameters that all runs of the demonstration share.

    They are tuned so that three runs fit into two minutes on two CPU cores, also slower ones, while the loss
    falls from that of blind guessing, 4.6 nats per character, to less than half of it.
    """

    steps: int = 300
    """Optimizer steps of each run."""

    batch_size: int = 32
    """Records in a batch."""

    context: int = 40
    """Characters in a record, which is also how far back the model can look."""

    width: int = 96
    """Channels of the residual stream."""

    heads: int = 3
    """Attention heads in each block."""

    layers: int = 3
    """Transformer blocks."""

    dropout: float = 0.05
    """Probability with which a channel of a residual branch is dropped in training."""

    learning_rate: float = 5e-3
    """Peak learning rate of AdamW."""

    warmup_steps: int = 20
    """Steps over which the learning rate rises to its peak."""

    final_learning_rate: float = 0.1
    """Learning rate of the last step, as a fraction of the peak."""

    weight_decay: float = 0.01
    """Decoupled weight decay."""

    max_norm: float = 1.0
    """Norm to which gradients are clipped."""

    corpus_bytes: int = 2_000_000
    """How much text is read."""

    seed: int = 1
    """Seed of the weights, the dropout and the order of the records."""

    threads: int = 1
    """CPU threads that torch may use.

    The operators are so small that a second thread gains a third; on a machine that has other things to do
    the two then wait for each other, and a step takes several times as long as with one.
    """

    def learning_rate_scale(self, step: int) -> float:
        """Say by which factor the peak learning rate is multiplied at a step, counted from 0.

        A linear warm-up and a cosine decay, in the form that `torch.optim.lr_scheduler.LambdaLR` takes.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        decay = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_learning_rate + (1.0 - self.final_learning_rate) * decay
