"""What a detector sees of a training run, step by step: recorded from real runs, with and without faults."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import runs
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

CACHE = Path(__file__).with_name(".cache") / "traces"
STEPS = 1200
SETTLED = 200
"""Faults begin here, but in the warm-up regime: every rule has seen enough by then."""
AFTER = 10
"""So many steps after a fault that was applied are neither right nor wrong to flag."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One player of one run."""

    name: str
    loss: list[float]
    norms: list[list[float]]
    """2-norm of each tensor's gradient, for each step."""
    ratio: list[float]
    """Largest g^2/v of any element; v is Adam's second moment (0.999, bias-corrected) of the step before."""
    events: list[list[int]] = field(default_factory=list)
    """The steps of each fault."""
    ignored: frozenset[int] = frozenset()
    """Steps that are neither right nor wrong to flag."""

    @property
    def norm(self) -> list[float]:
        """The global norm of each step."""
        return [math.sqrt(math.fsum(value * value for value in values)) for values in self.norms]

    def __len__(self) -> int:
        return len(self.loss)


# -- recording -------------------------------------------------------------------------------------


class _Moments:
    """Adam's second moments, kept apart from any optimizer."""

    def __init__(self, parameters: list[Tensor], beta: float = 0.999) -> None:
        self.beta = beta
        self.steps = 0
        self.moments = [torch.zeros_like(p) for p in parameters]

    def see(self, gradients: list[Tensor], *, learn: bool) -> float:
        """Return the largest g^2/v, and take the gradients in."""
        largest = 0.0
        if self.steps:
            correction = 1 - self.beta**self.steps
            for gradient, moment in zip(gradients, self.moments, strict=True):
                found = (gradient.square() / (moment / correction + 1e-30)).max()
                largest = max(largest, float(found))
        if learn:
            self.steps += 1
            for gradient, moment in zip(gradients, self.moments, strict=True):
                moment.mul_(self.beta).add_(gradient.square(), alpha=1 - self.beta)
        return largest


def record(name: str, seed: int, *, faults: str = "none") -> list[Trace]:
    """Train and record, one trace per player; `faults` is none, dropped or applied."""
    run = runs.RUNS[name](seed, STEPS)
    players = len(run.turns)
    dice = random.Random(f"{name} {seed} {faults}")
    plan = _plan(dice, STEPS, spacing=60 if faults == "applied" else 25) if faults != "none" else {}
    moments = [_Moments(runs.parameters_of(optimizer)) for optimizer in run.optimizers]
    found: list[dict[str, list[Any]]] = [{"loss": [], "norms": [], "ratio": []} for _ in range(players)]
    events: list[list[list[int]]] = [[] for _ in range(players)]
    guard = _Data(run, dice)
    iterator = runs.steps_of(run, STEPS)
    for number in range(STEPS):
        kind = plan.get(number)
        with guard.spoiled(kind):
            player, loss = next(iterator)
        parameters = runs.parameters_of(run.optimizers[player])
        factor = _spoil(kind, parameters, dice, gentle=faults == "applied")
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        mine = found[player]
        if kind is not None:
            events[player].append([len(mine["loss"])])
        mine["loss"].append(float(loss) * factor)
        mine["norms"].append(torch.stack(torch._foreach_norm(gradients)).tolist())
        mine["ratio"].append(moments[player].see(gradients, learn=kind is None or faults == "applied"))
        if kind is not None and faults == "dropped":
            run.optimizers[player].zero_grad()
    traces = []
    for player in range(players):
        after = {s + k for e in events[player] for s in e for k in range(1, AFTER + 1)}
        ignored = frozenset(after) if faults == "applied" else frozenset()
        label = f"{name}-{seed}" + (f"-player{player}" if players > 1 else "")
        traces.append(Trace(name=label, **found[player], events=events[player], ignored=ignored))
    return traces


