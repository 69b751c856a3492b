"""Which statistics of single tensors tell a spike best: those of SpikeCallback(groups=), and a running mean.

`python benchmarks/groups.py` judges the recorded norms of each tensor alone, by the traces of `spikes.py` and
by one regime more; it takes some minutes, prints the table, writes `benchmarks/groups.json` and, with
--publish, puts the table into `docs/detection.md`.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import runs
import torch
import traces
from spikes import EVALUATION, Score, judge, labelled, publish
from torch import Tensor

from gradsentinel import SpikeCallback

SINGLE = "one tensor (x8 to x100 of its own)"


class Rule(Protocol):
    """Says how far out the norms of one step are, and learns from them."""

    def score(self, step: int, norms: Tensor) -> Tensor:
        """Return the largest of all, 0-dim; above 1 is an alarm."""


class Ours:
    """What SpikeCallback(groups="parameter") keeps."""

    def __init__(self) -> None:
        self.levels = SpikeCallback(groups="parameter")._new_groups()._make()

    def score(self, step: int, norms: Tensor) -> Tensor:
        """Judge, then learn."""
        return self.levels.judge(step, norms).score


class RunningMean:
    """Mean and deviation of the logarithm over about 128 values; what is outside, either side, is not learnt.

    At least fivefold; eight values outside in a row are a new level, from which it begins anew.
    """

    def __init__(self, limit: float = 6.0, window: int = 128, warmup: int = 20, patience: int = 8) -> None:
        self.limit, self.window, self.warmup, self.patience = limit, window, warmup, patience
        self.mean = self.variance = self.number = self.streak = torch.zeros(())

    def score(self, step: int, norms: Tensor) -> Tensor:
        """Judge, then learn."""
        logs = norms.log()
        distance = logs - self.mean
        scores = distance / (self.variance.sqrt() * self.limit).clamp(min=math.log(5.0))
        warm, finite = self.number >= self.warmup, logs.isfinite()
        inside = torch.where(warm, scores.abs() <= 1, finite)
        streak = torch.where(inside, 0, self.streak + 1)
        settled = finite & (streak >= self.patience)
        learnt = inside | settled
        self.number = torch.where(settled, 0, self.number) + learnt
        share = learnt / self.number.clamp(1, self.window)
        moved = torch.where(learnt, distance, 0.0)
        spread = torch.where(self.number <= 1, 0.0, share)
        self.variance = self.variance + spread * (moved.square() * (1 - share) - self.variance)
        self.mean = self.mean + share * moved
        self.streak = torch.where(settled, 0, streak)
        return torch.where(warm & finite, scores, 0.0).amax()


CONTESTANTS: dict[str, Callable[[], Rule]] = {
    '`SpikeCallback(groups="parameter")`': Ours,
    "running mean and deviation (6)": RunningMean,
    "running mean and deviation (5)": lambda: RunningMean(limit=5.0),
}


def single(trace: traces.Trace, dice: random.Random) -> traces.Trace:
    """Multiply one tensor's norm at a time, which the global norm need not show."""
    norms, events = [list(values) for values in trace.norms], []
    step = traces.SETTLED + dice.randrange(30)
    while step < len(trace):
        norms[step][dice.randrange(len(norms[0]))] *= 8.0 * (100.0 / 8.0) ** dice.random()
        events.append([step])
        step += 16 + dice.randrange(30)
    return replace(trace, norms=norms, events=events)


def sets(seeds: Sequence[int]) -> dict[str, Callable[[], list[traces.Trace]]]:
    """Return what is judged, by regime."""
    healthy = [trace for name in runs.RUNS for seed in seeds for trace in traces.load(name, seed)]
    return {
        SINGLE: lambda: [single(trace, random.Random(f"one tensor {trace.name}")) for trace in healthy],
        **{
            regime: lambda regime=regime: labelled(regime, seeds)
            for regime in (*traces.REGIMES, *traces.LIVE)
        },
        "healthy": lambda: healthy,
    }


def evaluate(make: Callable[[], Rule], found: Sequence[traces.Trace]) -> dict[str, float]:
    """Return how a rule does on these traces, step by step; a run has a fresh one."""
    score = Score()
    for trace in found:
        rule, rows = make(), torch.tensor(trace.norms)
        scores = [rule.score(step, row) for step, row in enumerate(rows)]
        flagged = (torch.stack(scores) > 1).tolist()
        judge(trace, lambda step, *_, flagged=flagged: flagged[step], score)
    return {**score.as_dict(), "false": score.false, "healthy": score.healthy}


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the results as Markdown."""
    lines = ["| regime | " + " | ".join(CONTESTANTS) + " |", "|---" * (len(CONTESTANTS) + 1) + "|"]
    for regime, found in results.items():
        if regime == "healthy":
            cells = [f"{one['false']:.0f} of {one['healthy']:,.0f}" for one in found.values()]
            lines.append("| false alarms on healthy steps | " + " | ".join(cells) + " |")
            continue
        best = max(one["f1"] for one in found.values())
        cells = [
            ("**{f1:.2f}**" if one["f1"] >= best - 0.005 else "{f1:.2f}").format(**one)
            + " ({precision:.2f} / {recall:.2f})".format(**one)
            for one in found.values()
        ]
        lines.append(f"| {regime} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(seeds: Sequence[int] = EVALUATION) -> dict[str, Any]:
    """Evaluate everything and return the results."""
    torch.set_num_threads(1)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for regime, load in sets(seeds).items():
        found = load()
        results[regime] = {name: evaluate(make, found) for name, make in CONTESTANTS.items()}
        print(regime, {name: one["f1"] for name, one in results[regime].items()}, flush=True)
    return {"seeds": list(seeds), "regimes": results}


if __name__ == "__main__":
    found = main()
    Path(__file__).with_name("groups.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found["regimes"]))
    if "--publish" in sys.argv:
        publish(table(found["regimes"]), "groups")
