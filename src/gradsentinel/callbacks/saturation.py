"""Overflows that no look for NaN and Inf finds: devices that make the largest finite value of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsentinel import events
from gradsentinel.callback import Detector
from gradsentinel.callbacks.peaks import ACTIVATION, GRADIENT, Peaks, Site
from gradsentinel.decision import Action, Kind
from gradsentinel.devices import device_of
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Diagnosis, Evidence, Finding, TensorEvidence
from gradsentinel.gradients import GradientView
from gradsentinel.incident import fold
from gradsentinel.measures.inspection import parts_of, values_of
from gradsentinel.run import Run

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HALF = torch.finfo(torch.float16).max
_ATTENTION = 20
"""For so many steps after an alarm the activations are looked at in every step."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    """From where on a gradient's magnitude is suspicious; 1-dim, on the device."""

    near: Tensor
    largest: Tensor
    """Of the gradient's own type."""
    echo: Tensor
    """A magnitude that a gradient of a narrower type was copied with; NaN where there is none."""


@dataclass(slots=True)
class _Looked:
    """What was seen of the gradients after a backward pass; they may change before anybody looks closer."""

    names: tuple[str, ...]
    near: Tensor
    exact: Tensor
    microbatch: int | None
    view: GradientView | None = None
    """The step's final gradients: those of the micro-batch would be kept alive by a look from here."""


