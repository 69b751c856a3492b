"""Says whether a fix holds: the saved step is run with the fixed model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradsentinel.decision import Kind
from gradsentinel.diagnosis import transient
from gradsentinel.diagnosis.bundle import Bundle
from gradsentinel.diagnosis.diagnose import FINITE
from gradsentinel.diagnosis.offline import STATE_KINDS, Outcome, by_update, compute, judge, total_gradients
from gradsentinel.diagnosis.operator import CannotRun, find, run, shows
from gradsentinel.diagnosis.stage import Stage
from gradsentinel.incident import fold
from gradsentinel.measures.inspection import is_finite, nonfinite_in, readable
from gradsentinel.state.archive import ArchiveError
from gradsentinel.state.tree import tensors_in
from gradsentinel.wording import plain_name

_TRIED = {
    Kind.NONFINITE_LOSS,
    Kind.NONFINITE_INPUT,
    Kind.NONFINITE_GRADIENT,
    Kind.LOSS_SCALE,
    *STATE_KINDS,
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    what: str
    """operator, module, step or optimizer."""
    held: bool | None
    """True: finite now. False: still bad. None: it says nothing about the fix, or could not be tried."""
    said: str


@dataclass(slots=True)
class Verification:
    """Whether the fix holds, and why."""

    checks: list[Check] = field(default_factory=list)
    holds: bool | None = None
    """None if it cannot be said."""
    said: str = ""


def check_operator(bundle: Bundle, *, device: torch.device) -> Check:
    """Run the bad operator alone, on its saved inputs; with the torch and device that are here."""
    try:
        reason = bundle.why_no_operator()
        if reason is not None:
            raise CannotRun(reason.removeprefix("it holds no operator to run: "))  # noqa: TRY301 - said below
        call = bundle.operator(device=device)
        function = find(call.name)
        _, meta = bundle.read("operator")
        name = call.name.replace("::", ".")
        if meta.get("allocation"):
            return Check("operator", None, f"{name} hands out memory; alone it says nothing")
        outputs = run(function, call.args, call.kwargs)
    except (ArchiveError, CannotRun) as error:
        return Check("operator", None, f"not tried: {error}")
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return Check("operator", None, f"not tried: it raised {type(error).__name__}: {error}")
    if call.reproduced is False:
        return Check("operator", None, f"{name} alone never showed the fault")
    bad, diagnosis = shows(call, outputs), bundle.incident.diagnosis
    said = f"{name} alone makes {'bad' if bad else 'finite'} values of its saved inputs"
    if diagnosis is not None and diagnosis.cause == "operator" and not meta.get("custom"):
        return Check("operator", not bad, said)
    return Check("operator", None, f"{said}, as then: a fix is where these come from" if bad else said)


def verify_operator(bundle: Bundle, *, device: torch.device) -> Verification:
    """Decide by the operator alone: for faults of a standard operator, which no model can fix."""
    found = Verification([check_operator(bundle, device=device)])
    cause = None if bundle.incident.diagnosis is None else bundle.incident.diagnosis.cause
    found.holds = found.checks[0].held if cause == "operator" else None
    if found.holds is None:
        found.said = "without a target only faults of a torch operator can be verified: give --target"
    else:
        found.said = "the operator is fixed here" if found.holds else "the operator still fails here"
    return found


def verify(stage: Stage, control: Stage | None = None) -> Verification:
    """Run the saved step with the fixed model and say whether the fix holds.

    Args:
        stage: with the fixed model.
        control: with the model as it was, to show that the fault is there without the fix.

    Raises:
        Exception: whatever the user's code raises.
    """
    bundle, found = stage.bundle, Verification()
    reason = _reason_against(stage)
    if reason is not None:
        found.said = reason
        return found
    if control is not None:
        before = compute(control)
        if before.finite:
            found.said = "the step is finite with the model as it was, too: here it proves nothing"
            return found
        found.checks.append(Check("before", True, f"the fault is there without the fix: {before.in_words()}"))
    found.checks += _check_parts(stage)
    name = None if bundle.incident.diagnosis is None else bundle.incident.diagnosis.module
    with watched(stage, name) as seen:
        outcome = compute(stage)
    if seen is not None and name and not by_update(bundle.incident):
        found.checks.append(seen.check(name, outcome))
    if outcome.finite:
        found.checks.append(Check("step", True, "loss and gradients are finite"))
    else:
        found.checks.append(Check("step", False, f"not finite: {outcome.in_words()}{_place(stage)}"))
    found.checks += check_gradients(stage, outcome)
    if outcome.finite and stage.has_optimizer:
        found.checks.append(_check_optimizer(stage, outcome))
    decisive = [check.held for check in found.checks if check.what in ("module", "step", "optimizer")]
    _conclude(found, stage, holds=all(held is not False for held in decisive), transient=_transient(bundle))
    if found.holds:
        _doubt(found, stage, name if seen is not None and not seen.calls else None)
    return found


def _doubt(found: Verification, stage: Stage, silent: str | None) -> None:
    """Take back what a step proves in which the guilty part did not take part."""
    if silent and _find(stage, silent) is not None:
        found.holds, found.said = None, f"nothing is shown: {silent}, which was to blame, did not run"
    if any(check.what == "gradient" and not check.held for check in found.checks):
        found.holds, found.said = (
            False,
            "nothing is shown: the gradient is cut, so the fault cannot come back",
        )


def _check_parts(stage: Stage) -> list[Check]:
    """Look at the bad operator alone; where the optimizer was to blame, at its settings."""
    if not by_update(stage.bundle.incident):
        return [check_operator(stage.bundle, device=stage.run.host.device)]
    setting = judge(stage)
    if setting is None or setting.cause != "optimizer":
        return []
    return [Check("optimizer", False, setting.evidence[0])]


def check_gradients(stage: Stage, outcome: Outcome) -> list[Check]:
    """Say where gradients do not arrive any more; nothing if they do, or if nobody knows where they did.

    A fix that detaches, or multiplies by 0, makes everything finite and trains nothing.
    """
    if not outcome.finite:
        return []
    bundle, trainable = stage.bundle, {n for n, p in stage.run.host.named_parameters() if p.requires_grad}
    then = {entry.name for entry in bundle.incident.tensors}
    if bundle.has("gradients"):
        then |= set(bundle.read("gradients")[0]["gradients"])
    blamed = "" if bundle.incident.diagnosis is None else bundle.incident.diagnosis.module
    if blamed:
        then |= {name for name in trainable if name.startswith(f"{blamed}.")}
    total = total_gradients(outcome.computed)
    cut = sorted(name for name in then & trainable if name not in total)
    if cut:
        return [Check("gradient", False, f"no gradient reaches {fold(cut)} any more")]
    if total and all(not bool(gradient.detach().to_dense().any()) for gradient in total.values()):
        return [Check("gradient", False, "every gradient is 0")]
    return []


def _conclude(found: Verification, stage: Stage, *, holds: bool, transient: bool) -> None:
    if not holds:
        found.holds, found.said = False, "the fix does not hold"
        diagnosis = stage.bundle.incident.diagnosis
        if diagnosis is not None and (diagnosis.cause, diagnosis.phase) == ("data", "input"):
            found.said += (
                " on the saved batch, which has its bad values still: repaired records cannot be tried"
            )
    elif transient:
        found.said = "nothing to verify: run again, the step was finite without a fix too"
    elif stage.weights:
        found.holds, found.said = True, "the fix holds"
    else:
        found.holds = True
        found.said = "the fix holds, with the target's own weights: with those of that step it might not"


def _reason_against(stage: Stage) -> str | None:
    incident = stage.bundle.incident
    if incident.kind in FINITE or incident.kind not in _TRIED:
        return f"nothing to verify: {incident.kind} is not about values that are not finite"
    if by_update(incident) and not stage.has_optimizer:
        return "the optimizer made the bad values: let the factory return (model, forward, optimizer)"
    phase = None if incident.diagnosis is None else incident.diagnosis.phase
    if phase == "reduce" and not stage.complete:
        return "the fault was in the sum over micro-batches, and not all of them are in the bundle"
    return None


def _transient(bundle: Bundle) -> bool:
    """True if the step was fine when the run itself ran it again, micro-batch by micro-batch and in sum."""
    diagnosis = bundle.incident.diagnosis
    if diagnosis is None or transient._CLEAN not in diagnosis.evidence:
        return False
    # Micro-batches that overflow only when they are added up are the one such fault that is in the model.
    return (
        diagnosis.phase != "reduce"
        or diagnosis.cause not in ("precision", "math")
        or diagnosis.confidence < 0.8
    )


def _place(stage: Stage) -> str:
    """Say where the bad values come from now."""
    found = judge(stage)
    if found is None or found.op is None:
        return ""
    where = ", ".join(part for part in (found.module, found.source) if part)
    return f"; now from {found.op}{f' ({where})' if where else ''}"


def _check_optimizer(stage: Stage, outcome: Outcome) -> Check:
    """Make the step with the target's optimizer: parameters and moments must be finite after it."""
    run_, host = stage.run, stage.run.host
    scaler = getattr(host, "scaler", None)
    scale = 1.0 if scaler is None else float(scaler.get_scale())
    total = total_gradients(outcome.computed)
    for name, parameter in host.named_parameters():
        gradient = total.get(name)
        parameter.grad = None if gradient is None else gradient / scale
    for optimizer in host.optimizers:
        optimizer.step()
    named: list[tuple[str, Tensor]] = [*host.named_parameters(), *run_.health.moments()]
    bad = nonfinite_in(named)
    if bad:
        return Check("optimizer", False, f"its step makes {fold([entry.name for entry in bad])} not finite")
    return Check("optimizer", True, "parameters and moments are finite after its step")


