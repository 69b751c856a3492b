"""A small character-level GPT whose attention is written out, so that a report can point into it."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradsentinel.demo.config import DemoConfig


class GPTOutput(NamedTuple):
    """What the model returns."""

    logits: Tensor
    """Scores of the next character, float, (batch, time, vocabulary)."""

    loss: Tensor | None
    """Weighted mean cross-entropy in nats per character, 0-dim; None if no targets were given."""


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before it.

    The score product, `query @ key^T`, is the one product computed in `score_dtype`; softmax and the rest
    stay in the dtype of the input. In float16 a product beyond 65504 becomes infinite and its softmax NaN,
    the way attention logits overflow in mixed-precision training.
    """

    def __init__(self, *, width: int, heads: int, context: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, but {width} is no multiple of {heads}")
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)
        future = torch.ones(context, context, dtype=torch.bool).triu(diagonal=1)
        self.register_buffer("future", future, persistent=False)
        self.future: Tensor

    def forward(self, x: Tensor, score_dtype: torch.dtype | None = None) -> Tensor:
        """Mix (batch, time, width) over time; `score_dtype` None is the dtype of `x`."""
        batch, time, width = x.shape
        score_dtype = score_dtype or x.dtype
        query = self._split(self.query(x)).to(score_dtype)
        key = self._split(self.key(x)).to(score_dtype)
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        scores = scores.masked_fill(self.future[:time, :time], -math.inf)
        weights = scores.to(x.dtype).softmax(dim=-1)
        mixed = weights @ self._split(self.value(x))
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """Split (batch, time, width) into (batch, heads, time, width / heads)."""
        batch, time, width = x.shape
        return x.view(batch, time, self.heads, width // self.heads).transpose(1, 2)


class MLP(nn.Module):
    """The feed-forward half of a block: four times as wide inside, GELU between."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of (batch, time, width) by itself."""
        out: Tensor = self.proj(functional.gelu(self.expand(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, *, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width=width, heads=heads, context=context)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width=width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, score_dtype: torch.dtype | None = None) -> Tensor:
        """Add what attention and MLP have to say to the residual stream (batch, time, width)."""
        x = x + self.dropout(self.attn(self.attn_norm(x), score_dtype))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class CharGPT(nn.Module):
    """A decoder-only transformer over characters.

    Under `torch.autocast` only the attention score product takes the autocast dtype and everything else
    stays in float32: most CPUs multiply large half-precision matrices many times slower than float32 ones,
    and the score product is where float16 overflows first. Without autocast all is float32.
    """

    def __init__(
        self, *, vocab: int, width: int, heads: int, layers: int, context: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(vocab, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            Block(width=width, heads=heads, context=context, dropout=dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):  # 2 branches a layer add up in the residual stream
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        weight: Tensor | None = None,
        **_: Any,
    ) -> GPTOutput:
        """Predict the next character at every position.

        Args:
            tokens: int64, (batch, time), time at most `context`.
            targets: int64, (batch, time); None for logits only.
            weight: how much each record counts in the loss, float, (batch,); None for equally.
            _: the other fields of a record, which `model(**batch)` passes too; ignored.

        Raises:
            ValueError: the records are longer than the context.
        """
        time = tokens.shape[1]
        if time > self.context:
            raise ValueError(
                f"a record has {time} characters, but the context of the model is {self.context}"
            )
        device = tokens.device.type
        score_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        with torch.autocast(device, enabled=False):
            position = torch.arange(time, device=tokens.device)
            x = self.token_embedding(tokens) + self.position_embedding(position)
            for block in self.blocks:
                x = block(x, score_dtype)
            logits = self.head(self.norm(x))
            return GPTOutput(logits, None if targets is None else _loss(logits, targets, weight))


def build(config: DemoConfig, vocab: int) -> CharGPT:
    """Build the model of the demonstration, the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return CharGPT(
            vocab=vocab,
            width=config.width,
            heads=config.heads,
            layers=config.layers,
            context=config.context,
            dropout=config.dropout,
        )


def _loss(logits: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
    """Mean over the characters of a record, then weighted mean over the records."""
    loss = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(dim=1)
    if weight is None:
        return loss.mean()
    return (weight * loss).sum() / weight.sum()


def _initialise(module: nn.Module) -> None:
    """Initialise as GPT-2 does: N(0, 0.02) and no bias."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
