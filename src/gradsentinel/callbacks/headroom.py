"""How far the largest values of a model are from overflowing, and when they will at the present pace."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsentinel import events
from gradsentinel.callback import Detector
from gradsentinel.callbacks.forecast import LEAST_SAMPLES, Forecast, Trend, magnitude
from gradsentinel.callbacks.peaks import GRADIENT, LOGITS, PRODUCT, Peaks, Site
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Diagnosis, Evidence, Finding
from gradsentinel.incident import fold
from gradsentinel.measures.mailbox import Letter, Mailbox
from gradsentinel.run import Run

_NEAR = 6.0
"""Doublings left below which a site is watched more closely, and its growth may be an alarm."""
_CLOSER = 10
"""So many times more often is looked then."""
_TAG = "headroom"


@dataclass(slots=True)
class _Parcel:
    """A sample on its way to the host, in one letter."""

    step: int
    sites: Sequence[Site]
    letter: Letter
    """Smallest and largest value of each site in turn."""
    scaled: bool


@dataclass(kw_only=True)
class HeadroomCallback(Detector):
    """Warns before a value overflows: activations, attention logits, gradients that grow towards the limit.

    On sampled steps it measures what each module puts out, the gradient of that, what a softmax is given
    and the products that attention scores come from, against the largest finite value of their type
    (under autocast, of the type that autocast computes in). A line through the logarithms of the last samples
    tells in which step each will overflow. Hooks are on the modules during sampled steps only. Where
    torch.compile is in use nothing is measured. Called on: every rank.
    """

    every: int = 100
    """Measure in every so many steps, the first one too, and ten times as often while a site has less than
    six doublings left."""
    window: int = 8
    """Samples that a trend is taken from."""
    horizon: int = 1000
    """Warn if a site will overflow within so many steps at the present pace."""
    least_headroom: float = 2.0
    """Warn if a site is within this factor of the largest finite value. Gradients under a GradScaler are
    not judged: the scaler drives them there on purpose."""
    show: int = 10
    """So many sites with the least headroom get a curve of their own in TensorBoard."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _peaks: Peaks | None = field(default=None, init=False, repr=False)
    _trends: dict[Site, Trend] = field(default_factory=dict, init=False, repr=False)
    _parcels: deque[_Parcel] = field(default_factory=deque, init=False, repr=False)
    _mailbox: Mailbox | None = field(default=None, init=False, repr=False)
    _next: int = field(default=0, init=False, repr=False)
    """The next attempted step to measure, if there is no other first."""
    _warned: dict[Site, int] = field(default_factory=dict, init=False, repr=False)
    """When each site was warned of last."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.horizon < 1:
            raise ConfigurationError("every and horizon must be at least 1 step")
        if self.window < LEAST_SAMPLES:
            raise ConfigurationError(f"window={self.window}: a trend takes at least {LEAST_SAMPLES} samples")
        if not self.least_headroom >= 1:
            raise ConfigurationError(f"least_headroom={self.least_headroom} is a factor of at least 1")
        if self.show < 0:
            raise ConfigurationError(f"show={self.show} is a number of curves, 0 or more")

    def norm_bound(self) -> float:
        """Return infinity: it does not judge the step's gradients before they are clipped."""
        return math.inf

    def on_run_start(self, event: events.RunStart) -> None:
        """Measure the first step."""
        self._run = event.run
        self._peaks = Peaks(event.run)
        self._mailbox = Mailbox(event.run.host.device)
        self._prepare(event.run.iteration)

    def on_before_clip(self, event: events.BeforeClip) -> None:
        """Send off what this step measured, and put hooks on for the next one if it is to be measured."""
        run, peaks = self._run, self._peaks
        if run is None or peaks is None or self._mailbox is None:
            return
        if peaks.attached:
            peaks.detach()
            sites, ranges = peaks.take().stacked(run.host.device)
            letter = self._mailbox.post(ranges.flatten())
            scaled = event.loss_scale is not None
            self._parcels.append(_Parcel(run.iteration, sites, letter, scaled))
            self._next = run.iteration + self.every
        if peaks.failure is not None:
            raise peaks.failure
        self._prepare(run.iteration + 1)

    def on_after_step(self, event: events.AfterStep) -> Sequence[Finding]:
        """Read the samples that have arrived by now, publish them, and warn of what is near its limit."""
        findings = []
        while self._parcels and self._parcels[0].letter.arrived():
            found = self._read(self._parcels.popleft())
            if found is not None:
                findings.append(found)
        return findings

    def on_run_end(self, event: events.RunEnd) -> None:
        """Take the hooks off."""
        if self._peaks is not None:
            self._peaks.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the samples."""
        return {
            "next": self._next,
            "trends": [
                [site.name, site.what, site.dtype, [list(sample) for sample in trend.samples]]
                for site, trend in self._trends.items()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the samples back."""
        self._next = state["next"]
        self._trends = {
            Site(name, what, dtype): Trend(deque([(x, y) for x, y in samples], maxlen=self.window))
            for name, what, dtype, samples in state["trends"]
        }

    def forecasts(self) -> list[Forecast]:
        """Return what is known of every site, the one with the least headroom first."""
        found = [trend.forecast(site) for site, trend in self._trends.items()]
        return sorted(found, key=lambda forecast: forecast.doublings)

    def _prepare(self, step: int) -> None:
        if self._peaks is not None and step >= self._next:
            self._peaks.attach(operators=True)

    # -- on the host -----------------------------------------------------------------------------------

    def _read(self, parcel: _Parcel) -> Finding | None:
        largest: dict[Site, float] = {}
        numbers = parcel.letter.read()
        if self._mailbox is not None:
            self._mailbox.take_back(parcel.letter)
        for site, low, high in zip(parcel.sites, numbers[::2], numbers[1::2], strict=True):
            value = magnitude(site, low, high)
            if value is not None:
                largest[site] = max(largest.get(site, 0.0), value)
        for site, value in largest.items():
            trend = self._trends.setdefault(site, Trend(deque(maxlen=self.window)))
            trend.add(parcel.step, value)
        forecasts = [self._trends[site].forecast(site) for site in largest]
        forecasts.sort(key=lambda forecast: forecast.doublings)
        judged = [f for f in forecasts if not (parcel.scaled and f.site.what == GRADIENT)]
        if judged and judged[0].doublings < _NEAR:
            self._next = min(self._next, parcel.step + max(1, self.every // _CLOSER))
        self._publish(forecasts, parcel.step)
        alarming = [f for f in judged if self._alarms(f) and self._is_news(f.site, parcel.step)]
        if not alarming:
            return None
        evidence = self._evidence(alarming)
        return Finding(
            kind=Kind.MAGNITUDE, value=torch.tensor(True), action=Action.WARN, confirm=lambda: evidence
        )

    def _alarms(self, forecast: Forecast) -> bool:
        """True if there is no headroom left, or little that will be used up soon."""
        if forecast.doublings <= math.log2(self.least_headroom):
            return True
        soon = forecast.steps is not None and forecast.steps <= self.horizon
        return soon and forecast.doublings < _NEAR

    def _is_news(self, site: Site, step: int) -> bool:
        """True unless the site was warned of within the horizon."""
        before = self._warned.get(site)
        if before is not None and step - before < self.horizon:
            return False
        self._warned[site] = step
        return True

    def _publish(self, forecasts: Sequence[Forecast], step: int) -> None:
        """Leave the numbers where TensorBoard finds them: doublings that are left."""
        if self._run is None:
            return
        numbers: dict[str, float] = {}
        for forecast in forecasts:
            numbers.setdefault(f"{_TAG}/{forecast.site.what.replace(' ', '_')}", forecast.doublings)
        for forecast in forecasts[: self.show]:
            site = forecast.site
            numbers[f"{_TAG}/{site.what}/{site.name or 'model'}"] = forecast.doublings
        soonest = min((f.steps for f in forecasts if f.steps is not None), default=None)
        if soonest is not None:
            numbers[f"{_TAG}/overflow_in_steps"] = soonest
        for name, value in numbers.items():
            self._run.metrics[name] = (step, value)

    def _evidence(self, alarming: Sequence[Forecast]) -> Evidence:
        worst = alarming[0]
        where = fold([str(forecast.site) for forecast in alarming])
        return Evidence(
            kind=Kind.MAGNITUDE,
            action=Action.WARN,
            message=worst.words + (f" (of {len(alarming)}: {where})" if len(alarming) > 1 else ""),
            diagnosis=Diagnosis(
                cause="precision",
                confidence=0.6,
                phase="backward" if worst.site.what == GRADIENT else "forward",
                module=worst.site.name.partition(":")[0],
                evidence=tuple(forecast.words for forecast in alarming[:16]),
                remedy=_remedy(worst.site),
            ),
            details={"headroom": {str(f.site): round(f.doublings, 3) for f in alarming[:16]}},
            about=tuple(str(forecast.site) for forecast in alarming),
        )


def _remedy(site: Site) -> tuple[str, ...]:
    where = site.name or "the model"
    if site.what in {LOGITS, PRODUCT}:
        return (
            f"normalise queries and keys in {where}, or scale the query before the product",
            "lower the learning rate or add weight decay: logits that grow for ever overflow sooner or later",
            f"compute the scores of {where} in float32 or bfloat16",
        )
    if site.what == GRADIENT:
        return ("lower the loss scale, or the learning rate", f"compute {where} in float32 or bfloat16")
    return (
        f"compute {where} in float32 or bfloat16",
        f"normalise what {where} is given, or clamp its output",
    )
