"""Two hundred random faults on one rank, of any kind and at any moment: no hang, no disagreement (P4)."""

import contextlib
import hashlib
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsentinel import (
    Action,
    Callback,
    CrossRankCallback,
    Detector,
    Evidence,
    Finding,
    Incident,
    Kind,
    NanCallback,
    Recovery,
    Responder,
    Resync,
    Rollback,
    Sentinel,
    TrainingAborted,
)
from gradsentinel.callback import Comparer
from gradsentinel.incident import Outcome

pytestmark = pytest.mark.multiprocess

STEPS = 5
TIMEOUT = 20.0  # of the agreement: a rank that waits longer ends with a ConsensusError, which is a hang here

EVENTS = (
    *("on_run_start", "on_step_start", "on_batch", "on_after_backward", "on_before_clip"),
    *("on_incident", "on_diagnosis", "on_recovery", "on_after_step", "on_run_end"),
)
FINDING_EVENTS = ("on_run_start", "on_after_backward", "on_before_clip", "on_after_step", "on_run_end")
COMPARING = ("compares", "fingerprints", "differing", "standing", "compared")
PLACES = ("input", "loss", "own gradient", "reduced gradient", "parameter", "buffer", "moment")

STRIKES = (
    *(("poison", place) for place in PLACES),
    *(("raise", method) for method in (*EVENTS, "checks_after_step", "confirm", "examined twice")),
    *(("respond", method) for method in ("escalates", "respond")),
    *(("compare", method) for method in COMPARING),
    *(("answer", method) for method in ("checks_after_step", "compares", "escalates", "respond")),
    *(("finding", event) for event in FINDING_EVENTS),
    *(("restore", place) for place in ("parameter", "moment")),
    *(("uneven", place) for place in PLACES),
)
"""What happens; who, when and beside what is drawn."""


@dataclass(frozen=True)
class Scenario:
    """One fault on one rank, and the run it happens in."""

    number: int
    strike: str
    detail: str
    rank: int
    step: int
    value: float
    action: Action
    accomplice: int | None
    """The rank whose finding brings the incident path along, where the strike needs one."""
    adaptive: bool
    accumulate: tuple[int, ...]
    rollback: bool
    resync: bool
    nan: Action
    checks: int
    """NanCallback looks at the state after every so many steps."""

    def here(self, rank: int, step: int) -> bool:
        return (rank, step) == (self.rank, self.step)


def draw(number: int, world_size: int) -> Scenario:
    """Return the scenario of this number; the same one always, on every rank."""
    dice = random.Random(f"{number} of {world_size}")
    strike, detail = STRIKES[number % len(STRIKES)]
    needs_incident = strike in {"raise", "respond", "compare"} or detail in {"escalates", "respond"}
    same = dice.choice([1, 1, 2])
    action = dice.choice([Action.WARN, Action.RETRY, Action.SKIP, Action.ROLLBACK, Action.ABORT])
    uneven = tuple(dice.choice([1, 2, 3]) for _ in range(world_size))
    return Scenario(
        number=number,
        strike=strike,
        detail=detail,
        rank=dice.randrange(world_size),
        step=dice.randrange(1, STEPS),  # optimizer moments exist from step 1 on
        value=dice.choice([float("nan"), float("inf"), float("-inf")]),
        action=Action.RETRY if detail in {"respond", "escalates"} else action,  # else nobody is asked
        accomplice=dice.randrange(world_size) if needs_incident else None,
        adaptive=dice.random() < 0.5,
        accumulate=uneven if strike == "uneven" else (same,) * world_size,
        rollback=strike == "restore" or dice.random() < 0.7,
        resync=dice.random() < 0.3,
        nan=dice.choice([Action.RETRY, Action.SKIP, Action.ROLLBACK, Action.ABORT]),
        checks=dice.choice([1, 2, 100]),
    )


