"""What made an optimizer turn finite gradients into a bad state: a setting, an operator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsentinel.diagnosis.flipped import flipped_exponent, flipped_sign
from gradsentinel.diagnosis.memory import judge
from gradsentinel.diagnosis.rehearsal import Rehearsal, rehearse
from gradsentinel.diagnosis.remedy import for_device
from gradsentinel.evidence import Diagnosis, Evidence
from gradsentinel.measures.inspection import local, readable
from gradsentinel.run import Run

_SETTINGS = ("lr", "weight_decay", "momentum", "dampening")
EPS_REMEDY = "find what sets eps: a scheduler, a hook, a loaded optimizer state"
SQUARES = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")
"""What the optimizers of torch take the root of and add eps to; the first that there is counts."""
_REHEARSED = 4
"""Bad parameters whose update is run again, until one shows it."""

_Member: TypeAlias = tuple[str, Tensor, Mapping[str, Any], Optimizer]


def explain_update(evidence: Evidence, run: Run) -> Evidence:
    """Return the evidence of a bad state, completed if the optimizer's own arithmetic made it."""
    known = evidence.diagnosis
    if known is not None and known.phase in ("setup", "forward"):
        return evidence  # no optimizer has run yet, or a buffer is bad, which none writes to
    bad = {name for entry in evidence.tensors for name in (entry.name, entry.name.rpartition(":")[0])}
    members = [member for member in _members(run) if member[0] in bad]
    settled = _flipped_in(evidence, run, members) or _by_a_setting(evidence, run, members)
    if settled is not None:
        return settled
    rehearsed = _rehearse(members, run)
    if rehearsed is None:
        return _without_eps(evidence, members) or _by_nobody_known(evidence, members)
    name, rehearsal = rehearsed
    owner = next(((p, o) for n, p, _, o in members if n == name), None)
    negative = None if owner is None else _negative_square(*owner)
    if negative is not None and owner is not None:
        state = owner[1].state.get(owner[0], {})
        flipped = flipped_sign(state, SQUARES) if run.iteration > 0 else None
        if flipped is not None:  # later than the last step, which would have failed by it, too
            return replace(evidence, diagnosis=_by_device(run, name, rehearsal, flipped))
        fact, fixes = negative
        return replace(
            evidence,
            message=f"{evidence.message}: {name}: {fact}",
            diagnosis=_optimizer(0.9, name, rehearsal, (f"{name}: {fact}", f"{name}: {rehearsal}"), fixes),
        )
    where = f"{name}:{rehearsal.key}" if rehearsal.key else name
    facts = (f"the optimizer makes {where} non-finite of finite numbers", str(rehearsal))
    remedies = (
        "clip gradients before the step (max_norm=), and lower the learning rate",
        f"look at the settings of the group that {name} is in",
    )
    return replace(evidence, diagnosis=_optimizer(0.8, name, rehearsal, facts, remedies))


@torch.no_grad()
def _negative_square(parameter: Tensor, optimizer: Optimizer) -> tuple[str, tuple[str, ...]] | None:
    """Return what is wrong with a running average of squares that is negative, and what to do about it."""
    state = optimizer.state.get(parameter, {})
    for key in SQUARES:
        value = state.get(key)
        if not isinstance(value, Tensor) or readable(value) is not None or value.is_complex():
            continue
        lowest = float(torch.nan_to_num(value.detach(), 0.0, 0.0, 0.0).min()) if value.numel() else 0.0
        if lowest < 0:
            fact = (
                f"{key} holds negative values (down to {lowest:.4g}), which no sum of squares is: it was "
                "loaded, averaged or written so"
            )
            return fact, (
                "load the optimizer's state from an intact checkpoint, or reset it (optimizer.state.clear())",
                f"find what made or changed {key}: merged or converted checkpoints, averages of states",
            )
    return None


def _by_a_setting(evidence: Evidence, run: Run, members: Sequence[_Member]) -> Evidence | None:
    for name, parameter, group, _ in members:
        found = suspect_setting(group, parameter)
        if found is not None:
            return _with_setting(evidence, run, found, name, members)
    return None


def _flipped_in(evidence: Evidence, run: Run, members: Sequence[_Member]) -> Evidence | None:
    """Look whether one single weight, or moment, is bad by a flipped bit: then no operator made it so."""
    if run.iteration == 0:
        return None  # it may have been loaded so
    # Each rank looks at its own part of a sharded tensor: the others are not asked, and may not be here.
    held = [
        (name, part)
        for name, parameter, _, optimizer in members
        for name, tensor in (
            (name, parameter.detach()),
            *((f"{name}:{key}", value) for key, value in optimizer.state.get(parameter, {}).items()),
        )
        if isinstance(tensor, Tensor) and judge(part := local(tensor))
    ]
    fact = flipped_exponent(held[0][1]) if len(held) == 1 else None
    if fact is None:
        return None
    name = held[0][0]
    return replace(evidence, diagnosis=_by_device(run, name, None, fact))