def _plan(dice: random.Random, steps: int, *, spacing: int) -> dict[int, str]:
    plan, step = {}, SETTLED + dice.randrange(spacing)
    while step < steps:
        plan[step] = dice.choice(["data", "loss", "tensor", "bit"])
        step += spacing // 2 + dice.randrange(spacing)
    return plan


class _Data:
    """Spoils what goes into the model: other characters, or numbers twenty times too large."""

    def __init__(self, run: runs.Training, dice: random.Random) -> None:
        self.run = run
        self.dice = dice

    @contextmanager
    def spoiled(self, kind: str | None) -> Iterator[None]:
        """Spoil the data of the next step, if that is the fault."""
        if kind != "data":
            yield
            return

        def spoil(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            first, *rest = arguments
            if first.is_floating_point():
                return (first * 20, *rest)
            order = torch.randperm(
                first.numel(), generator=torch.Generator().manual_seed(self.dice.randrange(10**6))
            )
            return (first.flatten()[order].view_as(first).flip(1), *rest)

        hooks = [module.register_forward_pre_hook(spoil) for module in self.run.inputs]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _spoil(kind: str | None, parameters: list[Tensor], dice: random.Random, *, gentle: bool) -> float:
    """Spoil the gradients, if that is the fault; returns what the loss is to be multiplied with."""
    held = [p for p in parameters if p.grad is not None]
    largest = max(held, key=lambda p: float(p.grad.norm())) if held else None
    if largest is None:
        return 1.0
    if kind == "loss":  # a sum for a mean, a weight gone wrong
        factor = 10 ** dice.uniform(1.0, 1.5 if gentle else 3.0)
        for parameter in held:
            parameter.grad.mul_(factor)
        return factor
    if kind == "tensor":  # an operator gone wrong
        chosen = dice.choice(held) if float(dice.random()) < 0.5 else largest
        wanted = 10 ** dice.uniform(1.0, 1.5 if gentle else 3.0)
        total = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in held))
        chosen.grad.mul_(wanted * total / max(float(chosen.grad.norm()), 1e-12))
    if kind == "bit":  # an exponent bit of the largest element
        flat = largest.grad.view(-1)
        place = int(flat.abs().argmax())
        flat[place] *= 2.0 ** (8 if gentle else dice.choice([8, 16, 32, 64]))
    return 1.0


