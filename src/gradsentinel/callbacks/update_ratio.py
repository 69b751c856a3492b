"""How much an update changes the weights: too much, or nothing at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsentinel import events
from gradsentinel.callback import Detector
from gradsentinel.callbacks.lifeless import asks
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Diagnosis, Evidence, Finding
from gradsentinel.gradients import GradientView
from gradsentinel.incident import fold
from gradsentinel.measures.inspection import inspect_tensor, local, readable
from gradsentinel.measures.named import gradient_of
from gradsentinel.run import Run

_MANY = 16
"""The update of fewer elements may round to nothing."""
_REMEMBERED = 16
_SUMS = 2**12
"""Sums of values that cancel are as far from 0 as so many roundings of float32, or ..."""
_ROUNDINGS = 8
"""... as so many of the values themselves, compared with a gradient for which nothing cancels."""


@dataclass(slots=True)
class _Part:
    """Some elements of a weight, as they were before the step."""

    name: str
    parameter: Tensor
    optimizer: Optimizer
    begin: int
    end: int
    before: Tensor
    has_gradient: Tensor
    """0-dim bool."""

    @property
    def now(self) -> Tensor:
        """The elements as they are; the optimizer may have put another tensor in place."""
        return _elements(local(self.parameter).detach(), self.begin, self.end)


@dataclass(slots=True)
class _Sample:
    """The weights that are looked at in one step."""

    step: int
    number: int
    parts: list[_Part]


@dataclass(kw_only=True)
class UpdateRatioCallback(Detector):
    """Warns of updates as large as the weights themselves, and of weights that updates do not move at all.

    In every `every`-th step it copies some weights, at most `max_elements` elements, and compares them in the
    next step; the following sample looks at the next ones. With E elements to train each has been looked at
    after `every * (ceil(E / max_elements) + 1)` steps at the latest. Weights that stand still although they
    have a gradient lose their updates to rounding, as bfloat16 weights do at low learning rates. A bias that
    the next layer cancels is none of them: its gradient is rounding noise next to those of its module, or of
    the model where it is alone. On the device, no wait; nothing on the steps between. Called on: every rank.
    """

    every: int = 50
    """Look at some weights in every so many steps."""
    max_ratio: float = 1.0
    """Warn if the norm of an update is more than so many times that of the weight; judged of weights with two
    dimensions or more, since biases begin at 0."""
    max_elements: int = 2**22
    """So many elements are copied for a sample."""
    warmup: int = 100
    """Not in the first so many steps: what begins at 0 doubles with its first updates."""
    still_after: int = 3
    """Samples in a row in which a weight did not change by a single bit."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _sample: _Sample | None = field(default=None, init=False, repr=False)
    _next: int = field(default=0, init=False, repr=False)
    """The element, counted over all weights, that the next sample begins with."""
    _number: int = field(default=0, init=False, repr=False)
    _still: dict[str, tuple[int, int]] = field(default_factory=dict, init=False, repr=False)
    """For each weight that stood still: in which of its samples last, and how many in a row."""
    _asked: set[str] = field(default_factory=set, init=False, repr=False)
    """Weights that are to be told to stand still."""
    _told: set[str] = field(default_factory=set, init=False, repr=False)
    """Those that were told, and stand still since."""
    _samples: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    """How often each weight was looked at."""
    _sums: _Sums | None = field(default=None, init=False, repr=False)
    """Of the step in which a sample is taken."""
    _applied: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED), init=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.every, self.max_elements, self.still_after) < 1 or self.warmup < 0:
            raise ConfigurationError(
                "every, max_elements and still_after must be at least 1, warmup 0 or more"
            )
        if not self.max_ratio > 0:
            raise ConfigurationError(f"max_ratio={self.max_ratio} must be above 0")

    def on_run_start(self, event: events.RunStart) -> None:
        """Remember the run."""
        self._run = event.run

    @torch.no_grad()
    def on_before_clip(self, event: events.BeforeClip) -> Sequence[Finding]:
        """Compare what was copied in the last step, and copy if it is time."""
        run = self._run
        if run is None:
            return ()
        sample, self._sample = self._sample, None
        findings = self._compare(sample) if sample is not None else []
        if run.iteration >= self.warmup and run.iteration % self.every == 0:
            self._sums = _Sums(event.gradients)
            self._sample = self._take(run, event.step)
            self._sums = None  # gradients must not outlive their step
        return findings

    def on_after_step(self, event: events.AfterStep) -> None:
        """Remember that the step was made."""
        if event.applied:
            self._applied.append(event.step)

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Note what it tells: that is not told again while it goes on."""
        name = type(self).__name__
        if any(c.kind is Kind.STAGNATION and c.detector.startswith(name) for c in event.incident.claims):
            self._told |= self._asked
            self._asked = set()

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Forget the copies when the run goes on from another state."""
        if event.recovery.step is not None:
            self._sample = None

    # -- on the device -------------------------------------------------------------------------------

    def _take(self, run: Run, step: int) -> _Sample | None:
        self._number += 1
        weights = list(self._weights(run))
        total = sum(held.numel() for _, _, _, held in weights)
        if not total:
            return None
        first = self._next if self._next < total else 0
        last = min(first + self.max_elements, total)
        parts, place = [], 0
        sums = self._sums
        for name, parameter, optimizer, held in weights:
            begin, end = max(first - place, 0), min(last - place, held.numel())
            place += held.numel()
            if begin >= end:
                continue
            before = _elements(held, begin, end).clone()
            gradient = gradient_of(parameter)
            has = torch.ones((), dtype=torch.bool, device=held.device)
            if gradient is not None and readable(gradient) is None and not gradient.is_sparse:
                own = local(gradient).detach()
                if own.shape == local(parameter).shape:
                    own = _elements(own, begin, end)
                has = own.any()
                if sums is not None and _is_vector(parameter) and has.device == sums.device:
                    has = has.logical_and(sums.tells(name, own))
            parts.append(_Part(name, parameter, optimizer, begin, end, before, has))
            self._samples[name] = self._samples.get(name, 0) + 1
        self._next = last
        return _Sample(step, self._number, parts)

    def _weights(self, run: Run) -> Iterator[tuple[str, Tensor, Optimizer, Tensor]]:
        """The weights that this step is about to update, each once."""
        names = {id(p): name for name, p in run.host.named_parameters()}
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if gradient_of(parameter) is None or readable(parameter) is not None:
                        continue
                    held = local(parameter).detach()
                    plain = held.layout is torch.strided and not held.is_conj() and held.element_size() > 1
                    if plain and held.numel():
                        yield names.get(id(parameter), "?"), parameter, optimizer, held

    def _compare(self, sample: _Sample) -> list[Finding]:
        ratios: dict[torch.device, list[Tensor]] = {}
        still: dict[torch.device, list[Tensor]] = {}
        for part in sample.parts:
            now, before = part.now, part.before
            if now.shape != before.shape or now.device != before.device:
                continue  # the user has replaced the weight
            change = torch.linalg.vector_norm(now - before, dtype=_dtype(before))
            size = torch.linalg.vector_norm(before, dtype=_dtype(before))
            device = before.device
            if part.parameter.dim() > 1:
                ratio = torch.where(size > 0, change / size, 0.0)
                ratios.setdefault(device, []).append(ratio.to(torch.float32))
            if before.numel() >= _MANY:
                still.setdefault(device, []).append((change == 0).logical_and(part.has_gradient))
        findings = [
            Finding(
                kind=Kind.MAGNITUDE,
                value=torch.stack(found).amax(),
                limit=self.max_ratio,
                action=Action.WARN,
                confirm=partial(self._confirm_ratio, sample, found),
            )
            for found in ratios.values()
        ]
        return findings + [
            Finding(
                kind=Kind.STAGNATION,
                value=torch.stack(found).any(),
                action=Action.WARN,
                confirm=partial(self._confirm_still, sample, device, found),
            )
            for device, found in still.items()
        ]

    # -- on the host, when something is suspected ----------------------------------------------------

    def _confirm_ratio(self, sample: _Sample, found: Sequence[Tensor]) -> Evidence | None:
        device = found[0].device
        parts = [p for p in sample.parts if p.before.device == device and p.parameter.dim() > 1]
        over = {
            part.name: (float(ratio), part)
            for part, ratio in zip(parts, found, strict=True)
            if float(ratio) > self.max_ratio
        }
        if not over:  # not finite: the state is bad, which others say
            return None
        ordered = sorted(over.items(), key=lambda entry: -entry[1][0])
        name, (worst, _) = ordered[0]
        more = f" ({len(ordered)} weights)" if len(ordered) > 1 else ""
        return Evidence(
            kind=Kind.MAGNITUDE,
            action=Action.WARN,
            message=f"step {sample.step} changed {name} by {worst:.3g} times its own norm{more}",
            tensors=tuple(inspect_tensor(one, part.parameter) for one, (_, part) in ordered[:_MANY]),
            diagnosis=Diagnosis(
                cause="optimizer",
                confidence=0.5,
                phase="optimizer",
                remedy=("lower the learning rate, or warm it up over more steps", "clip gradients by norm"),
            ),
            details={"ratios": {one: ratio for one, (ratio, _) in ordered[:_MANY]}, "subject": "ratio"},
            about=tuple(one for one, _ in ordered),
        )

    def _confirm_still(
        self, sample: _Sample, device: torch.device, found: Sequence[Tensor]
    ) -> Evidence | None:
        """Count, for each weight, how many of its samples in a row did not move it; report it once."""
        if sample.step not in self._applied:
            return None
        parts = [p for p in sample.parts if p.before.device == device and p.before.numel() >= _MANY]
        due = []
        for part, flag in zip(parts, found, strict=True):
            rates = [
                group["lr"]
                for group in part.optimizer.param_groups
                if any(part.parameter is one for one in group["params"])
            ]
            if not bool(flag) or any(not float(rate) for rate in rates):
                continue
            number = self._samples[part.name]
            last, streak = self._still.get(part.name, (0, 0))
            streak = streak + 1 if last == number - 1 else 1
            self._still[part.name] = (number, streak)
            if streak == 1:
                self._told.discard(part.name)
            if part.name not in self._told and asks(streak, self.still_after):
                due.append(part)
        if not due:
            return None
        names = [part.name for part in due]
        count = min(self._still[name][1] for name in names)
        self._asked.update(names)
        return Evidence(
            kind=Kind.STAGNATION,
            action=Action.WARN,
            message=f"updates do not change {fold(names)} by a single bit, although it has a gradient "
            f"({count} samples in a row)",
            tensors=tuple(inspect_tensor(part.name, part.parameter) for part in due[:_MANY]),
            diagnosis=Diagnosis(
                cause="precision",
                confidence=0.6,
                phase="optimizer",
                evidence=(f"the weights are {due[0].before.dtype}".replace("torch.", ""),),
                remedy=(
                    "keep float32 master weights: updates this small are lost in rounding",
                    "raise the learning rate",
                ),
            ),
            details={"subject": "still"},
            about=tuple(names),
            once=True,
        )


