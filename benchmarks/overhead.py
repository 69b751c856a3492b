"""What the watch costs per step, against the same plain loop and against what people would use instead.

Whole steps wobble by several per cent on a shared machine, so two numbers are given: the ratio of whole
steps, and the time of the part of a step that is neither forward, backward nor optimizer (check, agree,
clip, and everything else that a watched loop does), less that of the plain loop, as a share of a plain step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peers import peers, plain
from race import Step, Variant, compare, race, warm_up
from torch import Tensor, nn
from workload import CLOCK, adamw, batches, forward, model

import gradsentinel
from gradsentinel import (
    Callback,
    GradientStatistics,
    HeadroomCallback,
    MagnitudeCallback,
    NanCallback,
    Rollback,
    SaturationCallback,
    Sentinel,
)
from gradsentinel.callbacks.spike import SpikeCallback

TOKENS = (512, 64)
SECONDS = {512: 70.0, 64: 35.0}
WARM_UP = 130
"""Steps before anything is measured, on a few tokens: windows of 128 steps are full then."""
SETTINGS: dict[str, float | None] = {"clip": 0.1, "no clip": None, "clip within bound": 1e6}
"""How the loop clips: always to be multiplied, never looked at, and looked at with nothing to be done."""
PLAIN, FUSED = "plain", "plain, fused AdamW"
THREE, STANDARD = "NaN, magnitude and spike", "the standard set"
TARGETS: dict[tuple[str, str, int], float] = {
    (THREE, "clip", 512): 0.003,
    (THREE, "clip", 64): 0.005,
    (THREE, "no clip", 512): 0.015,
    (THREE, "no clip", 64): 0.04,
    (STANDARD, "clip", 512): 0.01,
    (STANDARD, "clip", 64): 0.02,
}
"""What a step may take longer, as a share."""


def watched(
    max_norm: float | None,
    callbacks: Callable[[Path], list[Callback]],
    *,
    guard: str = "host",
) -> tuple[Step, Callable[[], int]]:
    """Return a watched loop's step, and what ends it and counts its incidents."""
    keep = tempfile.TemporaryDirectory(prefix="gradsentinel-bench-")
    folder = Path(keep.name)
    net = model()
    optimizer = adamw(net, fused=guard == "device")
    given = callbacks(folder)
    sentinel = Sentinel(net, optimizer, callbacks=given, run_dir=folder, guard=guard)

    upcoming: list[Tensor] = []

    def loader() -> Iterator[Tensor]:
        while True:
            yield upcoming.pop()

    loop = iter(sentinel.steps(loader()))

    def step(x: Tensor, y: Tensor) -> None:
        upcoming.append(x)
        sentinel.backward(forward(net, next(loop), y))
        sentinel.step(max_norm=max_norm)

    def finish() -> int:
        sentinel.close()
        keep.cleanup()
        return len(sentinel.incidents)

    return step, finish


def three(_: Path) -> list[Callback]:
    return [NanCallback(), MagnitudeCallback(max_global_norm=1e9), SpikeCallback()]


def ours(max_norm: float | None) -> list[Variant]:
    """Return what is watched, with the defaults; what is done on scheduled steps only is measured apart."""
    sets: dict[str, tuple[Callable[[Path], list[Callback]], str]] = {
        "NanCallback": (lambda _: [NanCallback()], "host"),
        THREE: (three, "host"),
        STANDARD: (gradsentinel.standard, "host"),
        "NanCallback, guard='device'": (lambda _: [NanCallback()], "device"),
        f"{THREE}, guard='device'": (three, "device"),
    }
    found = []
    for name, (callbacks, guard) in sets.items():
        step, finish = watched(max_norm, callbacks, guard=guard)
        found.append(Variant(name, step, baseline=FUSED if guard == "device" else PLAIN, finish=finish))
    return found


def field(max_norm: float | None, *, alone: bool = False) -> list[Variant]:
    """Return everything that takes part, or, `alone`, without the peers."""
    return [
        Variant(PLAIN, plain(max_norm)),
        Variant("plain again (A/A)", plain(max_norm)),
        Variant(FUSED, plain(max_norm, fused=True)),
        *ours(max_norm),
        *([] if alone else peers(max_norm)),
    ]


def measure(setting: str, *, share: float = 1.0) -> list[dict[str, Any]]:
    """Return the comparisons of each size of step, by variant; `share` shortens the time for each."""
    alone = setting == "clip within bound"
    variants = field(SETTINGS[setting], alone=alone)
    by_name = {variant.name: variant for variant in variants}
    warm_up(variants, batches(64, 128), max(14, int(WARM_UP * min(1.0, share))))
    results = []
    for tokens in TOKENS:
        seconds = SECONDS[tokens] * share * (0.3 if alone else 1.0)
        rounds = race(variants, batches(tokens), seconds=seconds)
        results.append(
            {
                "tokens": tokens,
                "setting": setting,
                "rounds": rounds,
                "plain_ms": 1e3 * statistics.median(whole for whole, _ in by_name[PLAIN].rounds.values()),
                "variants": {
                    variant.name: compare(variant, by_name[variant.baseline])
                    for variant in variants
                    if variant.name != variant.baseline
                },
            }
        )
    incidents = {variant.name: variant.finish() for variant in variants}
    for result in results:
        result["incidents"] = {name: count for name, count in incidents.items() if count}
    return results


def now_and_then(rounds: int = 20, tokens: int = 64) -> dict[str, dict[str, float]]:
    """Return what scheduled work costs in a step that it is due in, and on average over its interval.

    Each is measured with an interval of two steps, so that steps with and without it alternate.
    """
    schedules: dict[str, tuple[Callable[[], list[Callback]], int]] = {
        "state check (NanCallback)": (lambda: [NanCallback(state_every=2, state_warmup=0)], 50),
        "snapshot (Rollback)": (lambda: [NanCallback(**NEVER), Rollback(every=2)], 100),
        "activations (SaturationCallback)": (
            lambda: [SaturationCallback(every=10**9, activations_every=2)],
            50,
        ),
        "headroom (HeadroomCallback)": (lambda: [HeadroomCallback(every=2)], 100),
        "statistics (GradientStatistics)": (lambda: [GradientStatistics(every=2)], 100),
    }
    found = {}
    for name, (callbacks, usual) in schedules.items():
        step, finish = watched(1.0, lambda _, callbacks=callbacks: callbacks())
        due: dict[bool, list[float]] = {False: [], True: []}
        every = batches(tokens)
        for number in range(10 + 2 * rounds):
            CLOCK.inside = 0.0
            start = CLOCK.now()
            step(every[number % 16], every[number % 16])
            due[number % 2 == 0].append(CLOCK.now() - start)
        finish()
        halves = [statistics.median(times[5:]) for times in due.values()]
        extra = 1e3 * abs(halves[0] - halves[1])
        found[name] = {"due_ms": extra, "every": usual, "per_step_ms": extra / usual}
    return found


NEVER = {"state_every": 0, "state_warmup": 0}


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