def load(name: str, seed: int, *, faults: str = "none") -> list[Trace]:
    """Return recorded traces, from the cache if they are there."""
    path = CACHE / f"{name}-{seed}-{faults}.safetensors"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        content: dict[str, Tensor] = {}
        for number, trace in enumerate(record(name, seed, faults=faults)):
            content[f"{number}.loss"] = torch.tensor(trace.loss)
            content[f"{number}.norms"] = torch.tensor(trace.norms)
            content[f"{number}.ratio"] = torch.tensor(trace.ratio, dtype=torch.float64)
            content[f"{number}.events"] = torch.tensor([e[0] for e in trace.events], dtype=torch.int64)
        save_file(content, path)
    content = load_file(path)
    traces = []
    for number in range(len(content) // 4):
        events = [[step] for step in content[f"{number}.events"].tolist()]
        after = {s + k for (s,) in events for k in range(1, AFTER + 1)} if faults == "applied" else set()
        traces.append(
            Trace(
                name=f"{name}-{seed}.{number}",
                loss=content[f"{number}.loss"].tolist(),
                norms=content[f"{number}.norms"].tolist(),
                ratio=content[f"{number}.ratio"].tolist(),
                events=events,
                ignored=frozenset(after),
            )
        )
    return traces


# -- regimes: what is done to a recorded trace -----------------------------------------------------

Regime = Callable[[Trace, random.Random], Trace]


def spikes(
    trace: Trace,
    dice: random.Random,
    *,
    factor: tuple[float, float] = (8.0, 100.0),
    length: tuple[int, int] = (1, 1),
    first: int = SETTLED,
    last: int | None = None,
    spacing: int = 30,
) -> Trace:
    """Multiply gradient norms at random places; a third with the loss, a third in one tensor only."""
    loss, norms, ratio = list(trace.loss), [list(values) for values in trace.norms], list(trace.ratio)
    events: list[list[int]] = []
    step = first + dice.randrange(spacing)
    end = len(trace) if last is None else last
    while step < end:
        size = dice.randint(*length)
        steps = [s for s in range(step, step + size) if s < len(trace)]
        low, high = factor
        kind = dice.choice(["batch", "gradient", "tensor"])
        place = dice.randrange(len(norms[0]))
        for s in steps:
            times = low * (high / low) ** dice.random()
            ratio[s] *= times * times
            if kind == "tensor":
                total = math.sqrt(sum(value * value for value in norms[s]))
                norms[s][place] = times * total
            else:
                norms[s] = [times * value for value in norms[s]]
            if kind == "batch":
                loss[s] *= dice.uniform(1.5, 5.0)
        events.append(steps)
        step += size + spacing // 2 + dice.randrange(spacing)
    return replace(trace, loss=loss, norms=norms, ratio=ratio, events=events)


def drifting(trace: Trace, dice: random.Random) -> Trace:
    """The norms grow or shrink sixteenfold over the run, the loss by half; then spikes."""
    sign = dice.choice([-1, 1])
    share = [sign * step / len(trace) for step in range(len(trace))]
    drifted = replace(
        trace,
        loss=[value * 1.5**s for value, s in zip(trace.loss, share, strict=True)],
        norms=[[value * 16**s for value in values] for values, s in zip(trace.norms, share, strict=True)],
    )
    return spikes(drifted, dice)


def noisy(sigma: float) -> Regime:
    """The norms get log-normal noise, the loss a tenth of it; then spikes."""

    def change(trace: Trace, dice: random.Random) -> Trace:
        draw = [dice.gauss(0, sigma) for _ in range(len(trace))]
        changed = replace(
            trace,
            loss=[value * math.exp(0.1 * d) for value, d in zip(trace.loss, draw, strict=True)],
            norms=[[v * math.exp(d) for v in values] for values, d in zip(trace.norms, draw, strict=True)],
        )
        return spikes(changed, dice)

    return change


def shifted(trace: Trace, dice: random.Random) -> Trace:
    """In the middle of the run the norms jump fivefold and the loss by half, to stay; with spikes."""
    middle = len(trace) // 2
    changed = replace(
        trace,
        loss=[value * (1.5 if step >= middle else 1) for step, value in enumerate(trace.loss)],
        norms=[[v * (5 if step >= middle else 1) for v in values] for step, values in enumerate(trace.norms)],
    )
    changed = spikes(changed, dice)
    near = range(middle, middle + 10)  # a new level looks like a spike at first
    events = [e for e in changed.events if not set(e) & set(range(middle - 5, middle + 40))]
    gone = {s for e in changed.events if e not in events for s in e}
    return replace(changed, events=events, ignored=frozenset((*near, *gone)))


REGIMES: dict[str, Regime] = {
    "isolated": spikes,
    "small (x4 to x8)": lambda trace, dice: spikes(trace, dice, factor=(4.0, 8.0)),
    "huge (x1e3 to x1e11)": lambda trace, dice: spikes(trace, dice, factor=(1e3, 1e11)),
    "bursts (2 to 6)": lambda trace, dice: spikes(trace, dice, length=(2, 6), spacing=40),
    "warm-up (first 150)": lambda trace, dice: spikes(trace, dice, first=25, last=150, spacing=16),
    "drift": drifting,
    "noise 0.1": noisy(0.1),
    "noise 0.3": noisy(0.3),
    "noise 0.6": noisy(0.6),
    "level shift": shifted,
}
"""What is done to the healthy traces; the faults of the live ones are real."""
LIVE = {"live faults, dropped": "dropped", "live faults, applied": "applied"}
