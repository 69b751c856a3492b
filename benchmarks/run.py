"""Run the benchmarks, write `benchmarks/results.json` and the tables of `docs/performance.md`: `make bench`.

About ten minutes. On a machine that is busy with something else use --cpu-time: it counts what this process
computes, and leaves out what others take away (and waiting for a disk).
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import platform
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ascend_probe
import overhead
import page
import peers
import torch
from rich.console import Console
from workload import CLOCK, model

RESULTS = Path(__file__).with_name("results.json")
FORMAT = 2
PROBE_SECONDS = {512: 30.0, 64: 12.0}


def steps(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each way to clip, and the peer that needs a process of its own."""
    results = []
    for setting, max_norm in overhead.SETTINGS.items():
        found = overhead.measure(setting, share=given.share)
        for result in found:
            if setting == "clip within bound":
                continue
            seconds = PROBE_SECONDS[result["tokens"]] * given.share
            probe = ascend_probe.measure(result["tokens"], max_norm, seconds=seconds, cpu_time=given.cpu_time)
            result["variants"].update(
                {name: one for name, one in probe.get("variants", {}).items() if name.startswith("msprobe")}
            )
            if "missing" in probe:
                result["missing"] = {"msprobe": probe["missing"]}
        results += found
    return results


def of(module: str, function: str = "measure") -> Callable[[argparse.Namespace], Any]:
    """Return a section that another file measures; what that needs is imported when it is its turn."""
    return lambda _: getattr(importlib.import_module(module), function)()


SECTIONS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "counts": of("launches"),
    "growth": of("growth"),
    "scheduled": of("overhead", "now_and_then"),
    "unheard_event_ns": of("overhead", "unheard_event_ns"),
    "consensus": of("consensus"),
    "snapshots": of("snapshots"),
    "diagnosis": of("diagnosis"),
    "megatron": of("megatron_core"),
    "adapters": of("adapters"),
    "viewing": of("viewing"),
    "drawing": of("drawing"),
    "steps": steps,
    "spikes": of("spikes", "main"),
}
ON_REQUEST = {"spikes"}
"""Takes minutes of its own, and depends on no clock: python benchmarks/run.py --only spikes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), help="these sections; the others stay")
    parser.add_argument("--share", type=float, default=1.0, help="of the usual time for each comparison")
    parser.add_argument(
        "--cpu-time", action="store_true", help="on a machine that is busy with something else"
    )
    parser.add_argument(
        "--page", action="store_true", help="only write the page again, from the last results"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("gradsentinel").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if given.cpu_time:
        CLOCK.now = time.thread_time
    console = Console()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if results.get("format") != FORMAT:  # of another version of this program
        results = {"format": FORMAT}
    failed = []
    chosen = [] if given.page else given.only or [name for name in SECTIONS if name not in ON_REQUEST]
    for name in chosen:
        start = time.perf_counter()
        try:
            results[name] = SECTIONS[name](given)
        except Exception:  # noqa: BLE001 - the others are worth having
            traceback.print_exc()
            failed.append(name)
        console.print(f"{name}: {time.perf_counter() - start:.0f} s")
        if name == "steps" or "machine" not in results:  # what stands under its tables
            results["machine"] = machine(given)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    for title, text in page.tables(results).items():
        console.print(f"\n[bold]{title}[/bold]")
        print(text)
    page.write(results)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def machine(given: argparse.Namespace) -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": 1,
        "parameters": sum(p.numel() for p in model().parameters()),
        "tensors": len(list(model().parameters())),
        "clock": "cpu time" if given.cpu_time else "wall clock",
        "missing": peers.missing(),
    }


def processor() -> str:
    """Return the processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )


if __name__ == "__main__":
    main()
