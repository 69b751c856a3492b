"""Run the benchmarks, print their tables and write `benchmarks/results.json`: `make bench`."""

from __future__ import annotations

import json
import logging
import platform
from pathlib import Path
from typing import Any

import consensus
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
    agreement = consensus.measure()
    show_agreement(console, agreement)
    path = Path(__file__).with_name("results.json")
    machine = {"torch": torch.__version__, "python": platform.python_version(), "cpu": platform.machine()}
    path.write_text(
        json.dumps(
            {
                "machine": machine,
                "steps": results,
                "segment_ms": segment,
                "unheard_event_ns": unheard,
                "consensus": agreement,
            },
            indent=2,
        )
        + "\n"
    )
    console.print(f"written to {path.name}")


def show_agreement(console: Console, found: dict[str, Any]) -> None:
    """Print what the agreement of ranks costs."""
    table = Table(title=f"{found['ranks']} gloo ranks, {found['parameters'] / 1e6:.1f} M parameters, DDP")
    table.add_column("variant")
    table.add_column("step over plain DDP's", justify="right")
    for name, ratio in found["ratios"].items():
        table.add_row(name, f"{ratio:.3f}")
    table.add_row("[dim]plain step, ms[/dim]", f"[dim]{found['plain_ms']:.1f}[/dim]")
    table.add_section()
    for name, milliseconds in found["parts_ms"].items():
        table.add_row(name, f"{milliseconds:.3f} ms")
    console.print(table)


if __name__ == "__main__":
    main()
