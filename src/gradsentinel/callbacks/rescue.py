"""Computing a failed step again in a wider dtype: a number that only did not fit costs nothing then."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from gradsentinel import events
from gradsentinel.again.recompute import Recomputed
from gradsentinel.again.widening import Wide, widen, widened
from gradsentinel.callbacks.recomputing import NONFINITE, Recomputing
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Diagnosis, Evidence, Finding
from gradsentinel.incident import Incident, Outcome, Recovery
from gradsentinel.recovery import Budget
from gradsentinel.run import Run
from gradsentinel.wording import plain_name

WHOLE = ""
"""The name under which the whole model is counted."""

_REMEDY = {
    torch.float32: "train in bfloat16, or keep the weights in float32 (model.float()) under autocast",
    torch.float64: "look for a logarithm, a division or a norm near zero in it, or train in float64 "
    "(model.double())",
}
"""For a model of which no single module is to blame."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One way to compute the step in a wider dtype."""

    module: str
    dtype: torch.dtype
    keeps: bool = False
    """The model hands its results on in the wider dtype, so that the loss is computed in it."""
    everything: bool = False
    """Widen every single operator too, also those outside of modules and under an autocast inside."""


_JUNK_NOTE = "records are bad by themselves: made finite in a wider dtype, they would be learnt from"
_DAMAGED_NOTE = (
    "what a device has damaged is no matter of precision: in a wider dtype it would be learnt from"
)
_CERTAIN = 0.5
_FAR_OUT = 1e4
"""So many times the loss or gradient norm of a healthy step is no rounding: the state itself is bad."""
_FAR_OUT_NOTE = (
    "in a wider dtype the step is finite, but with a gradient norm of {norm:.3g} far from any healthy one: "
    "it is not saved"
)


