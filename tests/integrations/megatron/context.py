"""Attention over a sequence that is spread over context-parallel ranks, as plain as can be.

Megatron's own needs Transformer Engine. Here each rank gathers the keys and values of all: the groups, the
gradients and the reductions over them are Megatron's.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor


class _Gathered(torch.autograd.Function):
    """The whole sequence of its parts; its gradient is the sum of all ranks' gradients of this part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        total = gradient.contiguous().float()  # gloo adds up no bfloat16
        dist.all_reduce(total, group=group)
        mine: Tensor = total.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        return mine.to(gradient.dtype)


class GatheringAttention(DotProductAttention):
    """The local attention, on the keys and values of all context-parallel ranks."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        alone = copy(config)
        alone.context_parallel_size = 1  # it refuses any other
        super().__init__(alone, *args, **kwargs)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = super().forward(query, _Gathered.apply(key), _Gathered.apply(value), *args, **kwargs)
        return made


def mine(values: Tensor, dim: int) -> Tensor:
    """Return this rank's part of a sequence."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    return values.chunk(size, dim)[rank].contiguous()
