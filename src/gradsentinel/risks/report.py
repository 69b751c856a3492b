"""What a dry step showed: risks, each with its place and its remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from gradsentinel.incident import fold, jsonable
from gradsentinel.wording import duration, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """One thing that can make a training fail."""

    kind: str
    """Short and stable, for programs: nonfinite_gradient, sqrt_at_zero, no_gradient, ..."""
    certain: bool
    """True if it has happened in the dry step; False if it can happen in a later one."""
    message: str
    """One sentence: what, and how far from failing."""
    remedy: tuple[str, ...]
    module: str | None = None
    """Full name of the module it happens in; '' is the model itself or code outside of any module."""
    op: str | None = None
    source: str | None = None
    """File and line of the user's code: model.py:42."""
    code: str = ""
    """That line."""
    evidence: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Parameters, buffers or modules it is about, where they are several."""

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "kind": self.kind,
            "certain": self.certain,
            "message": self.message,
            "remedy": list(self.remedy),
            "module": self.module,
            "op": self.op,
            "source": self.source,
            "code": self.code,
            "evidence": list(self.evidence),
            "names": list(self.names),
        }

    @property
    def where(self) -> str:
        """Module and source line in a few words; empty if neither is known."""
        module = fold(self.names) if len(self.names) > 1 else self.module
        return ", ".join(part for part in (module, self.source) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a dry step; print it, or ask `ok`."""

    risks: tuple[Risk, ...]
    """Those that have happened first."""
    loss: float | None = None
    """Of the dry step; None if it did not get so far."""
    parameters: int = 0
    """Parameter tensors that can be trained."""
    operators: int = 0
    """Operators that were looked at, forward and backward."""
    unjudged: int = 0
    """Operators on tensors of a kind whose values cannot be judged."""
    seconds: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        """True if nothing was found."""
        return not self.risks

    def __bool__(self) -> bool:
        return self.ok

    def as_dict(self) -> dict[str, Any]:
        """JSON form; numbers that are not finite are strings."""
        return {
            "ok": self.ok,
            "risks": [jsonable(risk.as_dict()) for risk in self.risks],
            "loss": jsonable(self.loss),
            "parameters": self.parameters,
            "operators": self.operators,
            "unjudged": self.unjudged,
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        lines = [self._headline()]
        for number, risk in enumerate(self.risks, start=1):
            lines.append(f"{number}. {_word(risk)}: {printable(risk.message)}")
            lines += [f"     {label}: {printable(text)}" for label, text in _details(risk)]
        return "\n".join(lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self._headline(), "bold green" if self.ok else "bold")
        for risk in self.risks:
            yield Text()
            style = "bold red" if risk.certain else "bold yellow"
            yield Text.assemble((_word(risk), style), "  ", printable(risk.message))
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(style="dim", no_wrap=True)
            table.add_column(overflow="fold")
            for label, text in _details(risk):
                table.add_row(f"  {label}", Text(printable(text)))
            yield table

    def _headline(self) -> str:
        seen = f"{self.operators} operators, {self.parameters} parameters, {duration(self.seconds)}"
        if self.ok:
            return f"preflight: nothing found ({seen})"
        happened = sum(risk.certain for risk in self.risks)
        possible = len(self.risks) - happened
        parts = [f"{happened} fault(s)"] * bool(happened) + [f"{possible} risk(s)"] * bool(possible)
        return f"preflight: {' and '.join(parts)} ({seen})"


def joined(risks: Iterable[Risk]) -> tuple[Risk, ...]:
    """Return the risks without repetitions: the same one in every layer is one, with all its places."""
    groups: dict[tuple[str, str | None, str | None, str], list[Risk]] = {}
    for risk in risks:
        place = risk.source if risk.source is not None else risk.module
        groups.setdefault((risk.kind, risk.op, place, "" if place else risk.message), []).append(risk)
    found = [_one(group) for group in groups.values()]
    return tuple(sorted(found, key=lambda risk: not risk.certain))


def _one(group: Sequence[Risk]) -> Risk:
    first = next((risk for risk in group if risk.certain), group[0])
    modules = dict.fromkeys(risk.module for risk in group if risk.module)
    if len(modules) < 2 or first.names:
        return first
    return Risk(
        kind=first.kind,
        certain=first.certain,
        message=first.message,
        remedy=first.remedy,
        module=first.module,
        op=first.op,
        source=first.source,
        code=first.code,
        evidence=first.evidence,
        names=tuple(modules),
    )


def _word(risk: Risk) -> str:
    return "fault" if risk.certain else "risk"


def _details(risk: Risk) -> Iterator[tuple[str, str]]:
    if risk.where:
        yield "where", f"{risk.where}: {risk.code}" if risk.code else risk.where
    if risk.op:
        yield "what", risk.op
    for fact in risk.evidence:
        yield "seen", fact
    for remedy in risk.remedy:
        yield "do", remedy
