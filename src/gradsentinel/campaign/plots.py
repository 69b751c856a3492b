"""The plots of results.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsentinel.campaign.report import LABELS

_PLACES = ("activation", "parameter", "gradient")


def draw(results: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Draw what there is to draw, and return file names with what they show; none without matplotlib."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - optional
    except ImportError:
        return []
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "gradsentinel"  # the same picture for the same numbers
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    if results["tables"].get("loops"):
        drawn.append(_policies(results["tables"]["loops"], folder / "campaign-policies.svg"))
    if results["bits"]:
        drawn.append(_bits(results["bits"], folder / "campaign-bits.svg"))
    return drawn


def _policies(table: Mapping[str, Mapping[str, Any]], path: Path) -> tuple[str, str]:
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    shown = [policy for policy in table if policy not in {"clean", "healthy"}]
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    measures = (
        ("interruptions", "interruptions", 1.0),
        ("spoiled", "spoiled updates", 1.0),
        ("useful", "useful steps, %", 100.0),
    )
    for number, (key, title, factor) in enumerate(measures):
        axes = figure.add_subplot(1, 3, number + 1)
        values = [(table[policy][key] or 0) * factor for policy in shown]
        bars = axes.barh([LABELS[policy] for policy in shown], values, color="#4c78a8")
        axes.bar_label(bars, fmt="%.4g", padding=3, fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.set_xlim(0, max([*values, 1]) * 1.25)
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
        if number:
            axes.set_yticklabels([])
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    return path.name, "Interruptions, spoiled updates and useful steps of each policy"


def _bits(rows: list[Mapping[str, Any]], path: Path) -> tuple[str, str]:
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.add_subplot()
    ceiling = 1e3
    for place, colour in zip(_PLACES, ("#4c78a8", "#f58518", "#54a24b"), strict=True):
        for noticed in (False, True):
            points = [
                (row["bit"], _shown(row[place]["deviation"], ceiling))
                for row in rows
                if row[place]["faults"] and bool(row[place]["noticed"]) is noticed
            ]
            if points:
                axes.scatter(
                    [bit for bit, _ in points],
                    [deviation for _, deviation in points],
                    s=28,
                    marker="o",
                    facecolors=colour if noticed else "none",
                    edgecolors=colour,
                    label=f"{place}, {'noticed' if noticed else 'not noticed'}",
                )
    axes.set_yscale("log")
    axes.axhline(0.1, color="grey", linewidth=0.6, linestyle=":")
    axes.axvline(22.5, color="grey", linewidth=0.6, linestyle=":")
    axes.set_xlabel("flipped bit of float32 (23-30 exponent, 31 sign)", fontsize=9)
    axes.set_ylabel("deviation of the update\n(top: not finite)", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, metadata={"Date": None})
    return path.name, "How far a flipped bit turns an update, by bit, and what was noticed"


def _shown(deviation: float | None, ceiling: float) -> float:
    if deviation is None or not math.isfinite(deviation):
        return ceiling
    return min(max(deviation, 1e-9), ceiling)
