"""A run at a glance: its state, numbers, budgets and snapshots."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from gradsentinel.incident import Incident, Outcome
from gradsentinel.views.files import ViewError
from gradsentinel.views.history import spent
from gradsentinel.views.run_files import RunFiles, clock
from gradsentinel.views.series import number, shown
from gradsentinel.views.words import pick, plural, word

_SNAPSHOT = re.compile(r"(damaged-)?step-(\d+)-rank(\d+)(-\d+)?")
_MOST_SNAPSHOTS = 200
_MOST_HOSTS = 256


def overview(run: RunFiles, lang: str) -> dict[str, Any]:
    """Return the overview; see `Views.run`."""
    history = run.history
    incidents, problems = run.incidents()
    places = run.places()
    told = history.first.get("world_size")
    world_size = told if isinstance(told, int) and not isinstance(told, bool) else max(1, len(run.ranks))
    lost = lost_steps(run, incidents)
    attempted = history.attempted
    hosts = sorted({str(place["host"]) for place in places.values() if "host" in place})
    state = run.state
    return {
        "schema": 1,
        "name": run.name,
        "path": str(run.path),
        "state": state,
        "started": history.starts[0].time if history.starts else "",
        "updated": clock(run.updated),
        "version": str(history.first.get("version", "")),
        "world_size": world_size,
        "ranks_seen": len(run.ranks),
        "hosts": hosts[:_MOST_HOSTS],
        "host_count": len(hosts),
        "steps": history.step,
        "iterations": attempted,
        "starts": len(history.starts),
        "reading": run.share,
        "last": _last(run),
        "numbers": {
            "incidents": len(incidents),
            "by_outcome": _counts(str(incident.outcome) for incident in incidents),
            "by_cause": _counts(cause_of(incident) for incident in incidents),
            "by_severity": _counts(incident.severity.label for incident in incidents),
            "by_kind": _counts(str(incident.kind) for incident in incidents),
            "applied": history.applied,
            "lost_batches": lost,
            "scaler_skips": len(history.scaler_skips),
            "useful_share": max(0.0, 1.0 - lost / attempted) if attempted else None,
        },
        "budgets": budgets(run),
        "snapshots": snapshots(run),
        "problems": [*problems, *_problems(run, lang)],
        "quiet": quiet(run, incidents, problems),
        "headline": headline(run, incidents, lost, lang),
    }


def cause_of(incident: Incident) -> str:
    """Return the cause in one word."""
    return "unknown" if incident.diagnosis is None else incident.diagnosis.cause


def lost_steps(run: RunFiles, incidents: Sequence[Incident]) -> int:
    """Return how many attempted steps came to nothing: dropped, undone by a rollback, or not finished."""
    lost = 0
    for incident in incidents:
        if incident.outcome in {Outcome.SKIPPED, Outcome.ABORTED}:
            lost += 1
        elif incident.outcome is Outcome.ROLLED_BACK:
            recovery = run.history.incidents.get(incident.id, {}).get("recovery", {})
            back = recovery.get("goes_on_from")
            lost += max(1, incident.step - back + 1) if isinstance(back, int) else 1
    return lost


def quiet(run: RunFiles, incidents: Sequence[Incident], problems: Sequence[str]) -> str:
    """Return what may be said where no incident is shown: `sound`, `dropped` or `unread`; "" if some are."""
    history = run.history
    if incidents:
        return ""
    damaged = history.lines.damaged or history.lines.too_new or run.share < 1.0
    if problems or run.unread or damaged or not run.ranks:
        return "unread"
    made = history.applied
    fewer = made is not None and len(history.starts) == 1 and made < history.attempted
    return "dropped" if fewer or history.dropped or len(history.scaler_skips) else "sound"


def headline(run: RunFiles, incidents: Sequence[Incident], lost: int, lang: str) -> str:
    """Return the run in one sentence."""
    state = run.state
    error = run.history.starts[-1].error if run.history.starts else None
    how = word("state", state, lang)
    attempted = run.history.attempted
    counts = Counter(cause_of(incident) for incident in incidents)
    causes = pick(lang, ", ", "、").join(
        f"{word('cause', cause, lang)} {count}"
        for cause, count in counts.most_common(3)
        if cause != "unknown"
    )
    english = f"The run {how}"
    chinese = f"训练{how}"
    if error:
        english, chinese = f"{english}: {error}", f"{chinese}：{error}"
    if state == "empty":
        return pick(lang, f"{english}.", f"{chinese}。")
    if attempted:
        english += f"; {plural(attempted, 'step')} attempted"
        chinese += f"；已尝试 {attempted:,} 步"
    if not incidents:
        if run.unread:
            unread = f"{plural(run.unread, 'incident')} that cannot be read"
            return pick(lang, f"{english}, {unread}.", f"{chinese}，有 {run.unread:,} 起事故无法读取。")
        if quiet(run, incidents, run.incidents()[1]) == "unread":
            return pick(lang, f"{english}, no incident that can be read.", f"{chinese}，没有可读取的事故。")
        return pick(lang, f"{english}, no incident.", f"{chinese}，没有事故。")
    english += f", {plural(len(incidents), 'incident')}{f' ({causes})' if causes else ''}"
    chinese += f"，{len(incidents):,} 起事故{f'（{causes}）' if causes else ''}"
    if run.unread:
        english += f" and {run.unread:,} that cannot be read"
        chinese += f"（另有 {run.unread:,} 起无法读取）"
    english += f", {plural(lost, 'step')} lost." if lost else ", no step lost."
    chinese += f"，损失 {lost:,} 步。" if lost else "，没有损失任何一步。"
    return pick(lang, english, chinese)


def budgets(run: RunFiles) -> list[dict[str, Any]]:
    """Return what may still be spent; empty where the event log does not tell."""
    history = run.history
    found = []
    iteration = history.last.get("iteration", history.attempted)
    now = max(iteration if isinstance(iteration, int) else 0, history.attempted)
    for entry in [*history.budgets, *_over_restarts(run)]:
        limit, window = entry.get("limit"), entry.get("window")
        if not (isinstance(limit, int) and isinstance(entry.get("name"), str)):
            continue
        at = entry.get("at", now)
        used = spent(entry, at if isinstance(at, int) else now)
        found.append(
            {
                "name": entry["name"],
                "used": used,
                "limit": limit,
                "window": window,
                "left": max(0, limit - used),
            }
        )
    return found


def _over_restarts(run: RunFiles) -> list[dict[str, Any]]:
    """Return the budgets that `Escalation` keeps over all restarts."""
    try:
        account = run.files.json("escalation.json")
    except ViewError:
        return []
    limits = account.get("limits") if isinstance(account, dict) else None
    if not isinstance(limits, dict):
        return []
    names = {"skip": "Escalation: dropped steps", "rollback": "Escalation: rollbacks"}
    return [
        {
            "name": name,
            "limit": limits.get(rung),
            "window": limits.get("window"),
            "spent": account.get(rung),
            "at": account.get("attempted"),
        }
        for rung, name in names.items()
    ]


def snapshots(run: RunFiles) -> list[dict[str, Any]]:
    """Return the snapshots that are known of, in memory and on disk, the newest first."""
    found: list[dict[str, Any]] = []
    told = run.history.snapshots
    gone = run.state not in {"running", "unknown"}
    for state in ("good", "probation"):
        entries = told.get(state)
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                about = {"state": state, "where": "memory", "time": told.get("time", ""), "ranks": 1}
                about["gone"] = gone
                about |= {key: entry.get(key) for key in ("step", "iteration", "bytes")}
                found.append(about)
    return sorted([*found, *_on_disk(run)], key=lambda one: (one["step"], one["where"]), reverse=True)


def _on_disk(run: RunFiles) -> list[dict[str, Any]]:
    by_step: dict[tuple[int, bool], dict[str, Any]] = {}
    names = [name for name in run.files.entries("snapshots") if _SNAPSHOT.fullmatch(name)]
    for name in names[-_MOST_SNAPSHOTS * 64 :]:
        match = _SNAPSHOT.fullmatch(name)
        assert match is not None
        step, damaged = int(match[2]), bool(match[1])
        entry = by_step.setdefault(
            (step, damaged),
            {
                "step": step,
                "iteration": None,
                "state": "damaged" if damaged else "good",
                "where": "disk",
                "bytes": 0,
                "time": "",
                "ranks": 0,
                "gone": False,
            },
        )
        entry["ranks"] += 1
        if entry["ranks"] > 64:  # of a large job the first ones tell how large they are
            continue
        manifest = run.files.stat("snapshots", name, "manifest.json")
        if manifest is None:
            entry["state"] = "damaged"
            continue
        entry["time"] = max(entry["time"], clock(manifest.st_mtime))
        entry["bytes"] += sum(size for _, size in run.files.sizes("snapshots", name, most=100))
    for entry in by_step.values():
        if entry["ranks"] > 64:
            entry["bytes"] = entry["bytes"] * entry["ranks"] // 64
    return list(by_step.values())[-_MOST_SNAPSHOTS:]


def _last(run: RunFiles) -> dict[str, Any]:
    last = run.history.last
    rates = last.get("learning_rates")
    values = {tag: number(last.get(tag)) for tag in ("loss", "grad_norm")}
    if not last:
        values = {tag: one.last() for tag in values if (one := run.series.get(tag)) is not None}
    rate = number(rates[0]) if isinstance(rates, list) and rates else None
    return {
        "iteration": last.get("x", run.history.x if run.history.x >= 0 else None),
        "loss": shown(values.get("loss")),
        "grad_norm": shown(values.get("grad_norm")),
        "learning_rate": shown(rate),
    }


def _problems(run: RunFiles, lang: str) -> list[str]:
    lines, found = run.history.lines, []
    if lines.damaged:
        found.append(
            pick(
                lang,
                f"{plural(lines.damaged, 'line')} of the event log cannot be read",
                f"事件日志中有 {lines.damaged:,} 行无法读取",
            )
        )
    if lines.too_new:
        found.append(
            pick(
                lang,
                f"a newer GradSentinel wrote {plural(lines.too_new, 'line')} of the event log; upgrade it",
                f"事件日志中有 {lines.too_new:,} 行由更新版本的 GradSentinel 写入，请升级",
            )
        )
    if not run.ranks:
        found.append(pick(lang, "there is no event log", "没有事件日志"))
    return found


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())
