"""What a step should have come to: the same step without its fault, from the same state, on a copy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradsentinel.campaign.kinds import Site
from gradsentinel.campaign.schedule import Planned
from gradsentinel.campaign.workloads.text import MAX_NORM, Batch
from gradsentinel.faults import FaultPlan

LossOf = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What became of the weights in the step of a fault, beside the same step without it."""

    number: int
    unchanged: bool
    """They are as before: the step was dropped."""
    exact: bool
    """They, and the optimizer's state, are bit for bit those of the step without the fault."""
    finite: bool
    deviation: float
    """Distance to the weights of the step without the fault, as a fraction of the length of its update."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What a fault does to an unguarded step, measured on a copy of the fault-free run at that place."""

    number: int
    fired: bool
    finite: bool
    """Loss, gradients and weights stay finite."""
    loss: float
    loss_without: float
    norm: float
    norm_without: float
    deviation: float
    """As in `Effect`."""
    hit: dict[str, Any] | None
    """The first of what was injected: rank, place, bit, operator."""

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {name: _plain(value) for name, value in asdict(self).items()}


class State:
    """Weights, optimizer state and random state at one moment."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.optimizer = copy.deepcopy(optimizer.state_dict())
        self.random = torch.get_rng_state()
        self.scale = scale

    def put_into(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put it into a model and its optimizer, and into the random generator."""
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.weights[name])
        optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        torch.set_rng_state(self.random)

    def finite(self) -> bool:
        """Return whether every number in it is."""
        moments = [v for entry in self.optimizer["state"].values() for v in entry.values()]
        return all(
            bool(t.isfinite().all()) for t in (*self.weights.values(), *moments) if isinstance(t, Tensor)
        )

    def same(self, other: State) -> bool:
        """Return whether weights and optimizer state are bit for bit those of the other."""
        mine, theirs = self.optimizer["state"], other.optimizer["state"]
        return all(torch.equal(w, other.weights[n]) for n, w in self.weights.items()) and all(
            torch.equal(value, theirs.get(key, {}).get(name, torch.tensor(math.nan)))
            for key, entry in mine.items()
            for name, value in entry.items()
        )

    def distance(self, other: State) -> float:
        """Return the 2-norm of the difference of the weights; inf if one is not finite."""
        total = sum(
            float((w.double() - other.weights[n].double()).square().sum()) for n, w in self.weights.items()
        )
        return math.sqrt(total) if math.isfinite(total) else math.inf


class Probe:
    """Holds a copy of model and optimizer on which single steps are made; leaves the run as it is."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_of: LossOf,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    ) -> None:
        self._run = model, optimizer
        self.model = copy.deepcopy(model)
        self.optimizer = make_optimizer(self.model)
        self._loss_of = loss_of
        self._before: State | None = None

    def before(self, scale: float = 1.0) -> None:
        """Remember the state: the step of a fault comes next, and nothing of it has happened."""
        self._before = State(*self._run, scale)

    def after(self, number: int, batch: Batch) -> Effect:
        """Compare the state now with that of the same step without the fault."""
        before, now = self._before, State(*self._run)
        assert before is not None
        with torch.random.fork_rng(devices=[]):
            self._step(before, batch)
            right = State(self.model, self.optimizer)
        length = right.distance(before)
        deviation = now.distance(right)
        unchanged = all(torch.equal(w, now.weights[n]) for n, w in before.weights.items())
        return Effect(
            number=number,
            unchanged=unchanged,
            exact=now.same(right),
            finite=now.finite(),
            deviation=deviation / length if length > 0 else math.inf if deviation else 0.0,
        )

    def try_fault(self, faults: Sequence[Planned], seed: int, number: int, batch: Batch) -> Truth:
        """Make the step with its fault on the copy, from the state that `before` remembered."""
        before = self._before
        assert before is not None
        with torch.random.fork_rng(devices=[]):
            loss_without, norm_without = self._step(before, batch)
            right = State(self.model, self.optimizer)
            before.put_into(self.model, self.optimizer)
            site = Site(optimizer=self.optimizer, scale=_Scale(before))
            plan = FaultPlan([one.fault(site) for one in faults], seed=seed, rank=0)
            scale = before.scale
            with plan.attach(self.model), plan.at(number):
                loss, norm = self._step(None, plan.poison(batch), before)
            before.scale = scale
            now = State(self.model, self.optimizer)
        length = right.distance(before)
        return Truth(
            number=number,
            fired=bool(plan.log),
            finite=math.isfinite(loss) and math.isfinite(norm) and now.finite(),
            loss=loss,
            loss_without=loss_without,
            norm=norm,
            norm_without=norm_without,
            deviation=now.distance(right) / length if length > 0 else math.inf,
            hit=plan.log[0].as_dict() if plan.log else None,
        )

    def _step(self, start: State | None, batch: Batch, scaled: State | None = None) -> tuple[float, float]:
        """Make one step on the copy; return loss and gradient norm."""
        if start is not None:
            start.put_into(self.model, self.optimizer)
        scaled = scaled or start
        assert scaled is not None
        self.optimizer.zero_grad()
        loss = self._loss_of(self.model, batch)
        (loss * scaled.scale).backward()  # type: ignore[no-untyped-call]
        if scaled.scale != 1.0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / scaled.scale if scaled.scale else math.inf)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return float(loss.detach()), float(norm)


class _Scale:
    """The loss scale of a state, for a fault to sit in."""

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def scale(self) -> float:
        return self._state.scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._state.scale = value


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
