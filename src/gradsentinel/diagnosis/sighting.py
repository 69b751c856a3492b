"""What armed hooks saw of a bad step: between which calls of modules the first bad value came up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradsentinel.decision import Kind
from gradsentinel.diagnosis.source import Line
from gradsentinel.diagnosis.trace import is_own_function
from gradsentinel.incident import Incident, fold

_MOST_NAMED = 6
_CARRIERS = (
    "TBackward",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Transpose",
    "Permute",
    "Expand",
    "Clone",
    "Alias",
)
"""Autograd nodes that hand values on as they are."""


Usual = Mapping[tuple[str, bool, str], Tensor]
"""Whether a place was finite in every healthy step: by module, whether entering, and path."""


@dataclass(slots=True)
class Look:
    """At the tensors that enter or leave a module in one call; flags are 0-dim, read only on an incident."""

    name: str
    entering: bool
    around: str | None
    """The watched module that called it; None if it is the outermost."""
    line: Line | None
    """Where it is called."""
    finite: dict[str, Tensor] = field(default_factory=dict)
    gradient: dict[str, Tensor] = field(default_factory=dict)
    """Whether the gradients of these tensors are finite, by path."""
    sources: set[int] = field(default_factory=set)
    """The looks whose tensors these were computed from, with no other look in between."""
    nodes: list[Any] = field(default_factory=list)
    """Autograd nodes in between, until they are named."""
    names: tuple[str, ...] = ()
    custom: frozenset[str] = frozenset()
    followed: bool = True
    """False if there were too many nodes in between."""

    def name_nodes(self) -> None:
        """Keep the names of the nodes, and let go of the graph."""
        names = dict.fromkeys(node.name() for node in self.nodes)
        self.names = tuple(name for name in names if not name.startswith(_CARRIERS))
        self.custom = frozenset(node.name() for node in self.nodes if is_own_function(node))
        self.nodes.clear()

    def __str__(self) -> str:
        return self.name or "the model"


@dataclass(slots=True)
class Watched:
    """All looks of one step, in order."""

    number: int
    looks: list[Look] = field(default_factory=list)
    made_by: dict[Any, int] = field(default_factory=dict)
    """By autograd node, the latest look at what it made."""
    handles: list[Any] = field(default_factory=list)
    backward_line: Line | None = None
    """Where the backward pass was started."""
    _stack: list[Look] = field(default_factory=list)

    def enter(self, name: str, line: Line | None) -> Look:
        """Begin a call."""
        look = Look(name, True, self._stack[-1].name if self._stack else None, line)
        self._stack.append(look)
        return look

    def leave(self, name: str) -> Look:
        """End a call; those that were left by an exception end, too."""
        while len(self._stack) > 1 and self._stack[-1].name != name:
            self._stack.pop()
        entered = self._stack.pop() if self._stack else None
        around, line = (None, None) if entered is None else (entered.around, entered.line)
        return Look(name, False, around, line)

    def let_go(self) -> None:
        """Take the hooks off the step's tensors, and keep nothing of its graph."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.made_by.clear()
        for look in self.looks:
            look.nodes.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Where the first bad value of a step came up, in words."""

    phase: str
    module: str | None
    """The module whose own code, or a part of it, it was; None outside of all modules."""
    evidence: tuple[str, ...]
    line: str | None = None
    whole: bool = False
    """True if it was anywhere in that module."""
    node: str | None = None
    custom: str | None = None
    """The user's own autograd Function, if nothing else was there."""
    inside: str | None = None
    """The module in which it is worth to watch more."""


def sight(step: Watched, usual: Usual, incident: Incident) -> Sighting | None:
    """Return where the first bad value of the step came up, None if there is no telling; waits."""
    looks = step.looks
    forward = [_bad(look, look.finite, usual) for look in looks]
    if any(forward):
        return _made(step, forward.index(True))
    loss = incident.loss
    if incident.kind is Kind.NONFINITE_LOSS or (loss is not None and not math.isfinite(loss)):
        return _in_loss(step, "forward", f"what left {looks[-1]} was finite, the loss is not")
    backward = [not _all(look.gradient.values()) for look in looks]
    if any(backward):
        return _came_back(step, backward)
    return _own_gradient(step, incident)


def _made(step: Watched, number: int) -> Sighting:
    """In the forward pass, before the look of that number."""
    looks, look = step.looks, step.looks[number]
    before = looks[number - 1] if number else None
    if before is None:
        fact = f"what {look} was given was not finite when it was called"
        where = f", {look.line}: {look.line.text}" if look.line is not None else ""
        return Sighting(phase="forward", module=None, evidence=(fact + where,), line=_text(look.line))
    second = " and gave" if _whole(before, look) else f", {_left(look)}"
    fact = f"{_left(before)} finite values{second} non-finite ones"
    return _between(before, look, "forward", fact)