@dataclass(kw_only=True)
class Rescue(Recomputing):
    """Computes a step that is not finite again in float32 (or wider), and uses the gradients if they are.

    First only the module that the diagnosis names, then the whole model: autocast off, float16 and
    bfloat16 weights and inputs widened. The gradients are cast back to the dtype of their parameters. A
    model that computes in float32 already is computed in float64. Comes after `Retry`, which costs less.
    Needs `forward=`. Called on: every rank.
    """

    rung: ClassVar[Action] = Action.RETRY
    place: ClassVar[int] = 1
    max_rescues: int = 10
    """So many steps within `window` may be saved."""
    window: int = 1000
    """Length of the window, in attempted steps."""
    dtype: str | None = None
    """Compute in this dtype: "float32" or "float64". None: the next wider one than the model computes in."""
    recommend_after: int = 3
    """So many rescues of the same module are no accident: they give a warning that recommends to keep it in
    the wider dtype."""
    keep_fp32: bool = False
    """True does so instead of recommending it, for a module that the diagnosis names: it computes in the
    wider dtype from then on."""
    _budget: Budget = field(init=False, repr=False)
    _run: Run | None = field(default=None, init=False, repr=False)
    _rescued: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    """How often each module was rescued."""
    _kept: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    """Modules that compute in a wider dtype by now, and which."""
    _unsaid: list[str] = field(default_factory=list, init=False, repr=False)
    """Recommendations that are still to be reported."""

    def __post_init__(self) -> None:
        if self.max_rescues < 0 or self.window < 1 or self.recommend_after < 1:
            raise ConfigurationError(
                "max_rescues must be 0 or more, window at least 1 step and recommend_after at least 1"
            )
        if self.dtype not in (None, "float32", "float64"):
            raise ConfigurationError(f"dtype={self.dtype!r}: give 'float32', 'float64' or None")
        self._budget = Budget(self.max_rescues, self.window)

    def on_run_start(self, event: events.RunStart) -> None:
        """Say so if no step can be computed again here; widen what an earlier run had widened."""
        super().on_run_start(event)
        event.run.budgets[type(self).__name__] = self._budget.as_dict
        self._run = event.run
        self._keep_again(event.run)

    def on_after_step(self, event: events.AfterStep) -> list[Finding]:
        """Report what is no accident any more."""
        said, self._unsaid = self._unsaid, []
        return [_recommendation(text) for text in said]

    def respond(self, incident: Incident, run: Run) -> Recovery | None:
        """Compute the step in wider dtypes until it is finite, or hand over."""
        if not self._promising(incident, run):
            return None
        search = _Search(incident, run, None if self.dtype is None else getattr(torch, self.dtype))
        for attempt in search.attempts():
            again = self._compute(attempt, run, search)
            if again.finite and _is_far_out(again, run):
                incident.notes += (_FAR_OUT_NOTE.format(norm=again.grad_norm),)
                return None
            if again.finite:
                return self._use(again, attempt, search, incident)
        failures = dict.fromkeys(search.failures)
        incident.notes += ("in a wider dtype the step is not finite either", *failures)
        return None

    def _promising(self, incident: Incident, run: Run) -> bool:
        """Say whether to try at all; notes why not. Called on: every rank."""
        if incident.kind not in NONFINITE:
            return False
        if not self._budget.left(run.iteration):
            incident.notes += (f"the budget of {self.max_rescues} rescues in {self.window} is used up",)
            return False
        known = incident.diagnosis
        if incident.samples and known is not None and known.cause == "data":
            incident.notes += (_JUNK_NOTE,)
            return False
        if known is not None and known.cause == "hardware" and known.confidence >= _CERTAIN:
            incident.notes += (_DAMAGED_NOTE,)
            return False
        return self._ready(incident, run)

    def _compute(self, attempt: _Attempt, run: Run, search: _Search) -> Recomputed:
        around: Callable[[], AbstractContextManager[Any]] = nullcontext
        if attempt.everything:
            from gradsentinel.diagnosis.swap import Widen  # noqa: PLC0415 - only here, and only then

            around = Widen
        modules = search.modules_of(attempt)
        with widened(modules, attempt.dtype, keeps=attempt.keeps) as made:
            again = self._again(run, around, tentative=True)
        search.learn(again, made)
        return again

    def _use(self, again: Recomputed, attempt: _Attempt, search: _Search, incident: Incident) -> Recovery:
        run, name, dtype = search.run, attempt.module, _word(attempt.dtype)
        self._budget.spend(run.iteration)
        left = self._budget.left(run.iteration)
        incident.details["rescue"] = {
            "module": name,
            "dtype": dtype,
            "everything": attempt.everything,
            "loss": again.loss,
            "grad_norm": again.grad_norm,
        }
        if not search.saw_narrow:
            return Recovery(
                outcome=Outcome.RETRIED,
                apply=True,
                message=f"computed again and finite; the model computes in {dtype} already, so the fault was "
                f"transient ({left} of {self.max_rescues} rescues left)",
            )
        self._rescued[name] += 1
        if self._rescued[name] == self.recommend_after:
            incident.notes += (self._no_accident(name, attempt.dtype, run),)
        return Recovery(
            outcome=Outcome.RESCUED,
            apply=True,
            message=f"computed again with {_called(name)} in {dtype} and finite, the step is saved "
            f"({left} of {self.max_rescues} rescues left)",
        )

    def _no_accident(self, name: str, dtype: torch.dtype, run: Run) -> str:
        """Keep the module in the wider dtype if that is allowed, else recommend it; return what to note."""
        said = f"{_called(name)} needed {_word(dtype)} in {self._rescued[name]} steps"
        if self.keep_fp32 and name != WHOLE:
            self._kept[name] = _word(dtype)
            self._keep_again(run)
            said = f"{said} and computes in it from now on"
        elif name == WHOLE:
            said += f": {_REMEDY[dtype]}"
            if self.keep_fp32:
                said += "; keep_fp32 keeps only a module that the diagnosis names, and it named none"
        else:
            said += f": keep it in {_word(dtype)}, with torch.autocast(device_type, enabled=False) around it"
        self._unsaid.append(said)
        return said

    def _keep_again(self, run: Run) -> None:
        """Widen the modules that are to stay so; those that are wide already are left alone."""
        found = dict(_named_modules(run))
        made: list[Wide] = []
        for name, dtype in self._kept.items():
            if name in found:
                made += widen(found[name], getattr(torch, dtype))
        if made and "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # compiled code does not notice that a module computes otherwise now

    def state_dict(self) -> dict[str, Any]:
        """Return the rescues in the window and of each module, and what computes in a wider dtype by now."""
        return {
            "budget": self._budget.state_dict(),
            "rescued": dict(self._rescued),
            "kept": dict(self._kept),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._budget.load_state_dict(state["budget"])
        self._rescued = Counter(state["rescued"])
        self._kept = dict(state["kept"])
        if self._run is not None:
            self._keep_again(self._run)


def _is_far_out(again: Recomputed, run: Run) -> bool:
    """Say whether a step that a wider dtype can hold is no step to make: the same on every rank."""
    if run.usual is None:
        return False
    loss, norm = run.usual
    both = again.loss is not None and loss is not None
    far_loss = both and abs(again.loss or 0.0) > _FAR_OUT * max(abs(loss or 0.0), 1.0)
    far_norm = again.grad_norm > _FAR_OUT * max(norm, 1.0)
    return not run.consensus.all_of(not (far_loss or far_norm))


class _Search:
    """Which ways there are to compute a step in a wider dtype, and what came of them so far."""

    def __init__(self, incident: Incident, run: Run, dtype: torch.dtype | None) -> None:
        self.run = run
        self.failures: list[str] = []
        self.saw_narrow = False
        """True once something would have been computed in a narrower dtype, on any rank."""
        self._dtypes = [torch.float32, torch.float64] if dtype is None else [dtype]
        self._modules = dict(_named_modules(run))
        self._roots = [module for _, module in run.host.modules()]
        name = incident.diagnosis.module if incident.diagnosis is not None else None
        self._suspect = name if name in self._modules and self._modules[name] not in self._roots else None
        self._sharded = any(hasattr(p, "to_local") for _, p in run.host.named_parameters())

    def attempts(self) -> Iterator[_Attempt]:
        """Yield the attempts, the least drastic first; looks at what came of the one before."""
        for dtype in self._dtypes:
            if self._suspect is not None:
                yield _Attempt(self._suspect, dtype)
            failed = len(self.failures)
            yield _Attempt(WHOLE, dtype, keeps=True)
            if len(self.failures) > failed:  # the loss could not take it
                yield _Attempt(WHOLE, dtype)
            if dtype is torch.float32 and self.saw_narrow and not self._sharded:
                # Under FSDP the ranks' own messages must stay as they are.
                yield _Attempt(WHOLE, dtype, everything=True)

    def modules_of(self, attempt: _Attempt) -> list[nn.Module]:
        """Return the modules that an attempt widens."""
        return self._roots if attempt.module == WHOLE else [self._modules[attempt.module]]

    def learn(self, again: Recomputed, made: list[Wide]) -> None:
        """Take note of what came of an attempt; called on every rank."""
        if again.failure:
            self.failures.append(again.failure)
        narrow = any(stand_in.saw_narrow for stand_in in made)
        self.saw_narrow = self.saw_narrow or not self.run.consensus.all_of(not narrow)


def _named_modules(run: Run) -> Iterator[tuple[str, nn.Module]]:
    for prefix, root in run.host.modules():
        for path, module in root.named_modules():
            yield plain_name(".".join(part for part in (prefix, path) if part)), module


def _recommendation(text: str) -> Finding:
    evidence = Evidence(
        kind=Kind.CUSTOM,
        action=Action.WARN,
        message=text,
        diagnosis=Diagnosis(cause="precision", confidence=0.8, evidence=(text,)),
    )
    return Finding(kind=Kind.CUSTOM, value=torch.tensor(True), action=Action.WARN, confirm=lambda: evidence)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _called(name: str) -> str:
    return name or "the whole model"