class _Sums:
    """The squares of the gradients of a step, added up where a vector's are compared with them."""

    def __init__(self, view: GradientView) -> None:
        self._squares = view.norms.detach().to(torch.float32).square()
        self.device = self._squares.device
        self._sizes = [gradient.numel() for gradient in view.gradients]
        self._places: dict[str, int] = {name: place for place, name in enumerate(view.names)}
        self._modules: dict[str, list[int]] = {}
        for name, place in self._places.items():
            self._modules.setdefault(name.rpartition(".")[0], []).append(place)

    def tells(self, name: str, own: Tensor) -> Tensor:
        """Return whether the gradient of a vector is more than rounding noise: 0-dim bool, no wait.

        It is compared by its root mean square. A bias that a normalisation or a softmax cancels gets a sum of
        values that cancel, which is 0 up to rounding; those of the weight beside it do not cancel.
        """
        mine = self._places.get(name)
        others = [place for place in self._modules.get(name.rpartition(".")[0], ()) if place != mine]
        others = others or [place for place in self._places.values() if place != mine]
        size = sum(self._sizes[place] for place in others)
        if not size:
            return torch.ones((), dtype=torch.bool, device=own.device)
        whole = len(others) == len(self._sizes) - 1
        taken = [self._squares[place] for place in others] if not whole else []
        sum_of_others = torch.stack(taken).sum() if taken else self._all_but(mine)
        precise = torch.promote_types(own.dtype, torch.float32)
        noise = max(_SUMS * torch.finfo(precise).eps, _ROUNDINGS * torch.finfo(own.dtype).eps)
        square = torch.linalg.vector_norm(own, dtype=_dtype(own)).square() / own.numel()
        tells: Tensor = square > noise**2 * sum_of_others / size
        return tells

    def _all_but(self, mine: int | None) -> Tensor:
        total = self._squares.sum()
        return total if mine is None else total - self._squares[mine]


def _is_vector(parameter: Tensor) -> bool:
    return parameter.numel() == max(parameter.shape, default=1) and not parameter.is_complex()


def _elements(held: Tensor, begin: int, end: int) -> Tensor:
    """A range of a tensor's elements, without a copy where its layout allows."""
    return held.reshape(-1)[begin:end]


def _dtype(tensor: Tensor) -> torch.dtype | None:
    """What to add squares in: float32 at least."""
    return torch.float32 if tensor.element_size() < 4 else None