class Striker:
    """Raises, or answers otherwise than its peers, in one method on one rank."""

    scenario: Scenario

    def strike(self, method: str, step: int | None = None) -> bool:
        once = self.scenario.step if step is None or method in {"on_run_start", "on_run_end"} else step
        return self.scenario.detail == method and self.scenario.here(dist.get_rank(), once)

    def raise_in(self, method: str, step: int | None = None) -> None:
        if self.scenario.strike != "answer" and self.strike(method, step):
            raise ValueError(f"{method} fails on rank {dist.get_rank()}")


@dataclass(kw_only=True)
class Shaky(Striker, Detector):
    """Raises in one event, or returns a finding there, on one rank."""

    scenario: Scenario

    def _hear(self, method: str, event: Any) -> Finding | None:
        if self.scenario.strike == "finding":
            return self._finding(self.scenario.action) if self.strike(method, event.step) else None
        self.raise_in(method, event.step)
        return None

    def _finding(self, action: Action) -> Finding:
        return Finding(kind=Kind.CUSTOM, value=torch.tensor(True), action=action, message="only here")

    def on_run_start(self, event: Any) -> Finding | None:
        return self._hear("on_run_start", event)

    def on_step_start(self, event: Any) -> None:
        self._hear("on_step_start", event)

    def on_batch(self, event: Any) -> None:
        self._hear("on_batch", event)

    def on_after_backward(self, event: Any) -> Finding | None:
        return self._hear("on_after_backward", event)

    def on_before_clip(self, event: Any) -> Finding | None:
        return self._hear("on_before_clip", event)

    def on_incident(self, event: Any) -> None:
        self._hear("on_incident", event)

    def on_diagnosis(self, event: Any) -> None:
        self._hear("on_diagnosis", event)

    def on_recovery(self, event: Any) -> None:
        self._hear("on_recovery", event)

    def on_after_step(self, event: Any) -> Finding | None:
        return self._hear("on_after_step", event)

    def on_run_end(self, event: Any) -> Finding | None:
        return self._hear("on_run_end", event)

    def checks_after_step(self, step: int) -> bool:
        self.raise_in("checks_after_step", step)
        return self.strike("checks_after_step", step)


@dataclass(kw_only=True)
class Accomplice(Striker, Detector):
    """Suspects something on one rank, in the step of the strike, so that the incident path is walked."""

    scenario: Scenario

    def on_before_clip(self, event: Any) -> list[Finding]:
        scenario = self.scenario
        if scenario.accomplice != dist.get_rank() or event.step != scenario.step:
            return []
        twice = 2 if scenario.detail == "examined twice" else 1
        return [
            Finding(
                kind=Kind.NONFINITE_GRADIENT,
                value=torch.tensor(True),
                action=scenario.action,
                confirm=self._confirm,
            )
            for _ in range(twice)
        ]

    def _confirm(self) -> Evidence:
        if self.scenario.detail == "confirm":
            raise ValueError("confirm fails")
        return Evidence(
            kind=Kind.CUSTOM,
            action=self.scenario.action,
            message="only here",
            details={"cannot be pickled": lambda: None},
        )


@dataclass(kw_only=True)
class ShakyResponder(Striker, Responder):
    """Raises on one rank when it is asked to help, or helps on one rank alone."""

    scenario: Scenario
    rung = Action.RETRY

    def escalates(self, incident: Incident, run: Any) -> bool:
        self.raise_in("escalates")
        return self.strike("escalates")

    def respond(self, incident: Incident, run: Any) -> Recovery | None:
        self.raise_in("respond")
        if self.strike("respond"):
            run.undo_step()
            return Recovery(outcome=Outcome.SKIPPED, apply=False, message="only here")
        return None


