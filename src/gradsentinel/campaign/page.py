"""results.md: the numbers of results.json as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradsentinel.campaign.how import HOW
from gradsentinel.campaign.report import LABELS


def page(results: Mapping[str, Any], pictures: Sequence[tuple[str, str]]) -> str:
    """Return the page; pictures are paths relative to it, each with what it shows."""
    parts = [HOW, _about(results)]
    if results["goals"]:
        parts.append(_goals(results["goals"]))
    parts += [_policies(name, table) for name, table in results["tables"].items()]
    parts += [f"![{what}]({path})\n" for path, what in pictures]
    parts += [_kinds(results["kinds"]), _confusion(results["tables"])]
    if results["bits"]:
        parts.append(_bits(results["bits"]))
    return "\n".join(part for part in parts if part)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def _about(results: Mapping[str, Any]) -> str:
    machine, versions = results["machine"], results["versions"]
    text = (
        "## This run\n\n"
        f"`{results['command']}`: the {results['form']} form, seed {results['seed']}, {results['faults']} "
        f"faults on the schedule and {results['faults_of_the_sweep']} in the sweep over bits, in "
        f"{results['seconds'] / 60:.0f} minutes with {results['jobs']} processes on {machine['cpu']} "
        f"({machine['cores']} cores, {machine['system']}), "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f". Digest of all decisions: `{results['decisions']}`; a second run with the same seed and "
        "versions on the same kind of machine gives the same.\n"
    )
    for workload, why in results["left_out"].items():
        text += f"\n**Left out: {workload}.** {why}\n"
    for one in results["failed"]:
        text += f"\n**Failed: {one['trial']}, {LABELS[one['policy']]}.** {one['why']}\n"
    return text


def _goals(goals: Sequence[Mapping[str, Any]]) -> str:
    met = {True: "met", False: "**not met**", None: "not measured"}
    rows = [(one["goal"], one["wanted"], _or(one["measured"]), met[one["met"]], one["note"]) for one in goals]
    return "## Goals\n\n" + table(("goal", "wanted", "measured", "verdict", "note"), rows)


_TITLES = {
    "loops": "Plain loops: every policy",
    "lightning": "Lightning",
    "megatron": "Megatron-Core, four ranks",
    "bits": "The sweep over bits",
}


def _policies(name: str, of: Mapping[str, Mapping[str, Any]]) -> str:
    def row(label: str, show: Any) -> list[str]:
        return [label, *(str(show(t)) for t in of.values())]

    rows = [
        row("runs, steps, faults", lambda t: f"{t['runs']}, {t['steps']}, {t['faults']}"),
        row("interruptions", lambda t: t["interruptions"]),
        row("spoiled updates in the final weights", lambda t: t["spoiled"]),
        row("... of them by non-finite faults", lambda t: f"{t['spoiled_by_nonfinite']} of {t['nonfinite']}"),
        row("... by strong finite faults", lambda t: f"{t['spoiled_by_finite']} of {t['finite']}"),
        row("spoiled updates taken back", lambda t: t["landed_and_undone"]),
        row("useful steps", lambda t: _percent(t["useful"])),
        row("batches lost", lambda t: t["lost"]),
        row("final loss against no faults, median", lambda t: _change(t["loss_ratio"])),
        row("... worst", lambda t: _change(t["loss_worst"])),
        row("runs that ended in NaN", lambda t: t["ruined"]),
        row("noticed: non-finite faults", lambda t: f"{t['noticed']} of {t['nonfinite']}"),
        row("... strong finite ones", lambda t: f"{t['noticed_finite']} of {t['finite']}"),
        row("... faint ones", lambda t: f"{t['noticed_faint']} of {t['faint']}"),
        row("false alarms", lambda t: t["false_alarms"]),
        row(
            "steps until it was noticed, median, worst", lambda t: _pair(t["delay_median"], t["delay_worst"])
        ),
        row("transient faults gone bit for bit", lambda t: f"{t['transient_exact']} of {t['transient']}"),
        *(
            row(f"right {what}", lambda t, key=f"{what}_right": _rate(t[key]))
            for what in ("rank", "sample", "parameter", "module", "op")
        ),
        row("right cause, of all noticed", lambda t: _rate(t["cause_right_of_all_noticed"])),
        row(
            "seconds to a diagnosis, median, 95 %", lambda t: _pair(t["diagnosis_median"], t["diagnosis_p95"])
        ),
        row("overhead of a healthy step", lambda t: _percent(t["overhead"], signed=True)),
    ]
    empty = {"-", "0 of 0", "-, -"}
    rows = [one for one in rows if not set(one[1:]) <= empty]
    return f"## {_TITLES.get(name, name)}\n\n" + table(("", *(LABELS[policy] for policy in of)), rows)


def _kinds(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = [
        (
            one["kind"],
            one["expected"],
            one["faults"],
            _counts(one["strengths"]),
            one["noticed"],
            one["spoiled"],
            _counts(one["outcomes"]),
            _counts(one["causes"]),
        )
        for one in rows
    ]
    head = ("fault", "cause", "faults", "without guard", "noticed", "spoiled", "what was done", "found")
    return "## GradSentinel, by kind of fault\n\n" + table(head, shown)


def _confusion(tables: Mapping[str, Mapping[str, Any]]) -> str:
    found: dict[str, dict[str, int]] = {}
    for name, of in tables.items():
        if name == "bits" or "gradsentinel" not in of:
            continue
        for cause, row in of["gradsentinel"]["confusion"].items():
            mine = found.setdefault(cause, {})
            for other, count in row.items():
                mine[other] = mine.get(other, 0) + count
    columns = sorted({other for row in found.values() for other in row})
    if not columns:
        return ""
    rows = [(cause, *(row.get(column, 0) for column in columns)) for cause, row in sorted(found.items())]
    return (
        "## Causes: what it was, and what the diagnosis said\n\n"
        "Rows: what it was. Faults that were noticed.\n\n" + table(("", *columns), rows)
    )


def _bits(rows: Sequence[Mapping[str, Any]]) -> str:
    def cell(entry: Mapping[str, Any]) -> str:
        if not entry["faults"]:
            return "-"
        effect = "non-finite" if entry["nonfinite"] else _size(entry["deviation"])
        return f"{effect}; {_counts(entry['outcomes'])}"

    shown = [
        (row["bit"], *(cell(row[target]) for target in ("activation", "parameter", "gradient")))
        for row in rows
    ]
    return (
        "## Flipped bits of float32, one by one\n\n"
        "Bits 0-22 are the mantissa, 23-30 the exponent, 31 the sign. Each cell: how far the flip turns an "
        "unguarded update, as a share of its length, and what GradSentinel did about it. What is not noticed "
        "goes into the weights: a flip that changes little is invisible to any check of finite numbers.\n\n"
        + table(("bit", "in an activation", "in a weight", "in a gradient"), shown)
    )


def _size(value: float | None) -> str:
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "non-finite"
    return f"{value:.0%}".replace("%", " %") if value >= 0.01 else f"{value:.0e}" if value else "0"


def _or(value: object) -> object:
    return "-" if value is None else value


def _percent(share: float | None, *, signed: bool = False) -> str:
    return "-" if share is None else f"{share:{'+' if signed else ''}.1%}".replace("%", " %")


def _change(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio - 1:+.2%}".replace("%", " %") if math.isfinite(ratio) else "NaN"


def _pair(first: float | None, second: float | None) -> str:
    shown = ("-" if one is None else f"{one:.3g}" for one in (first, second))
    return ", ".join(shown)


def _rate(rate: Mapping[str, int] | None) -> str:
    return "-" if rate is None else f"{rate['right']} of {rate['of']}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()) or "-"
