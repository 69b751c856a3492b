"""Which rule tells a spike best: ours and the published ones on labelled traces of real training runs.

`python benchmarks/spikes.py` trains what is not recorded yet (some minutes), prints the tables,
writes `benchmarks/spikes.json` and, with --publish, puts the tables into `docs/detection.md`.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rules
import runs
import torch
import traces

TUNING = (0, 1)
EVALUATION = (2, 3, 4)
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "detection.md"


@dataclass
class Score:
    """Hits and misses, step by step."""

    hits: int = 0
    false: int = 0
    missed: int = 0
    healthy: int = 0
    delays: list[int] = field(default_factory=list)

    @property
    def precision(self) -> float:
        """How many of the flagged steps were faults."""
        return self.hits / (self.hits + self.false) if self.hits + self.false else 0.0

    @property
    def recall(self) -> float:
        """How many of the faulty steps were flagged."""
        return self.hits / (self.hits + self.missed) if self.hits + self.missed else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of both."""
        both = 2 * self.hits + self.false + self.missed
        return 2 * self.hits / both if both else 0.0

    def as_dict(self) -> dict[str, float]:
        """What goes into the file."""
        return {
            "precision": round(self.precision, 4),
            "recall": round(self.recall, 4),
            "f1": round(self.f1, 4),
            "delay": round(statistics.fmean(self.delays), 2) if self.delays else -1,
            "false_alarms_per_1000": round(1000 * self.false / max(1, self.healthy), 2),
        }


def judge(trace: traces.Trace, rule: rules.Detector, score: Score) -> None:
    """Run a rule over a trace and count."""
    guilty = {step for event in trace.events for step in event}
    norms = trace.norm
    flagged = set()
    for step, values in enumerate(zip(trace.loss, norms, trace.norms, trace.ratio, strict=True)):
        hit = rule(step, *values)
        if hit:
            flagged.add(step)
        if step in guilty:
            score.hits += hit
            score.missed += not hit
        elif step not in trace.ignored:
            score.false += hit
            score.healthy += 1
    for event in trace.events:
        first = next((step - event[0] for step in event if step in flagged), None)
        if first is not None:
            score.delays.append(first)


def labelled(regime: str, seeds: Sequence[int]) -> list[traces.Trace]:
    """Return the traces of a regime; the same for every rule."""
    found = []
    for name in runs.RUNS:
        for seed in seeds:
            if regime in traces.LIVE:
                found += traces.load(name, seed, faults=traces.LIVE[regime])
                continue
            for trace in traces.load(name, seed):
                dice = random.Random(f"{regime} {trace.name}")
                found.append(traces.REGIMES[regime](trace, dice))
    return found


def evaluate(make: Callable[[], rules.Detector], found: Sequence[traces.Trace]) -> Score:
    """Return how a rule does on these traces; a run has a fresh one."""
    score = Score()
    for trace in found:
        judge(trace, make(), score)
    return score


def tuned(seeds: Sequence[int]) -> dict[str, float]:
    """Return the best threshold of each published rule on the tuning seeds, by mean F1 over the regimes."""
    regimes = {regime: labelled(regime, seeds) for regime in (*traces.REGIMES, *traces.LIVE)}
    best = {}
    for name, (make, choices) in rules.TUNABLE.items():
        scored = {
            choice: statistics.fmean(
                evaluate(lambda make=make, choice=choice: make(choice), found).f1
                for found in regimes.values()
            )
            for choice in choices
        }
        best[name] = max(scored, key=lambda choice: scored[choice])
    return best


def main(seeds: Sequence[int] = EVALUATION) -> dict[str, Any]:
    """Evaluate everything and return the results."""
    torch.set_num_threads(1)
    thresholds = tuned(TUNING)
    contestants: dict[str, Callable[[], rules.Detector]] = dict(rules.RULES)
    for name, choice in thresholds.items():
        make = rules.TUNABLE[name][0]
        contestants[f"{name}: {choice:g}"] = lambda make=make, choice=choice: make(choice)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for regime in (*traces.REGIMES, *traces.LIVE):
        found = labelled(regime, seeds)
        results[regime] = {name: evaluate(make, found).as_dict() for name, make in contestants.items()}
        print(regime, {name: one["f1"] for name, one in results[regime].items()}, flush=True)
    healthy = [trace for name in runs.RUNS for seed in seeds for trace in traces.load(name, seed)]
    clean = {name: evaluate(make, healthy).as_dict() for name, make in contestants.items()}
    return {
        "runs": list(runs.RUNS),
        "steps": traces.STEPS,
        "tuning_seeds": list(TUNING),
        "evaluation_seeds": list(seeds),
        "thresholds": thresholds,
        "regimes": results,
        "healthy": {name: one["false_alarms_per_1000"] for name, one in clean.items()},
    }


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    regimes = results["regimes"]
    names = list(next(iter(regimes.values())))
    options = [name for name in names if name.startswith("SpikeCallback(")]
    ours, tuned_ones = options[0], [name for name in names if ": " in name]
    published = [name for name in names if name not in {*options, *tuned_ones}]
    parts = [
        "F1, the best in bold; the others as they are published:",
        _table(regimes, [ours, *published], _f1),
        "Precision / recall / mean delay in steps of the same:",
        _table(regimes, [ours, *published], _parts),
        "F1 if every threshold is chosen for it on the tuning seeds, whatever the false alarms:",
        _table(regimes, tuned_ones, _f1),
        "F1 of the options of `SpikeCallback`:",
        _table(regimes, options, _f1),
        "False alarms per 1,000 steps of the same runs without any fault:",
        "\n".join(
            ["| rule | false alarms |", "|---|---|"]
            + [f"| {_head(name)} | {rate:.2f} |" for name, rate in results["healthy"].items()]
        ),
    ]
    return "\n\n".join(parts)


Cell = Callable[[dict[str, float], float], str]


def _table(regimes: dict[str, dict[str, dict[str, float]]], names: Sequence[str], cell: Cell) -> str:
    lines = ["| regime | " + " | ".join(map(_head, names)) + " |", "|---" * (len(names) + 1) + "|"]
    for regime, found in regimes.items():
        best = max(found[name]["f1"] for name in names)
        lines.append(f"| {regime} | " + " | ".join(cell(found[name], best) for name in names) + " |")
    return "\n".join(lines)


def _head(name: str) -> str:
    return f"`{name}`" if name.startswith("SpikeCallback(") else name.replace("*", "\\*")


def _f1(one: dict[str, float], best: float) -> str:
    return f"**{one['f1']:.2f}**" if one["f1"] >= best - 0.005 else f"{one['f1']:.2f}"


def _parts(one: dict[str, float], _best: float) -> str:
    delay = f"{one['delay']:.1f}" if one["delay"] >= 0 else "-"
    return f"{one['precision']:.2f} / {one['recall']:.2f} / {delay}"


def publish(text: str, mark: str, path: Path = DOCUMENT) -> None:
    """Put a table into the document, between its marks."""
    pattern = rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)"
    content = path.read_text(encoding="utf-8")
    path.write_text(
        re.sub(pattern, lambda found: f"{found[1]}\n{text}\n\n{found[2]}", content, flags=re.DOTALL),
        encoding="utf-8",
    )


if __name__ == "__main__":
    found = main()
    Path(__file__).with_name("spikes.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(tables(found))
    if "--publish" in sys.argv:
        publish(tables(found), "spikes")
