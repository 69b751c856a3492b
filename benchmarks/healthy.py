"""Does a healthy run stay quiet? Real training runs of six kinds under the standard set and more detectors.

`python benchmarks/healthy.py` takes some minutes; `--steps 10000` trains each run longer. It prints a table,
writes `benchmarks/healthy.json` and, with --publish, puts the table into `docs/detection.md`.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import runs
import torch
from spikes import publish
from torch import Tensor, nn

import gradsentinel
from gradsentinel import (
    Callback,
    GradientStatistics,
    HeadroomCallback,
    Kind,
    SaturationCallback,
    Sentinel,
)
from gradsentinel.callbacks.loss_scale import LossScaleCallback
from gradsentinel.callbacks.spike import SpikeCallback
from gradsentinel.callbacks.stagnation import StagnationCallback
from gradsentinel.callbacks.update_ratio import UpdateRatioCallback

NONFINITE = {kind for kind in Kind if kind.value.startswith("nonfinite")}
STEPS = 2500
SEED = 100


def watchers(run_dir: Path) -> list[Callback]:
    """The standard set, with the group statistics on, and what looks at anything that it does not look at."""
    standard = [one for one in gradsentinel.standard(run_dir) if not isinstance(one, SpikeCallback)]
    return [
        *standard,
        SpikeCallback(groups="parameter"),
        StagnationCallback(),
        UpdateRatioCallback(),
        LossScaleCallback(),
        SaturationCallback(),
        HeadroomCallback(),
        GradientStatistics(),
    ]


def watch(name: str, steps: int, seed: int) -> dict[str, Any]:
    """Train one run under the sentinel and count its incidents by kind."""
    run = runs.RUNS[name](seed, steps)
    players = len(run.optimizers)
    started = time.perf_counter()

    def forward(_: nn.Module, turn: tuple[int, runs.Batch]) -> Tensor:
        player, batch = turn
        return run.losses[player](batch)

    with tempfile.TemporaryDirectory() as folder:
        sentinel = Sentinel(
            run.model,
            run.optimizers,
            callbacks=watchers(Path(folder)),
            scheduler=list(run.schedulers),
            run_dir=folder,
            forward=forward,
        )
        loader = ((number % players, run.draws[number % players]()) for number in range(steps))
        with sentinel:
            for turn in sentinel.steps(loader):
                sentinel.backward(forward(run.model, turn))
                sentinel.step(run.max_norm, optimizer=run.optimizers[turn[0]])
                for optimizer in run.optimizers:  # a player's loss leaves gradients in the other's weights
                    optimizer.zero_grad()
        found = Counter(incident.kind for incident in sentinel.incidents)
        return {
            "steps": steps,
            "seconds": round(time.perf_counter() - started, 1),
            "nonfinite": sum(found[kind] for kind in NONFINITE),
            "spike": found[Kind.SPIKE],
            "other": sum(n for kind, n in found.items() if kind not in {*NONFINITE, Kind.SPIKE}),
            "incidents": [f"step {one.step}: {one.message}" for one in sentinel.incidents],
        }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = ["| run | steps | non-finite alarms | spike alarms | other alarms |", "|---|---|---|---|---|"]
    for name, one in results.items():
        what = (runs.RUNS[name].__doc__ or name).strip().rstrip(".")
        lines.append(f"| {what} | {one['steps']:,} | {one['nonfinite']} | {one['spike']} | {one['other']} |")
    total = {
        key: sum(one[key] for one in results.values()) for key in ("steps", "nonfinite", "spike", "other")
    }
    lines.append(
        f"| **all** | **{total['steps']:,}** | **{total['nonfinite']}** | **{total['spike']}** "
        f"| **{total['other']}** |"
    )
    return "\n".join(lines)


def main() -> None:
    """Train all runs and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--runs", nargs="*", default=list(runs.RUNS), choices=list(runs.RUNS))
    parser.add_argument("--publish", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("gradsentinel").setLevel(logging.ERROR)
    results = {}
    for name in given.runs:
        results[name] = watch(name, given.steps, given.seed)
        print(name, results[name], flush=True)
    text = table(results)
    print(text)
    content = {"seed": given.seed, "runs": results}
    Path(__file__).with_name("healthy.json").write_text(
        json.dumps(content, indent=1) + "\n", encoding="utf-8"
    )
    if given.publish:
        publish(text, "healthy")


if __name__ == "__main__":
    main()
