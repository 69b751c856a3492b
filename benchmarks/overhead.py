"""What the watch costs per step, against the same plain loop.

Whole steps wobble by several per cent on a shared machine, so two numbers are given: the ratio of whole
steps, interleaved in random order in one process with an A/A control, and the time of the segment that
differs (check, agree, clip) as a share of the plain step.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import gradsentinel
from gradsentinel import MagnitudeCallback, NanCallback, Rollback, Sentinel

TOKENS = (64, 512)
ROUNDS = 60
WARM_UP = 5


@dataclass
class Variant:
    """One way to do a step, with its own copy of everything."""

    name: str
    step: Callable[[Tensor, Tensor], None]
    whole: list[float] = field(default_factory=list)


def model() -> nn.Module:
    """About 5 M parameters in about 75 tensors."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Embedding(256, 256),
        nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
        nn.Linear(256, 256),
    )


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())


def plain(max_norm: float | None) -> Callable[[Tensor, Tensor], None]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(net, x, y).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def isnan_loop(max_norm: float | None) -> Callable[[Tensor, Tensor], None]:
    """What people write by hand."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(net, x, y).backward()
        bad = any(
            bool(torch.isnan(p.grad).any()) or bool(torch.isinf(p.grad).any()) for p in net.parameters()
        )
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        if not bad:
            optimizer.step()
        optimizer.zero_grad()

    return step


def watched(
    callbacks: list[gradsentinel.Callback], max_norm: float | None
) -> Callable[[Tensor, Tensor], None]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    sentinel = Sentinel(net, optimizer, callbacks=callbacks)

    def step(x: Tensor, y: Tensor) -> None:
        for _ in sentinel.steps([x]):
            sentinel.backward(loss_of(net, x, y))
            sentinel.step(max_norm=max_norm)

    return step


def measure(tokens: int, max_norm: float | None, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the ratios to the plain loop: medians of paired whole steps."""
    never = NanCallback(state_every=0, state_warmup=0)
    variants = [
        Variant("plain", plain(max_norm)),
        Variant("plain again (A/A)", plain(max_norm)),
        Variant("isnan and isinf loop", isnan_loop(max_norm)),
        Variant("NanCallback", watched([never], max_norm)),
        Variant(
            "NanCallback, MagnitudeCallback, Rollback",
            watched([NanCallback(), MagnitudeCallback(max_global_norm=1e6), Rollback()], max_norm),
        ),
    ]
    order = random.Random(0)
    x = torch.randint(0, 256, (max(1, tokens // 64), 64))
    for number in range(WARM_UP + rounds):
        for variant in order.sample(variants, len(variants)):
            start = time.perf_counter()
            variant.step(x, x)
            if number >= WARM_UP:
                variant.whole.append(time.perf_counter() - start)
    base = variants[0].whole
    return {
        "tokens": tokens,
        "clip": max_norm is not None,
        "plain_ms": 1e3 * statistics.median(base),
        "ratios": {
            variant.name: statistics.median(
                mine / theirs for mine, theirs in zip(variant.whole, base, strict=True)
            )
            for variant in variants
        },
    }


def segment(rounds: int = 200) -> dict[str, Any]:
    """Return the milliseconds of check + clip alone, watched and plain, interleaved."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    sentinel = Sentinel(net, optimizer, callbacks=[NanCallback(), MagnitudeCallback(max_global_norm=1e9)])
    x = torch.randint(0, 256, (1, 64))
    loss_of(net, x, x).backward()
    kept = {p: p.grad.clone() for p in net.parameters()}
    times: dict[str, list[float]] = {"clip": [], "check and clip": []}
    host, watch = sentinel.host, sentinel._watch
    for number in range(rounds):
        for name in ("clip", "check and clip") if number % 2 else ("check and clip", "clip"):
            for p, gradient in kept.items():
                p.grad = gradient.clone()
            start = time.perf_counter()
            if name == "clip":
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            else:
                view = host.gradients()
                watch.before_clip(view)
                view.clip_(1.0)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def unheard_event_ns(rounds: int = 200_000) -> float:
    """Return the nanoseconds that an event nobody hears costs."""
    net = nn.Linear(1, 1)
    sentinel = Sentinel(net, torch.optim.SGD(net.parameters(), 0.1), callbacks=[])
    bus = sentinel._watch.bus
    start = time.perf_counter()
    for _ in range(rounds):
        if bus.hears(gradsentinel.Batch):
            raise AssertionError
    return 1e9 * (time.perf_counter() - start) / rounds
