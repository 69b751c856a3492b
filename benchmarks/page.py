"""The tables of `docs/performance.md`, made from the results and put between their marks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import snapshots
from overhead import TARGETS, TOKENS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
SETTINGS = ("clip", "no clip")
COLUMNS = [(setting, tokens) for setting in SETTINGS for tokens in TOKENS]
SMALL = 0.05
"""Whole steps wobble by as much; less is taken from the timed part of the step."""


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return each table that there are results for, by the name of its mark."""
    return {name: make(results) for name, (make, section) in TABLES.items() if section in results}


def write(results: dict[str, Any], path: Path = PAGE) -> None:
    """Put the tables into the page, each between its marks."""
    text = path.read_text(encoding="utf-8")
    for name, table in tables(results).items():
        pattern = rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)"
        text, found = re.subn(pattern, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)
        if found != 1:
            raise ValueError(f"{path.name} has {found} places for the table {name!r}")
    path.write_text(text, encoding="utf-8")


def added(one: dict[str, Any]) -> tuple[dict[str, float], str]:
    """Return what a variant adds to a step, as a share, and a mark if that is from whole steps."""
    part = one["added"]
    if one["in_place"] and abs(part["median"]) < SMALL:
        return part, ""
    ratio = one["ratio"]
    return {key: ratio[key] - 1 for key in ("median", "low", "high")}, "°"


def percent(one: dict[str, Any] | None) -> str:
    """Return a cell: the median and its interval."""
    if one is None:
        return "-"
    share, mark = added(one)
    digits = 2 if abs(share["median"]) < SMALL else 0
    low, high = (f"{100 * share[key]:+.{digits}f}" for key in ("low", "high"))
    return f"{100 * share['median']:+.{digits}f} %{mark} ({low} to {high})"


def _by_column(results: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(result["setting"], result["tokens"]): result for result in results["steps"]}


def _rows(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _overhead(results: dict[str, Any]) -> str:
    columns = _by_column(results)
    names = list(dict.fromkeys(name for result in columns.values() for name in result["variants"]))
    heads = [f"{tokens} tokens, {setting}" for setting, tokens in COLUMNS]
    rows = [[name, *(percent(columns[column]["variants"].get(name)) for column in COLUMNS)] for name in names]
    plain = [f"{columns[column]['plain_ms']:.1f} ms" for column in COLUMNS]
    rounds = [f"{columns[column]['rounds']}" for column in COLUMNS]
    text = _rows(["variant", *heads], [*rows, ["the plain step", *plain], ["rounds", *rounds]])
    remarks = []
    for result in columns.values():
        for name, count in result["incidents"].items():
            remarks.append(f"{name} had {count} incidents ({result['setting']}).")
        for name, why in result.get("missing", {}).items():
            remarks.append(f"{name} could not be installed: {why}.")
    remarks += [f"{name} is not installed." for name in results["machine"]["missing"]]
    machine = results["machine"]
    remarks.append(
        f"{machine['parameters'] / 1e6:.1f} M parameters in {machine['tensors']} tensors, one thread, "
        f"{machine['cpu']} with {machine['cores']} cores, torch {machine['torch']}, {machine['clock']}."
    )
    return text + "\n\n" + " ".join(dict.fromkeys(remarks))


def _targets(results: dict[str, Any]) -> str:
    columns = _by_column(results)
    rows = []
    for (name, setting, tokens), target in TARGETS.items():
        one = columns[setting, tokens]["variants"][name]
        share, _ = added(one)
        met = share["median"] <= target
        verdict = "yes" if met else "not certain" if share["low"] <= target else "no"
        rows.append([name, f"{tokens} tokens, {setting}", f"{target:+.1%}", percent(one), verdict])
    return _rows(["what", "step", "at most", "measured", "met"], rows)


def _within(results: dict[str, Any]) -> str:
    columns = _by_column(results)
    picked = {tokens: columns["clip within bound", tokens] for tokens in TOKENS}
    names = [name for name in picked[TOKENS[0]]["variants"] if "plain" not in name]
    rows = [[name, *(percent(picked[tokens]["variants"].get(name)) for tokens in TOKENS)] for name in names]
    return _rows(["variant", *(f"{tokens} tokens" for tokens in TOKENS)], rows)


def _counts(results: dict[str, Any]) -> str:
    counts = results["counts"]
    names = [name for name in counts["clip"] if "plain" not in name]
    rows = []
    for name in names:
        cells = []
        for setting in SETTINGS:
            one = counts[setting][name]
            cells += [f"{one['launches']:.0f}", f"{one['waits']:.0f}", _bytes(one["bytes"])]
        rows.append([name, *cells])
    heads = [f"{what}, {setting}" for setting in SETTINGS for what in ("launches", "waits", "read")]
    return _rows(["variant", *heads], rows)


def _bytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count:.0f} B"


def _scheduled(results: dict[str, Any]) -> str:
    plain = _by_column(results)["clip", 512]["plain_ms"] if "steps" in results else None
    rows = [
        [
            name,
            f"{one['every']}",
            f"{one['due_ms']:.1f} ms",
            f"{one['per_step_ms']:.3f} ms",
            "-" if plain is None else f"{one['per_step_ms'] / plain:.2%}",
        ]
        for name, one in results["scheduled"].items()
    ]
    return _rows(
        ["what", "every so many steps", "in a step where it is due", "on average", "of a step"], rows
    )