@dataclass(kw_only=True)
class ShakyComparer(Striker, Comparer):
    """Compares a number that differs in the step of the strike, and raises on one rank on the way."""

    scenario: Scenario
    _step: int = 0

    def compares(self, step: int) -> bool:
        self._step = step
        self.raise_in("compares", step)
        return (
            step == self.scenario.step if self.scenario.strike == "compare" else self.strike("compares", step)
        )

    def width(self, group: Any) -> int:
        return 3

    def fingerprints(self, group: Any) -> Tensor:
        self.raise_in("fingerprints", self._step)
        odd = self.scenario.detail in {"differing", "fingerprints"} and self._step == self.scenario.step
        return torch.tensor([7, 8, dist.get_rank() if odd else 9])

    def differing(self, step: int, group: Any, places: Any, own: int) -> Finding:
        self.raise_in("differing", step)
        return Finding(kind=Kind.CUSTOM, value=torch.tensor(True), action=Action.WARN, message="differs")

    def standing(self) -> Tensor:
        self.raise_in("standing", self._step)
        return torch.tensor(1.0)

    def compared(self, step: int, own: float, others: tuple[float, float]) -> None:
        self.raise_in("compared", step)


@dataclass
class Sidecar:
    """A further part of the training state, which one rank cannot put back."""

    broken: bool
    steps: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.broken:
            raise OSError("the restore fails on this rank")
        self.steps = state["steps"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()) * self.scale


def callbacks_for(scenario: Scenario) -> list[Callback]:
    callbacks: list[Callback] = [
        NanCallback(action=scenario.nan, state_warmup=0, state_every=scenario.checks),
        CrossRankCallback(every=2),
        Shaky(scenario=scenario),
        Accomplice(scenario=scenario),
    ]
    if scenario.strike in {"respond", "answer"}:
        callbacks.append(ShakyResponder(scenario=scenario))
    if scenario.strike in {"compare", "answer"}:
        callbacks.append(ShakyComparer(scenario=scenario))
    if scenario.resync:
        callbacks.append(Resync())
    if scenario.rollback:
        callbacks.append(Rollback(every=2, confirm_after=scenario.number % 2))
    return callbacks


def play(scenario: Scenario, rank: int, folder: Path) -> dict[str, Any]:
    """Run the scenario on this rank and say how it ended."""
    torch.manual_seed(scenario.number)
    model = Model()
    # DDP copies rank 0's buffers over those of the others, which would heal them.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["scale"])
    parallel = DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parallel.parameters(), 0.05, momentum=0.9)
    if scenario.adaptive:
        optimizer = torch.optim.AdamW(parallel.parameters(), 1e-2)
    accumulate = scenario.accumulate[rank]
    numbers = torch.Generator().manual_seed(1000 * scenario.number + rank)
    batches = [torch.randn(6, 4, generator=numbers) for _ in range(STEPS * accumulate)]
    sidecar = Sidecar(broken=scenario.strike == "restore" and rank == scenario.rank)
    applied: list[bool] = []
    error: BaseException | None = None
    sentinel: Sentinel | None = None
    try:
        sentinel = Sentinel(
            parallel,
            optimizer,
            callbacks=callbacks_for(scenario),
            run_dir=folder / str(scenario.number),
            extra={"sidecar": sidecar},
            timeout=TIMEOUT,
        )
        with sentinel:
            for number, batch in enumerate(sentinel.steps(batches, accumulate=accumulate)):
                step, micro = divmod(number, accumulate)
                struck = (
                    Strike(scenario, model, optimizer) if _is_poison(scenario, rank, step, micro) else None
                )
                last = micro == accumulate - 1
                with contextlib.nullcontext() if last else parallel.no_sync():
                    loss = parallel(struck.before(batch) if struck else batch).square().mean()
                    sentinel.backward(struck.loss(loss) if struck else loss)
                if struck:
                    struck.after()
                sidecar.steps += 1
                if sentinel.step(max_norm=1.0) is not None:
                    applied.append(sentinel.applied)
    except TrainingAborted as caught:
        error = caught
    state = [p.detach() for p in model.parameters()]
    moments = [v for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, Tensor)]
    return {
        "error": "" if error is None else type(error).__name__,
        "applied": applied,
        "incidents": [] if sentinel is None else list(told(sentinel.incidents)),
        "step": None if sentinel is None else sentinel.step_count,
        "bits": bits([*state, *moments]),
        "finite": all(bool(t.isfinite().all()) for t in (*state, *moments, *model.buffers())),
    }


