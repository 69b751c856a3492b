"""Gradients that are finite but too large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from gradsentinel import events
from gradsentinel.callback import Detector
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Diagnosis, Evidence, Finding, TensorEvidence
from gradsentinel.gradients import GradientView

_FAR_OUT = 1e6
"""So many times the bound is no large gradient any more; clipping would only hide it."""


_Confirm = Callable[[GradientView, float, Action], Evidence | None]


@dataclass(kw_only=True)
class MagnitudeCallback(Detector):
    """Warns of, or acts on, gradients beyond fixed bounds, before they are clipped.

    Bounds are on the unscaled gradients. Non-finite values break every bound, but in a step that the
    GradScaler drops by itself they are its search for a scale. Called on: every rank.
    """

    needs_random_states = False
    max_global_norm: float | None = None
    """Bound on the global norm that is clipped (the 2-norm unless `step(norm_type=...)` says otherwise);
    costs nothing extra."""
    max_parameter_norm: float | None = None
    """Bound on each parameter's own norm, of the same order; costs nothing extra."""
    max_value: float | None = None
    """Bound on the absolute value of any element; one more fused pass per step."""
    action: Action | str = Action.WARN
    """warn reports and lets the (clipped) step through; retry, skip, rollback and abort act."""

    def __post_init__(self) -> None:
        self.action = Action.parse(self.action)
        if self.action is Action.CONTINUE:
            raise ConfigurationError(
                "action='continue' would do nothing; leave the callback out, or use warn"
            )
        bounds = {
            "max_global_norm": self.max_global_norm,
            "max_parameter_norm": self.max_parameter_norm,
            "max_value": self.max_value,
        }
        if all(bound is None for bound in bounds.values()):
            raise ConfigurationError(f"MagnitudeCallback needs at least one bound: {', '.join(bounds)}")
        for name, bound in bounds.items():
            if bound is not None and not bound > 0:
                raise ConfigurationError(f"{name}={bound} must be above 0")

    def norm_bound(self) -> float | None:
        """Return the bound on the global norm, if that is the only one."""
        alone = self.max_parameter_norm is None and self.max_value is None
        return self.max_global_norm if alone else None

    def calm(self, step: int, norm: float, losses: Sequence[float]) -> bool | None:
        """Return True if the global norm keeps its bound; None if there are other bounds."""
        bound = self.max_global_norm
        if bound is None or self.max_parameter_norm is not None or self.max_value is not None:
            return None
        return norm <= bound

    def on_before_clip(self, event: events.BeforeClip) -> Sequence[Finding]:
        """Compare the view's numbers with the bounds."""
        view = event.gradients
        findings = []
        if self.max_global_norm is not None:
            findings.append(self._finding(event, view.total_norm, self.max_global_norm, _confirm_global))
        if self.max_parameter_norm is not None:
            confirm = partial(_confirm_each, "norm")
            findings.append(self._finding(event, view.max_norm, self.max_parameter_norm, confirm))
        if self.max_value is not None:
            confirm = partial(_confirm_each, "largest value")
            findings.append(self._finding(event, view.max_magnitude, self.max_value, confirm))
        return findings

    def _finding(self, event: events.BeforeClip, value: Tensor, bound: float, confirm: _Confirm) -> Finding:
        view, action = event.gradients, Action.parse(self.action)
        return Finding(
            kind=Kind.MAGNITUDE,
            value=value,
            limit=bound,
            action=action,
            confirm=lambda: None if _scaler_drops(event) else confirm(view, bound, action),
        )


def _scaler_drops(event: events.BeforeClip) -> bool:
    return event.overflow is not None and bool(event.overflow > 0)


def _confirm_global(view: GradientView, bound: float, action: Action) -> Evidence | None:
    norm = float(view.total_norm)
    if not abs(norm) < float("inf") and not view.distributed:  # that would take the other ranks
        norm = view.safe_norm()
    if norm <= bound:
        return None
    return Evidence(
        kind=_kind(norm) if not view.distributed or view.evidence() else Kind.MAGNITUDE,
        action=action,
        message=f"the global gradient norm is {norm:.4g}, above {bound:g}",
        tensors=_largest(view),
        diagnosis=_advice(norm, bound),
    )


def _confirm_each(what: str, view: GradientView, bound: float, action: Action) -> Evidence | None:
    values = (view.norms if what == "norm" else view.magnitudes).tolist()
    over = sorted(
        ((name, value) for name, value in zip(view.names, values, strict=True) if not value <= bound),
        key=lambda entry: -entry[1],
    )
    by_name = {entry.name: entry for entry in view.inspect()}
    tensors = tuple(by_name[name] for name, _ in over)
    if what == "norm":  # a norm may overflow in the gradient's own dtype
        tensors = tuple(entry for entry in tensors if not entry.norm <= bound)
    if not tensors:
        return None
    worst = tensors[0]
    value = worst.norm if what == "norm" else dict(over)[worst.name]
    return Evidence(
        kind=_kind(value),
        action=action,
        message=f"the {what} of the gradient of {worst.name} is {value:.4g}, above {bound:g}"
        + (f" ({len(tensors)} parameters are)" if len(tensors) > 1 else ""),
        tensors=tensors,
        about=tuple(name for name, _ in over),
        diagnosis=_advice(value, bound),
    )


def _advice(value: float, bound: float) -> Diagnosis:
    clipping_helps = value <= _FAR_OUT * bound
    remedy = ("clip gradients by norm, or lower the learning rate",) if clipping_helps else ()
    return Diagnosis(cause="unknown", confidence=0.0, phase="backward", remedy=remedy)


def _kind(value: float) -> Kind:
    return Kind.MAGNITUDE if abs(value) < float("inf") else Kind.NONFINITE_GRADIENT


def _largest(view: GradientView, count: int = 5) -> tuple[TensorEvidence, ...]:
    """The parameters that make up the norm: the largest, and those within a tenth of it."""
    found = list(view.inspect())
    found.sort(key=lambda entry: (-entry.nonfinite, -entry.norm))
    return tuple(entry for entry in found[:count] if entry.nonfinite or entry.norm >= 0.1 * found[0].norm)