@dataclass(kw_only=True)
class SaturationCallback(Detector):
    """Drops a step in which a value overflowed and the device made the largest finite number of it.

    Some devices do that (65504 in float16), and so do nan_to_num and clamps: every value is finite, and
    wrong. Looks for gradients of at least 0.99 times the largest number of their type (or at exactly
    65504 in float32, where a float16 gradient was copied from), at the device's own overflow flag where
    there is one, and on sampled steps at what modules put out in float16 or bfloat16. With a GradScaler
    it looks at the scaled gradients, and has the scaler lower its scale; an overflow that the scaler sees
    by itself is its own business. On a device that saturates it is added to the callbacks if it is not
    among them. Called on: every rank.
    """

    action: Action | str = Action.RETRY
    """The cheapest recovery to try: retry (falls through to skip), skip, rollback, abort, or warn."""
    fraction: float = 0.99
    """Values of at least this times the largest one are suspected: two of them, or one at the very end."""
    every: int = 1
    """Look at the gradients in every so many steps; one fused pass over them per micro-batch."""
    activations_every: int = 50
    """Look at the modules' outputs in every so many steps, the first one too, and in each of the 20 steps
    after an alarm; a hook and one launch per module on these steps. 0: never."""
    overflow_flag: Callable[[], Tensor | None] | None = field(default=None, repr=False)
    """Returns a 0-dim tensor, true if the device has overflowed since it was called last; None takes
    the device's own flag (Ascend without INF/NAN mode), if it has one."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _peaks: Peaks | None = field(default=None, init=False, repr=False)
    _seen: bool = field(default=False, init=False, repr=False)
    """True if a micro-batch's gradients were looked at in this step."""
    _found: list[tuple[Finding, bool]] = field(default_factory=list, init=False, repr=False)
    """What the micro-batches of this step showed, and whether it may be the GradScaler's business."""
    _looked: list[_Looked] = field(default_factory=list, init=False, repr=False)
    """What is still to be told where the step's final gradients are."""
    _number: int = field(default=0, init=False, repr=False)
    """Steps up to now, dropped ones too."""
    _attentive: int = field(default=-1, init=False, repr=False)
    """Number of the last step that gets full attention after an alarm."""
    _bounds: dict[object, _Bounds] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.action = Action.parse(self.action)
        if self.action is Action.CONTINUE:
            raise ConfigurationError(
                "action='continue' would do nothing; leave the callback out, or use warn"
            )
        if not 0 < self.fraction <= 1:
            raise ConfigurationError(f"fraction={self.fraction} must be above 0 and at most 1")
        if self.every < 1 or self.activations_every < 0:
            raise ConfigurationError("every must be at least 1 step; activations_every too, or 0 for never")
        if self.overflow_flag is not None and not callable(self.overflow_flag):
            raise ConfigurationError("overflow_flag must be a function without arguments, or None")

    def on_run_start(self, event: events.RunStart) -> None:
        """Take note of the model; the first step's activations are looked at."""
        self._run = event.run
        self._peaks = Peaks(event.run)
        self._forget_flag()
        self._prepare()

    def on_step_start(self, event: events.StepStart) -> None:
        """Forget a step that came to nothing."""
        self._found.clear()
        self._looked.clear()
        self._seen = False

    def on_after_backward(self, event: events.AfterBackward) -> None:
        """Look at the gradients as the backward pass left them, at the flag, and at the activations."""
        self._seen = True
        with self._hooks_off_on_failure():
            self._found += self._look(event.gradients, event.microbatch, half=event.scaled)

    def on_before_clip(self, event: events.BeforeClip) -> Sequence[Finding]:
        """Report what the micro-batches showed; look now in a loop that runs its own backward pass."""
        with self._hooks_off_on_failure():
            if not self._seen:
                scale = event.loss_scale
                self._found += self._look(event.gradients, None, half=scale is not None, scale=scale)
            for looked in self._looked:
                looked.view = event.gradients
            findings = [_unless(event.overflow, one) if scalers else one for one, scalers in self._found]
            self._found.clear()
            self._looked.clear()
            self._seen = False
            self._forget_flag()
            if self._peaks is not None and self._peaks.failure is not None:
                raise self._peaks.failure
            self._number += 1
            self._prepare()
        return findings

    def on_after_step(self, event: events.AfterStep) -> None:
        """Forget what ran since: norms set the flag, too, and a step computed again is measured."""
        self._forget_flag()
        if self._peaks is not None:
            self._peaks.take()

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Have the GradScaler lower its scale: it sees no infinity, and would raise it for ever."""
        if self._run is None or event.incident.kind is not Kind.SATURATION or event.recovery.apply:
            return
        scaler = getattr(self._run.host, "scaler", None)
        states = getattr(scaler, "_per_optimizer_states", {})
        for state in list(states.values()):
            for found in state["found_inf_per_device"].values():
                found.fill_(1.0)

    def on_run_end(self, event: events.RunEnd) -> None:
        """Take the hooks off."""
        if self._peaks is not None:
            self._peaks.detach()

    @contextmanager
    def _hooks_off_on_failure(self) -> Iterator[None]:
        """A callback that raises is heard of no more: nobody would take its hooks off later."""
        try:
            yield
        except Exception:  # whatever it is: it goes on to the bus, which switches this callback off
            if self._peaks is not None:
                self._peaks.detach()
            raise

    # -- on the device ---------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Have the next step's activations measured, if it is their turn."""
        if self._peaks is None:
            return
        due = self.activations_every and self._number % self.activations_every == 0
        if due or self._number <= self._attentive:
            if not self._peaks.attached:
                self._peaks.attach(operators=False)
        elif self._peaks.attached:
            self._peaks.detach()

    def _look(
        self, view: GradientView, microbatch: int | None, *, half: bool, scale: Tensor | None = None
    ) -> list[tuple[Finding, bool]]:
        """Return what is found, and whether a GradScaler may see it by itself."""
        flag = self._flag()  # before the looks below can set it
        found = []  # what comes first in the step comes first here: it is what the others follow from
        if self._peaks is not None and self._peaks.attached:
            found += self._look_at_activations(self._peaks, microbatch)
        if self._number % self.every == 0 and len(view):
            found.append((self._look_at_gradients(view, microbatch, half=half, scale=scale), True))
        if flag is not None:
            value = flag.reshape(()) != 0
            found.append((self._finding(value, lambda: self._confirm_flag(microbatch), microbatch), True))
        return found

    def _look_at_gradients(
        self, view: GradientView, microbatch: int | None, *, half: bool, scale: Tensor | None
    ) -> Finding:
        """Compare the largest magnitudes with the bounds; `scale` brings back what was unscaled."""
        sizes = view.magnitudes
        bounds = self._bounds_for(view, sizes, half=half)
        if scale is not None:
            sizes = sizes * scale.to(sizes.device)
        exact = (sizes == bounds.largest) | (sizes == bounds.echo)
        near = ((sizes >= bounds.near) & (sizes <= bounds.largest)) | exact
        looked = _Looked(view.names, near, exact, microbatch)
        self._looked.append(looked)
        return self._finding(near.any(), lambda: self._confirm_gradients(looked), microbatch)

    def _bounds_for(self, view: GradientView, like: Tensor, *, half: bool) -> _Bounds:
        """Return the bounds of each gradient; made once, to be on the device."""
        dtypes = tuple(gradient.dtype.to_real() for gradient in view.gradients)
        key = (dtypes, half, like.device, like.dtype)
        if key not in self._bounds:
            limits = [torch.finfo(dtype).max for dtype in dtypes]
            # Autocast copies float16 gradients to those of float32 parameters: no size like any other.
            echoes = [_LARGEST_HALF if half and d is torch.float32 else float("nan") for d in dtypes]
            table = torch.tensor([limits, echoes], dtype=torch.float64).to(like.dtype).to(like.device)
            self._bounds.clear()
            self._bounds[key] = _Bounds(table[0] * self.fraction, table[0], table[1])
        return self._bounds[key]

    def _flag(self) -> Tensor | None:
        if self.overflow_flag is not None:
            return self.overflow_flag()
        return None if self._run is None else device_of(self._run.host.device).overflow_flag()

    def _forget_flag(self) -> None:
        if self._run is not None:
            device_of(self._run.host.device).clear_overflow_flag()

    def _look_at_activations(self, peaks: Peaks, microbatch: int | None) -> list[tuple[Finding, bool]]:
        measured = peaks.take()
        findings = []
        for dtype in _HALF:
            for what in (ACTIVATION, GRADIENT):  # masks are at the lower end of activations
                found = measured.at_the_end(what, dtype, below=what == GRADIENT)
                if found is not None:
                    confirm = partial(self._confirm_activations, *found, microbatch)
                    finding = self._finding(found[1].any(), confirm, microbatch)
                    findings.append((finding, what == GRADIENT))  # no scale helps a forward pass
        return findings

    def _finding(
        self, value: Tensor, confirm: Callable[[], Evidence | None], microbatch: int | None
    ) -> Finding:
        return Finding(
            kind=Kind.SATURATION,
            value=value,
            action=Action.parse(self.action),
            confirm=confirm,
            microbatch=microbatch,
        )

    # -- on the host, when something is suspected ------------------------------------------------------

    def _confirm_gradients(self, looked: _Looked) -> Evidence | None:
        """Name the gradients that hold the largest number; of those near it, where two elements are."""
        view = looked.view
        flags = zip(looked.names, looked.near.tolist(), looked.exact.tolist(), strict=True)
        suspects = {name: exact for name, near, exact in flags if near}
        values = {}
        if view is not None and view.gradients:  # of a step that is looked into later they are gone
            values = dict(zip(view.names, view.gradients, strict=True))
        counts = {name: self._count(values[name]) if name in values else 0 for name in suspects}
        names = [name for name, exact in suspects.items() if exact or counts[name] > 1]
        if not names:
            return None
        counts = {name: count for name, count in counts.items() if count and name in names}
        where = f" in {sum(counts.values())} element(s)" if counts else ""
        return self._evidence(
            "backward",
            f"the gradient of {fold(names)} reaches the largest finite value{where}",
            tuple(entry for entry in view.inspect() if entry.name in names) if view is not None else (),
            looked.microbatch,
            details={"saturated": counts} if counts else {},
        )

    def _count(self, gradient: Tensor) -> int:
        """Count the elements near the largest number of their type, as they are now."""
        values = parts_of(values_of(gradient)).abs()
        largest = torch.finfo(values.dtype).max
        return int(((values >= self.fraction * largest) & (values <= largest)).sum())

    def _confirm_activations(self, sites: Sequence[Site], flags: Tensor, microbatch: int | None) -> Evidence:
        bad = [site for site, flag in zip(sites, flags.tolist(), strict=True) if flag]
        forward = bad[0].what == ACTIVATION
        places = fold(list(dict.fromkeys(site.name or "the model" for site in bad)))
        what = f"the output of {places}" if forward else f"the gradient of the output of {places}"
        what += f" reaches the largest finite value of {str(bad[0].dtype).removeprefix('torch.')}"
        # What came first is the cause: forward the first one that was reached, backward likewise.
        phase = "forward" if forward else "backward"
        return self._evidence(phase, what, (), microbatch, module=bad[0].name)

    def _confirm_flag(self, microbatch: int | None) -> Evidence:
        what = "the device has set its overflow flag"
        return self._evidence("backward", what, (), microbatch, certain=True)

    def _evidence(
        self,
        phase: str,
        what: str,
        tensors: tuple[TensorEvidence, ...],
        microbatch: int | None,
        *,
        details: Mapping[str, Any] | None = None,
        module: str | None = None,
        certain: bool = False,
    ) -> Evidence:
        self._attentive = self._number + _ATTENTION
        self._prepare()
        device = self._run.host.device if self._run is not None else torch.device("cpu")
        saturating = certain or device_of(device).saturates
        facts = ["every value is finite, so that no look for NaN and Inf finds it"]
        facts.append(
            f"{device} makes the largest finite number of an overflow"
            if saturating
            else f"{device} itself makes Inf of an overflow: look for a clamp or nan_to_num on the way"
        )
        where = module if module is not None else (tensors[0].name.rpartition(".")[0] if tensors else None)
        remedy = [
            "lower the loss scale" if phase == "backward" else "compute it in float32, or use bfloat16",
            "use bfloat16 instead of float16",
        ]
        if saturating:
            remedy.append(
                "on Ascend A2 and A3 unset INF_NAN_MODE_FORCE_DISABLE and INF_NAN_MODE_ENABLE: INF/NAN mode "
                "is the default there; the Atlas training series (910A) has only this one"
            )
        return Evidence(
            kind=Kind.SATURATION,
            action=Action.parse(self.action),
            message=f"{what}: an overflow that does not show",
            tensors=tensors,
            microbatch=microbatch,
            diagnosis=Diagnosis(
                cause="precision",
                confidence=0.9 if saturating else 0.7,
                phase=phase,
                module=where,
                evidence=tuple(facts),
                remedy=tuple(remedy),
            ),
            details=details or {},
            about=tuple(tensor.name for tensor in tensors),
        )


def _unless(overflow: Tensor | None, finding: Finding) -> Finding:
    """Return the finding, void where the GradScaler has seen an overflow: it drops the step by itself."""
    if overflow is None:
        return finding
    handled = overflow.reshape(()) > 0
    return replace(finding, value=finding.value.logical_and(handled.logical_not().to(finding.value.device)))