# -- one module ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """Whether what one module was given and gave was finite, forward and backward."""

    calls: int = 0
    given: bool = True
    made: bool = True
    received: bool = True
    returned: bool = True

    def check(self, name: str, outcome: Outcome) -> Check:
        """Say what became of it."""
        if not self.calls:
            return Check("module", None, f"{name} did not run in the fixed model")
        if self.given and not self.made:
            return Check("module", False, f"{name} makes bad values of finite ones, in the forward pass")
        own = any(what.startswith(f"{name}.") for what in outcome.gradients)
        if self.received and (own or not self.returned):
            return Check("module", False, f"{name} makes bad values of finite ones, in the backward pass")
        if not (self.given and self.received):
            return Check("module", None, f"{name} is given bad values by others")
        return Check("module", True, f"{name}: finite in, finite out, forward and backward")


@contextmanager
def watched(stage: Stage, name: str | None) -> Iterator[_Seen | None]:
    """Look at what a module is given and gives while the step runs; None if there is no such module."""
    module = None if not name else _find(stage, name)
    if module is None:
        yield _Seen() if name else None
        return
    seen = _Seen()

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.calls += 1
        for tensor in _floats((args, kwargs)):
            seen.given &= _fine(tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda g: _note(seen, "returned", g))  # type: ignore[no-untyped-call]

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        for tensor in _floats(output):
            seen.made &= _fine(tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda g: _note(seen, "received", g))  # type: ignore[no-untyped-call]

    handles = [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _find(stage: Stage, name: str) -> nn.Module | None:
    named = (
        (plain_name(".".join(part for part in (prefix, path) if part)), module)
        for prefix, root in stage.run.host.modules()
        for path, module in root.named_modules()
    )
    return next((module for known, module in named if known == name), None)


def _note(seen: _Seen, what: str, gradient: Tensor) -> None:
    setattr(seen, what, getattr(seen, what) and _fine(gradient))


def _floats(value: Any) -> list[Tensor]:
    return [tensor for _, tensor in tensors_in(value) if readable(tensor) is None]


def _fine(tensor: Tensor) -> bool:
    """Infinities alone are no fault of a module: masks are made of them."""
    return bool(is_finite(tensor)) or not math.isnan(float(tensor.detach().double().sum()))