def _came_back(step: Watched, backward: Sequence[bool]) -> Sighting:
    """In the backward pass, after the last look whose gradient is bad."""
    looks = step.looks
    number = max(index for index, bad in enumerate(backward) if bad)
    look = looks[number]
    users = [other for other in looks[number + 1 :] if number in other.sources and other.gradient]
    if not users and not all(other.followed for other in looks[number + 1 :]):
        users = [other for other in looks[number + 1 :] if other.gradient][:1]
    if not users:
        fact = f"the gradient that arrives at what {_left(look)} is not finite already"
        return _in_loss(step, "backward", fact, look)
    fact = f"the gradient of what {_left(users[0])} was finite, that of what {_left(look)} was not"
    found = _between(look, users[0], "backward", fact)
    if len(users) == 1:
        return found
    others = fold([f"before {other}" if other.entering else f"in {other}" for other in users[1:]])
    more = f"the same tensor is used {others}, too: it may have come up there"
    return replace(found, evidence=(*found.evidence, more), whole=False, node=None, custom=None)


def _own_gradient(step: Watched, incident: Incident) -> Sighting | None:
    """Every gradient that was seen is finite: it came up in a parameter's own, or after the backward pass."""
    if not incident.tensors:
        return None
    parameter = incident.tensors[0].name
    owner = parameter.rpartition(".")[0]
    if not any(look.gradient for look in step.looks if look.name == owner and not look.entering):
        return None
    whose = owner or "the model"
    fact = (
        f"all gradients that passed {whose} were finite, that of {parameter} is not: it came up in {whose}, "
        "for the parameter alone, or a hook or code after the backward pass made it"
    )
    return Sighting(phase="backward", module=owner, evidence=(fact,), whole=True, inside=owner)


def _between(before: Look, look: Look, phase: str, fact: str) -> Sighting:
    same = _whole(before, look)
    around = look.name if not look.entering else look.around
    if same:
        place, line = "", None
    elif look.entering and not before.entering:
        place, line = f"between {before} and {look}", look.line
    elif look.entering:
        place, line = f"before {look} was called", look.line
    else:
        place, line = f"after {before}", before.line
    if not same:
        place += (
            f", in the forward of {around or 'the model'}"
            if around is not None
            else ", outside of all modules"
        )
    lines = _lines(None if before.entering else before.line, line)
    how = f"it came up in {look}, or in what it calls" if same else f"it came up {place}{lines}"
    evidence = [f"{fact}: {how}", *_nodes(look)]
    only = look.names[0] if look.followed and len(look.names) == 1 else None
    return Sighting(
        phase=phase,
        module=around,
        evidence=tuple(evidence),
        line=_text(line),
        whole=same,
        node=only,
        custom=only if only in look.custom else None,
        inside=around,
    )


def _whole(before: Look, look: Look) -> bool:
    """True for the two ends of one call, with no other look in between."""
    return before.entering and not look.entering and before.name == look.name


def _in_loss(step: Watched, phase: str, fact: str, look: Look | None = None) -> Sighting:
    last = look or step.looks[-1]
    if last.around is not None:  # the module around it returned nothing that could be looked at
        return Sighting(
            phase=phase, module=last.around, evidence=(f"{fact}: after {last}, in {last.around}",)
        )
    lines = _lines(last.line, step.backward_line)
    return Sighting(
        phase=phase,
        module=None,
        evidence=(f"{fact}: it came up after {last}, outside of all modules, in the loss{lines}",),
        line=_text(last.line),
    )


# -- words ---------------------------------------------------------------------------------------------


def _left(look: Look) -> str:
    return f"{look} was given" if look.entering else f"{look} gave"


def _nodes(look: Look) -> list[str]:
    if not look.followed or not look.names:
        return []
    shown = fold(list(reversed(look.names)), _MOST_NAMED)
    said = [f"autograd nodes there: {shown}"]
    return [*said, f"{fold(sorted(look.custom))} is no operator of torch's own"] if look.custom else said


def _lines(first: Line | None, last: Line | None) -> str:
    known = [line for line in dict.fromkeys((first, last)) if line is not None]
    if not known:
        return ""
    if len(known) == 2 and known[0].path == known[1].path and known[0].number < known[1].number:
        return f" ({known[0]} to line {known[1].number})"
    return f" ({known[-1]}: {known[-1].text})"


def _text(line: Line | None) -> str | None:
    return None if line is None else str(line)


def _bad(look: Look, flags: Mapping[str, Tensor], usual: Usual) -> bool:
    for path, flag in flags.items():
        known = usual.get((look.name, look.entering, path))
        if not bool(flag) and (known is None or bool(known)):
            return True
    return False


def _all(flags: Any) -> bool:
    kept = [flag.cpu() for flag in flags]
    return not kept or bool(torch.stack(kept).all())