def _is_poison(scenario: Scenario, rank: int, step: int, micro: int) -> bool:
    return scenario.strike in {"poison", "restore", "uneven"} and micro == 0 and scenario.here(rank, step)


def told(incidents: Iterable[Incident]) -> Iterator[tuple[Any, ...]]:
    for incident in incidents:
        ranks = [rank.rank for rank in incident.ranks]
        yield incident.id, incident.step, incident.action.label, str(incident.outcome), ranks


def bits(tensors: Iterable[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()


class Strike:
    """Puts a value that is not finite where the scenario says, in this micro-batch."""

    def __init__(self, scenario: Scenario, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.place, self.value = scenario.detail, scenario.value
        self.early = scenario.number % 2 == 0
        self.model, self.optimizer = model, optimizer

    def before(self, batch: Tensor) -> Tensor:
        if self.place == "input":
            batch[2, 1] = self.value  # as the loader gave it: the record itself is bad
        if self.place == "own gradient":
            weight = self.model.first.weight
            handle = weight.register_hook(
                lambda gradient: (handle.remove(), self._spoil(gradient.clone()))[1]
            )
        if self.early:
            self._state()
        return batch

    def loss(self, loss: Tensor) -> Tensor:
        return loss * self.value if self.place == "loss" else loss

    def after(self) -> None:
        if self.place == "reduced gradient":
            self._spoil(self.model.last.weight.grad)
        if not self.early:
            self._state()

    def _state(self) -> None:
        if self.place == "parameter":
            self._spoil(self.model.first.weight.data)
        if self.place == "buffer":
            self._spoil(self.model.scale)
        if self.place == "moment":
            state = self.optimizer.state[self.model.last.weight]
            self._spoil(next(v for v in state.values() if isinstance(v, Tensor) and v.dim()))

    def _spoil(self, tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = self.value
        return tensor


def play_all(rank: int, folder: Path, numbers: range) -> list[dict[str, Any]]:
    logging.disable(logging.CRITICAL)  # hundreds of incidents, each with a traceback
    return [play(draw(number, dist.get_world_size()), rank, folder) for number in numbers]


def disagreement(ends: Sequence[dict[str, Any]]) -> str:
    """Say what is wrong if a run did not end alike on all ranks, or not with a sound state."""
    first = ends[0]
    if first["error"] == "ConsensusError":
        return "a hang, which the timeout ended"
    alike = (
        ("error", "applied", "incidents")
        if first["error"]
        else ("error", "applied", "incidents", "step", "bits")
    )
    for key in alike:
        if any(end[key] != first[key] for end in ends):
            return f"{key} differs"
    if not first["error"] and not all(end["finite"] for end in ends):
        return "the state is not finite"
    return ""


@pytest.mark.parametrize(
    ("world_size", "numbers"),
    [(2, range(70)), (2, range(70, 140)), (4, range(30)), (4, range(30, 60))],
    ids=str,
)
def test_whatever_happens_on_one_rank_all_ranks_do_the_same(tmp_path, world_size, numbers):
    results = run_ranks(play_all, world_size, tmp_path, tmp_path, numbers, timeout=110)
    ends = list(zip(*results, strict=True))
    scenarios = [draw(number, world_size) for number in numbers]
    wrong = [
        f"{disagreement(end)}: {s} {end}" for s, end in zip(scenarios, ends, strict=True) if disagreement(end)
    ]
    assert wrong == []
    # Faults that nobody noticed would prove nothing; an answer of its own is no fault that one can see.
    seen = [bool(end[0]["incidents"] or end[0]["error"]) for end in ends]
    unseen = [s for s, noticed in zip(scenarios, seen, strict=True) if not noticed and s.strike != "answer"]
    assert unseen == []
