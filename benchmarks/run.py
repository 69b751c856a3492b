"""Run the benchmarks, print their tables and write `benchmarks/results.json`: `make bench`."""

from __future__ import annotations

import json
import logging
import platform
from pathlib import Path

import overhead
import torch
from rich.console import Console
from rich.table import Table


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("gradsentinel").setLevel(logging.ERROR)
    console = Console()
    results = [overhead.measure(tokens, clip) for clip in (1.0, None) for tokens in overhead.TOKENS]
    table = Table(title="Step time over the plain loop's, median of pairs, 5 M parameters, 1 thread")
    table.add_column("variant")
    for result in results:
        table.add_column(
            f"{result['tokens']} tokens, {'clip' if result['clip'] else 'no clip'}", justify="right"
        )
    for name in results[0]["ratios"]:
        table.add_row(name, *(f"{result['ratios'][name]:.3f}" for result in results))
    table.add_row(
        "[dim]plain step, ms[/dim]", *(f"[dim]{result['plain_ms']:.1f}[/dim]" for result in results)
    )
    console.print(table)
    segment = overhead.segment()
    extra = segment["check and clip"] - segment["clip"]
    console.print(f"check and clip {segment['check and clip']:.2f} ms, clip alone {segment['clip']:.2f} ms")
    for result in results:
        if result["clip"]:
            console.print(
                f"  that is {extra / result['plain_ms']:+.2%} of a step of {result['tokens']} tokens"
            )
    unheard = overhead.unheard_event_ns()
    console.print(f"an event nobody hears costs {unheard:.0f} ns")
    path = Path(__file__).with_name("results.json")
    machine = {"torch": torch.__version__, "python": platform.python_version(), "cpu": platform.machine()}
    path.write_text(
        json.dumps(
            {"machine": machine, "steps": results, "segment_ms": segment, "unheard_event_ns": unheard},
            indent=2,
        )
        + "\n"
    )
    console.print(f"written to {path.name}")


if __name__ == "__main__":
    main()
