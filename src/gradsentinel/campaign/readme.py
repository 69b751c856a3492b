"""The results in short, between two marks in the READMEs: written from the results, in both languages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
_POLICIES = ("gradsentinel", "skip", "checkpoint", "nothing")


@dataclass(frozen=True, kw_only=True)
class Words:
    """What stands around the numbers, in one language."""

    head: str
    """Fields: faults, steps, runs, cpu, form, seed."""
    policies: tuple[str, ...]
    rows: tuple[str, ...]
    met: str
    """Fields: met, of."""
    missed: str
    """Field: missed."""
    wanted: str
    goals: Mapping[str, str]
    """Names of the goals, by how they begin in English; empty: as they are."""
    comma: str
    more: str


ENGLISH = Words(
    head=(
        "`make campaign` injected {faults} faults into {runs} plain training loops of {steps} steps in all "
        "(60 % bad data, 30 % precision, 10 % hardware and operators; {form} form, seed {seed}), the "
        "same ones under each policy. On CPUs ({cpu}); nothing was measured on an NPU or on CUDA."
    ),
    policies=("GradSentinel", "skip only", "checkpoint and restart", "nothing"),
    rows=(
        "interruptions",
        "spoiled updates in the final weights",
        "... by non-finite faults",
        "... by strong finite faults",
        "useful steps",
        "final loss against no faults, median",
        "false alarms",
        "right cause, of all noticed",
    ),
    met="{met} of {of} goals were met.",
    missed=" **Not met**: {missed}.",
    wanted="wanted:",
    goals={},
    comma="; ",
    more="How it was counted, Lightning, Megatron-Core, and every bit: [docs/results.md](docs/results.md).",
)
CHINESE = Words(
    head=(
        "`make campaign` 向 {runs} 个普通训练循环（共 {steps} 步）注入了 {faults} 个故障"
        "（60 % 坏数据、30 % 精度、10 % 硬件与算子；{form} 形式，种子 {seed}），每种策略面对完全相同的故障。"
        "在 CPU 上测得（{cpu}）；没有在 NPU 或 CUDA 上测过。"
    ),
    policies=("GradSentinel", "只丢弃坏步", "检查点重启", "不处理"),
    rows=(
        "训练中断次数",
        "最终权重中被破坏的更新",
        "…… 由非有限故障造成",
        "…… 由强的有限故障造成",
        "有效步",
        "最终 loss 与无故障相比（中位数）",
        "误报",
        "原因判断正确（占全部已发现的故障）",
    ),
    met="{of} 项目标中达到 {met} 项。",
    missed="**未达到**：{missed}。",
    wanted="目标",
    goals={
        "updates spoiled by non-finite": "非有限故障破坏的更新",
        "updates spoiled by finite": "有限故障破坏的更新",
        "fewer interruptions": "比检查点重启少的中断",
        "useful steps": "有效步",
        "transient faults": "瞬时故障逐比特无痕",
        "right rank": "rank 判断正确",
        "right parameter": "参数判断正确",
        "right operator": "算子判断正确",
        "right cause": "原因判断正确",
        "median time": "诊断耗时中位数",
        "final loss": "最终 loss",
        "hangs": "挂死",
    },
    comma="；",
    more="如何计数、Lightning 与 Megatron-Core、逐比特：[docs/results.md](docs/results.md)（英文）。",
)
LANGUAGES = {"README.md": ENGLISH, "README.zh-CN.md": CHINESE}


def fill(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the results in short into the READMEs of a folder that have a place for them; return which."""
    loops = results["tables"].get("loops", {})
    if "gradsentinel" not in loops:
        return []
    filled = []
    for name, words in LANGUAGES.items():
        page = folder / name
        if not page.is_file():
            continue
        before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            continue
        page.write_text(f"{before}{BEGIN}\n{block(results, words)}\n{END}{after}", encoding="utf-8")
        filled.append(page)
    return filled


def block(results: Mapping[str, Any], words: Words) -> str:
    """Return what stands between the marks."""
    loops = results["tables"]["loops"]
    ours = loops["gradsentinel"]
    head = words.head.format(
        faults=ours["faults"] + ours["void"],
        steps=ours["steps"],
        runs=ours["runs"],
        cpu=results["machine"]["cpu"],
        form=results["form"],
        seed=results["seed"],
    )
    columns = [
        (loops[policy], label)
        for policy, label in zip(_POLICIES, words.policies, strict=True)
        if policy in loops
    ]
    lines = ["|  | " + " | ".join(label for _, label in columns) + " |"]
    lines.append("| --- |" + " --- |" * len(columns))
    for label, cell in zip(words.rows, _CELLS, strict=True):
        lines.append(f"| {label} | " + " | ".join(cell(table) for table, _ in columns) + " |")
    return "\n".join([head, "", *lines, "", _goals(results, words) + words.more])


def _goals(results: Mapping[str, Any], words: Words) -> str:
    """Say how many goals were met, and name every one that was not, with its numbers."""
    known = [goal for goal in results["goals"] or () if goal["met"] is not None]
    if not known:
        return ""
    missed = [goal for goal in known if not goal["met"]]
    said = words.met.format(met=len(known) - len(missed), of=len(known))
    if missed:
        named = words.comma.join(
            f"{_named(goal['goal'], words)}: {goal['measured']} ({words.wanted} {goal['wanted']})"
            for goal in missed
        )
        said += words.missed.format(missed=named)
    return said + "\n\n"


def _named(goal: str, words: Words) -> str:
    return next((said for begin, said in words.goals.items() if goal.startswith(begin)), goal)


def _percent(value: float | None, *, signed: bool = False) -> str:
    return "-" if value is None else f"{value:{'+' if signed else ''}.1%}".replace("%", " %")


def _loss(table: Mapping[str, Any]) -> str:
    ratio = table["loss_ratio"]
    said = "-" if ratio is None else f"{ratio - 1:+.2%}".replace("%", " %")
    return said if not table["ruined"] else f"{said}, {table['ruined']} x NaN"


def _cause(table: Mapping[str, Any]) -> str:
    rate = table["cause_right_of_all_noticed"]
    return "-" if rate is None else f"{rate['right']} / {rate['of']}"


_CELLS: tuple[Callable[[Mapping[str, Any]], str], ...] = (
    lambda t: str(t["interruptions"]),
    lambda t: str(t["spoiled"]),
    lambda t: f"{t['spoiled_by_nonfinite']} / {t['nonfinite']}",
    lambda t: f"{t['spoiled_by_finite']} / {t['finite']}",
    lambda t: _percent(t["useful"]),
    _loss,
    lambda t: str(t["false_alarms"]),
    _cause,
)