def _by_device(run: Run, name: str, rehearsal: Rehearsal | None, fact: str) -> Diagnosis:
    facts = (f"{name}: {fact}", *([] if rehearsal is None else [f"{name}: {rehearsal}"]))
    return replace(_optimizer(0.7, name, rehearsal, facts, for_device(run)), cause="hardware")


def _with_setting(
    evidence: Evidence, run: Run, found: tuple[str, str], name: str, members: Sequence[_Member]
) -> Evidence:
    fact, remedy = found
    alike = [member for member in members if suspect_setting(member[2], member[1]) == found]
    rehearsed = _rehearse(alike, run)
    rehearsal = None
    facts: tuple[str, ...] = (fact,)
    if rehearsed is not None:
        name, rehearsal = rehearsed
        facts = (fact, f"{name}: {rehearsal}")
    return replace(
        evidence,
        message=f"{evidence.message}: {fact}",
        diagnosis=_optimizer(0.95, name, rehearsal, facts, (remedy,)),
    )


def _without_eps(evidence: Evidence, members: Sequence[_Member]) -> Evidence | None:
    """Look whether an `eps` that was 0 for a step, and is not now, makes bad the very elements that are."""
    for name, parameter, group, optimizer in members[:_REHEARSED]:
        eps = group.get("eps")
        if not isinstance(eps, (int, float)):
            continue
        found = rehearse(optimizer, parameter, {**group, "eps": 0.0}, exact=True)
        if found is None:
            continue
        fact = (
            f"with an eps of 0 the optimizer makes just those elements of {name} non-finite that are; eps is "
            f"{eps:g} now: something has set it for a step"
        )
        facts = (fact, f"{name}: {found}")
        return replace(evidence, diagnosis=_optimizer(0.7, name, found, facts, (EPS_REMEDY,)))
    return None


def _optimizer(
    confidence: float,
    name: str,
    rehearsal: Rehearsal | None,
    facts: tuple[str, ...],
    remedies: tuple[str, ...],
) -> Diagnosis:
    """Return the verdict on the update of a parameter, with its operator if that was run again."""
    return Diagnosis(
        cause="optimizer",
        confidence=confidence,
        phase="optimizer",
        module=name.rpartition(".")[0],
        op=None if rehearsal is None else rehearsal.event.op,
        source=None if rehearsal is None else _source(rehearsal),
        evidence=facts,
        remedy=remedies,
    )


def _by_nobody_known(evidence: Evidence, members: Sequence[_Member]) -> Evidence:
    """Say that the optimizer's arithmetic was tried; if nothing better is known."""
    known = evidence.diagnosis
    if known is None or known.evidence or not members:
        return evidence
    fact = (
        "no setting of the optimizer, and no operator of its step as far as it can be run again, makes it so"
    )
    fix = f"look at code of the loop that writes to {members[0][0]}, or to its gradient after it was checked"
    return replace(
        evidence,
        diagnosis=replace(known, evidence=(fact,), remedy=tuple(dict.fromkeys((*known.remedy, fix)))),
    )


def _rehearse(members: Sequence[_Member], run: Run) -> tuple[str, Rehearsal] | None:
    for name, parameter, group, optimizer in members[:_REHEARSED]:
        found = rehearse(optimizer, parameter, group, grad_norm=run.last_grad_norm)
        if found is not None:
            return name, found
    return None


def _source(rehearsal: Rehearsal) -> str | None:
    """The line of an optimizer of the user's own; torch's have none."""
    line = rehearsal.event.call.line
    return None if line is None else str(line)


def suspect_setting(group: Mapping[str, Any], parameter: Tensor) -> tuple[str, str] | None:
    """Return what is wrong with a parameter group, and what to do about it."""
    for key in _SETTINGS:
        value = group.get(key)
        if isinstance(value, (int, float, Tensor)) and not math.isfinite(value):
            return f"{key} is {float(value)}", f"find what sets {key}: a scheduler or a hook"
    eps = group.get("eps")
    if not isinstance(eps, (int, float)) or parameter.device.type == "meta":
        return None
    dtype = parameter.dtype.to_real()
    if float(torch.tensor(eps, dtype=torch.float64).to(dtype)) > 0:
        return None
    name = str(dtype).removeprefix("torch.")
    fact = f"eps={eps:g} is 0 in {name}: an element whose gradient is 0 becomes 0/0 in the optimizer"
    if dtype.itemsize < 4:
        return fact, "use eps >= 1e-4, or keep float32 master weights for the optimizer"
    return fact, "use eps >= 1e-8"


def _members(run: Run) -> Iterator[_Member]:
    names = {id(p): name for name, p in run.host.named_parameters()}
    for optimizer in run.host.optimizers:
        for group in optimizer.param_groups:
            yield from ((names[id(p)], p, group, optimizer) for p in group["params"] if id(p) in names)
