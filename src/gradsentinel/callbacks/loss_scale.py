"""The loss scale over time: sinking, going back and forth, never growing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsentinel import events
from gradsentinel.callback import Detector
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Diagnosis, Evidence, Finding
from gradsentinel.run import Run

_USUAL_INTERVAL = 2000
"""Steps after which torch's GradScaler tries a larger scale, unless it was told otherwise."""
_FEW = 3.0
"""So many times the overflows that trying a larger scale costs are no sign of trouble."""


@dataclass(kw_only=True)
class LossScaleCallback(Detector):
    """Warns when a loss scaler is in trouble, long before its scale has collapsed.

    Its search for a scale at the start is passed over. Sinking: the scale falls further and further, so
    gradients become small enough to be rounded to 0. Oscillating: it overflows in too many steps, each of
    which is lost. Never growing: it does not try a larger scale although nothing overflows, as when
    `scaler.update()` is not called. From numbers that the sentinel reads anyway: nothing on the device.
    `NanCallback` drops the step and stops the run when the scale has collapsed. Called on: every rank.
    """

    window: int = 200
    """Attempted steps over which overflows are counted."""
    max_overflows: float = 0.1
    """Share of these that may overflow; more if the scaler is set to grow often."""
    max_fall: float = 256.0
    """Warn when the scale has fallen to less than the largest one by this factor."""
    patience: float = 4.0
    """Warn when the scale has not grown within so many of the scaler's growth intervals without overflow."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _recent: deque[bool] = field(default_factory=deque, init=False, repr=False)
    """Which of the last steps overflowed."""
    _searching: bool = field(default=True, init=False, repr=False)
    """Until the first step that does not overflow."""
    _largest: float = field(default=0.0, init=False, repr=False)
    _last: float = field(default=0.0, init=False, repr=False)
    _unchanged: int = field(default=0, init=False, repr=False)
    """Steps without overflow since the scale changed last."""
    _told: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    """When each trouble was reported last."""

    def __post_init__(self) -> None:
        if self.window < 1 or not 0 < self.max_overflows <= 1:
            raise ConfigurationError(
                "window is a number of steps, at least 1, max_overflows a share, up to 1"
            )
        if not self.max_fall > 1 or not self.patience > 0:
            raise ConfigurationError("max_fall is a factor above 1, patience a number of intervals above 0")
        self._recent = deque(self._recent, maxlen=self.window)

    def on_run_start(self, event: events.RunStart) -> None:
        """Remember the run."""
        self._run = event.run

    def on_after_step(self, event: events.AfterStep) -> Sequence[Finding]:
        """Take note of the scale; what is wrong is told with the next step."""
        scale = event.loss_scale
        if scale is None:
            return ()
        overflow = event.scaler_skipped
        if self._searching:
            self._searching = overflow
            self._largest, self._last = scale, scale
            return ()
        self._recent.append(overflow)
        self._unchanged = self._unchanged + 1 if scale == self._last and not overflow else 0
        self._last, self._largest = scale, max(self._largest, scale)
        findings = []
        for trouble, words in self._troubles(scale).items():
            if event.iteration - self._told.get(trouble, -self.window) >= self.window:
                self._told[trouble] = event.iteration
                findings.append(self._finding(trouble, words))
        return findings

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Begin anew where the run goes on: the scaler was put back too."""
        if event.recovery.step is not None:
            self._recent.clear()
            self._unchanged = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen of the scale."""
        return {
            "recent": list(self._recent),
            "searching": self._searching,
            "largest": self._largest,
            "last": self._last,
            "unchanged": self._unchanged,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._recent = deque(state["recent"], maxlen=self.window)
        self._searching = bool(state["searching"])
        self._largest, self._last = float(state["largest"]), float(state["last"])
        self._unchanged = int(state["unchanged"])

    def _troubles(self, scale: float) -> dict[str, str]:
        found = {}
        interval = self._growth_interval()
        if interval is not None and self._unchanged >= self.patience * interval:
            found["stands"] = (
                f"the loss scale has stood at {scale:g} for {self._unchanged} steps without an overflow, "
                f"although the scaler grows every {interval}"
            )
        overflows = sum(self._recent)
        allowed = max(self.max_overflows, _FEW / ((interval or _USUAL_INTERVAL) + 1))
        if len(self._recent) == self.window and overflows > allowed * self.window:
            found["oscillates"] = (
                f"{overflows} of the last {self.window} steps overflowed and were lost, at a loss scale "
                f"of about {scale:g}"
            )
        if 0 < scale * self.max_fall < self._largest:
            found["sinks"] = f"the loss scale has sunk from {self._largest:g} to {scale:g} and may collapse"
        return found

    def _growth_interval(self) -> int | None:
        """After how many steps the scaler tries a larger scale; None if it never does, or nobody knows."""
        scaler = None if self._run is None else self._run.host.stateful().get("scaler")
        if scaler is None or not hasattr(scaler, "get_growth_interval"):
            return None
        return int(scaler.get_growth_interval()) if scaler.get_growth_factor() > 1 else None

    def _finding(self, trouble: str, words: str) -> Finding:
        remedy = {
            "stands": ("call scaler.update() after each step, on the scaler that scales the loss",),
            "oscillates": (
                "raise the scaler's growth_interval, so that it tries a larger scale less often",
                "compute in bfloat16, which needs no loss scale",
            ),
            "sinks": (
                "look for the module whose gradients grow: HeadroomCallback names it",
                "compute that module in float32, or all in bfloat16",
                "clip gradients, or lower the learning rate",
            ),
        }[trouble]
        evidence = Evidence(
            kind=Kind.LOSS_SCALE,
            action=Action.WARN,
            message=words,
            diagnosis=Diagnosis(cause="precision", confidence=0.5, phase="backward", remedy=remedy),
            details={"loss_scale": self._last, "largest": self._largest, "subject": trouble},
        )
        return Finding(
            kind=Kind.LOSS_SCALE, value=torch.tensor(True), action=Action.WARN, confirm=lambda: evidence
        )
