"""How the cost of a check grows: with the parameters, the tensors they are in, and the callbacks.

No model: gradients that are there, and what a step of the sentinel takes, less the norm that torch computes.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from workload import CLOCK

from gradsentinel import MagnitudeCallback, NanCallback, Sentinel

PARAMETERS = (2**20, 2**22, 2**24, 2**25)
TENSORS = (64, 256, 1024, 4096)
CALLBACKS = (1, 4, 16, 64)
ROUNDS = 15


class Bare(nn.Module):
    """Parameters of equal sizes, in layers of four."""

    def __init__(self, parameters: int, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ParameterList(nn.Parameter(torch.zeros(parameters // tensors)) for _ in range(4))
            for _ in range(tensors // 4)
        )


def extra_ms(parameters: int, tensors: int, callbacks: int, rounds: int = ROUNDS) -> tuple[float, float]:
    """Return the median milliseconds that a step of the sentinel takes more than the norm, and the norm."""
    torch.manual_seed(0)
    net = Bare(parameters, tensors)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    optimizer.step = lambda *_, **__: None  # neither loop's is of interest
    optimizer.zero_grad = lambda *_, **__: None
    watch = [NanCallback(state_every=0, state_warmup=0)]
    watch += [MagnitudeCallback(max_global_norm=1e9 + n) for n in range(callbacks - 1)]
    sentinel = Sentinel(net, optimizer, callbacks=watch)
    gradients = {p: torch.randn_like(p) for p in net.parameters()}
    times: dict[str, list[float]] = {"norm": [], "watched": []}
    order = random.Random(0)
    for number in range(3 + rounds):
        for name in order.sample(list(times), 2):
            for p, gradient in gradients.items():
                p.grad = gradient
            start = CLOCK.now()
            if name == "norm":
                nn.utils.get_total_norm([p.grad for p in net.parameters()])
            else:
                sentinel.step()
            if number >= 3:
                times[name].append(1e3 * (CLOCK.now() - start))
    pairs = zip(times["watched"], times["norm"], strict=True)
    return statistics.median(mine - theirs for mine, theirs in pairs), statistics.median(times["norm"])


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Return by which power the cost grows from the middle of the range to its end: 1 is linear."""
    last, before = max(costs[-1], 1e-3), max(costs[-2], 1e-3)
    return max(0.0, math.log(last / before) / math.log(sizes[-1] / sizes[-2]))


def measure() -> dict[str, Any]:
    """Return the extra milliseconds along each axis, the others held, and the power that they grow by."""
    axes: dict[str, tuple[Sequence[int], list[tuple[float, float]]]] = {
        "parameters": (PARAMETERS, [extra_ms(n, 64, 2) for n in PARAMETERS]),
        "tensors": (TENSORS, [extra_ms(2**22, n, 2) for n in TENSORS]),
        "callbacks": (CALLBACKS, [extra_ms(2**22, 64, n) for n in CALLBACKS]),
    }
    return {
        name: {
            "sizes": list(sizes),
            "extra_ms": [extra for extra, _ in costs],
            "norm_ms": [norm for _, norm in costs],
            "power": exponent(sizes, [extra for extra, _ in costs]),
        }
        for name, (sizes, costs) in axes.items()
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measure())