def _snapshots(results: dict[str, Any]) -> str:
    found = results["snapshots"]
    took, share = found["milliseconds"], found["amortised"]
    rows = [
        ["in memory", f"{took['snapshot']:.1f} ms", f"{share[snapshots.IN_MEMORY]:.2%}"],
        [
            "in memory, then on disk by a process beside the training",
            f"{took['stall of a snapshot on disk']:.1f} ms",
            f"{share[snapshots.ON_DISK]:.2%}",
        ],
        [
            "the same by the clock, with what other programs take",
            "",
            f"{share[snapshots.BY_CLOCK]:.2%}",
        ],
        [
            "torch.save, blocking, not synced",
            f"{took['torch.save']:.1f} ms",
            f"{share[snapshots.BY_HAND]:.2%}",
        ],
    ]
    return _rows(
        [
            f"a snapshot of {took['state MB']:.0f} MB",
            "the training waits",
            f"of the training, at one per {snapshots.PERIOD} steps of {took['step']:.0f} ms",
        ],
        rows,
    )


def _growth(results: dict[str, Any]) -> str:
    rows = []
    for name, one in results["growth"].items():
        sizes = " / ".join(f"{size:,}" for size in one["sizes"])
        extra = " / ".join(f"{value:.2f}" for value in one["extra_ms"])
        rows.append([name, sizes, f"{extra} ms", f"{one['power']:.2f}"])
    return _rows(["more", "so many", "a step of the sentinel, less the norm", "power"], rows)


def _ranks(results: dict[str, Any]) -> str:
    found = results["consensus"]
    rows = [[name, f"{ratio:.3f}"] for name, ratio in found["ratios"].items()]
    rows += [[name, f"{value:.3f} ms"] for name, value in found["parts_ms"].items()]
    return _rows([f"{found['ranks']} gloo ranks, DDP", "step over the plain one's, or time"], rows)


def _diagnosis(results: dict[str, Any]) -> str:
    found = results["diagnosis"]
    rows = [
        [
            "GradSentinel",
            f"{found['diagnosis_seconds']:.2f} s",
            f"{found['diagnosis_steps']:.1f} steps",
            found["found"],
        ],
        [
            "a rerun of the step in anomaly mode",
            f"{found['anomaly_seconds']:.2f} s",
            f"{found['anomaly_steps']:.1f} steps",
            found["anomaly_found"],
        ],
    ]
    return _rows([f"a step takes {found['step_seconds']:.2f} s", "time", "of a step", "what it names"], rows)


def _viewing(results: dict[str, Any]) -> str:
    found = results["viewing"]
    rows = [
        [name, f"{one['first_ms']:.0f} ms", f"{one['later_ms']:.1f} ms", f"{one['sent_kb']:.0f} kB"]
        for name, one in found["routes"].items()
    ]
    rows.append(["timeline, 100 more steps each time", "-", f"{found['grown_ms']:.1f} ms", "-"])
    text = _rows(["asked for", "first answer", "later ones", "sent"], rows)
    return f"{text}\n\nIn {found['clock']}, one thread."


def _drawing(results: dict[str, Any]) -> str:
    found = results["drawing"]
    if "missing" in found:
        return f"Not measured: {found['missing']} is not there."
    rows = [
        [name, f"{one['median_ms']:.0f} ms", f"{one['least_ms']:.0f} ms", f"{one['thread_ms']:.0f} ms"]
        for name, one in found["does"].items()
    ]
    text = _rows(["from a click to", "median", "least", "of it the page computes"], rows)
    busy = f"the machine had a load of {found['load']:.1f}, the browser's own included"
    return f"{text}\n\nIn wall clock, {found['browser']} without a GPU, {busy}; the last column in cpu time."


def _adapters(results: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{1e3 * one['step']:.1f} ms",
            f"{1e3 * one['rest']:.2f} ms",
            f"{1e3 * one['added']:+.2f} ms ({1e3 * one['least']:+.2f} to {1e3 * one['most']:+.2f})",
            f"{one['added'] / one['step']:+.1%}",
        ]
        for name, one in results["adapters"].items()
    ]
    return _rows(["loop", "a step", "of it not forward or backward", "the watch adds", "of the step"], rows)


def _megatron(results: dict[str, Any]) -> str:
    rows = [
        [
            f"{layout}, {one['tokens']} tokens, {one['parameters'] / 1e6:.1f} M parameters a rank",
            name,
            "-" if name == "plain" else f"{one['cpu_ratios'][name] - 1:+.1%}",
            "-" if name == "plain" else f"{one['ratios'][name] - 1:+.1%}",
            f"{one['plain_cpu_ms'] * one['cpu_ratios'][name]:.1f} ms",
        ]
        for layout, one in results["megatron"].items()
        for name in one["ratios"]
    ]
    return _rows(["2 ranks", "variant", "own time", "wall clock", "own time of a step"], rows)


TABLES: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "overhead": (_overhead, "steps"),
    "targets": (_targets, "steps"),
    "within": (_within, "steps"),
    "counts": (_counts, "counts"),
    "scheduled": (_scheduled, "scheduled"),
    "snapshots": (_snapshots, "snapshots"),
    "growth": (_growth, "growth"),
    "ranks": (_ranks, "consensus"),
    "megatron": (_megatron, "megatron"),
    "adapters": (_adapters, "adapters"),
    "diagnosis": (_diagnosis, "diagnosis"),
    "viewing": (_viewing, "viewing"),
    "drawing": (_drawing, "drawing"),
}
"""What makes each table, and the section of the results that it is made of."""
