"""Copies a step's scene, at once and within a limit, so that training may go on while it is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

import torch

from gradsentinel.again.scene import MicroBatch
from gradsentinel.diagnosis.environment import environment
from gradsentinel.diagnosis.statistics import statistics
from gradsentinel.diagnosis.storable import nbytes, to_storable
from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import Incident
from gradsentinel.measures.inspection import stored
from gradsentinel.measures.named import gradient_of
from gradsentinel.run import Run
from gradsentinel.state.snapshot import Snapshot
from gradsentinel.wording import plain_name, size_of

logger = logging.getLogger("gradsentinel")

BEFORE, AFTER, LATER = "before the step", "after the step", "some steps later"
"""From when the saved weights are: before the failing step changed anything, or not."""


class Level(IntEnum):
    """How much of a step is kept."""

    LIGHT = 0
    """Facts and statistics."""
    STANDARD = 1
    """Also the batch, random states and the bad operator's inputs."""
    FULL = 2
    """Also weights, buffers, optimizer state and gradients."""

    @classmethod
    def parse(cls, value: Level | str) -> Level:
        """Return the level for a member or its name; raises ConfigurationError naming the choices."""
        if isinstance(value, Level):
            return value
        try:
            return cls[value.upper()]
        except (KeyError, AttributeError):
            choices = ", ".join(level.name.lower() for level in cls)
            raise ConfigurationError(f"unknown level {value!r}; choose one of: {choices}") from None


@dataclass(slots=True)
class Parts:
    """What goes into a bundle; copies on the host that nothing else refers to."""

    environment: dict[str, Any]
    statistics: dict[str, Any]
    archives: dict[str, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    """State and meta by name: scene, state, known-good."""
    left_out: list[str] = field(default_factory=list)
    nbytes: int = 0
    holds: list[Any] = field(default_factory=list)
    """Whoever owns the memory of the copies."""


def collect(
    incident: Incident, microbatches: Sequence[MicroBatch], rng: Any, run: Run, *, level: Level, room: int
) -> Parts:
    """Return copies of the scene; waits for the device. Called on: any rank, for its own part.

    Args:
        incident: what happened.
        microbatches: of the step.
        rng: the random state before the step, or None.
        run: the run, with the step still in place.
        level: how much.
        room: bytes that the tensors may take; what does not fit is left out and named.
    """
    moment = _moment(incident, run)
    parts = Parts(environment(), {})

    def count() -> None:
        parts.statistics = statistics(run, microbatches, gradients=moment == BEFORE)

    _try(parts, "statistics", count)
    if level >= Level.STANDARD:
        scene = partial(_add_scene, parts, incident, microbatches, rng, run, level=level, room=room)
        _try(parts, "micro-batches", scene)
    if level >= Level.FULL:
        _try(parts, "weights and optimizer state", partial(_add_state, parts, run, moment, room=room))
        _try(parts, "gradients", partial(_add_gradients, parts, run, moment, room=room))
        _try(parts, "weights of the known-good state", partial(_add_known_good, parts, run, room=room))
    return parts


def _try(parts: Parts, what: str, collect_it: Callable[[], None]) -> None:
    """Let one part fail without losing the others: the step is bad, its tensors may be odd."""
    try:
        collect_it()
    except Exception as error:
        logger.exception("%s: could not be kept as evidence", what)
        parts.left_out.append(f"{what}: {type(error).__name__}: {error}")


def add_microbatch(
    incident: Incident, microbatches: Sequence[MicroBatch], wanted: int, run: Run, *, room: int
) -> Parts:
    """Return copies of one more micro-batch, which only the diagnosis found to be the guilty one."""
    parts = Parts({}, {})
    chosen = [entry for entry in microbatches if entry.index == wanted]
    _add_scene(parts, incident, chosen, None, run, level=Level.STANDARD, room=room, count=len(microbatches))
    return parts


def _moment(incident: Incident, run: Run) -> str:
    if incident.step == run.step:
        return BEFORE
    return LATER if getattr(run, "late_step", None) == incident.step else AFTER


def _add_scene(
    parts: Parts,
    incident: Incident,
    microbatches: Sequence[MicroBatch],
    rng: Any,
    run: Run,
    *,
    level: Level,
    room: int,
    count: int | None = None,
) -> None:
    suspects = [entry for entry in microbatches if entry.index == incident.microbatch]
    rest = [entry for entry in microbatches if entry.index != incident.microbatch]
    kept: list[dict[str, Any]] = []
    for entry in [*suspects, *(rest if level >= Level.FULL or not suspects else [])]:
        size = nbytes(entry.batch)
        if not _fits(parts, f"micro-batch {entry.index}", size, room):
            continue
        batch, lost = to_storable(entry.batch)
        parts.left_out += [f"micro-batch {entry.index}: {what}" for what in lost]
        kept.append({"index": entry.index, "batch": batch, "rng": entry.rng.to_tree()})
    state: dict[str, Any] = {"microbatches": sorted(kept, key=lambda entry: int(entry["index"]))}
    if rng is not None:
        state["rng"] = rng.to_tree()
    healthy = run.scene.healthy[:1]  # what is normal here: some verdicts compare with it
    if healthy and _fits(parts, "a healthy batch to compare with", nbytes(healthy[0].batch), room):
        state["healthy"] = {"batch": to_storable(healthy[0].batch)[0], "rng": healthy[0].rng.to_tree()}
    scaler = getattr(run.host, "scaler", None)
    meta = {
        "incident": incident.id,
        "step": incident.step,
        "rank": run.rank.rank,
        "count": len(microbatches) if count is None else count,
        "divisor": run.scene.passes[0].divisor if run.scene.passes else len(microbatches),
        "loss_scale": None if scaler is None else float(scaler.get_scale()),
        "default_dtype": torch.get_default_dtype(),
        "evaluating": _evaluating(run),
    }
    parts.archives["scene"] = (state, meta)


def _evaluating(run: Run) -> list[str]:
    """Names of the modules that are not in training mode, such as a frozen batch norm."""
    return [
        plain_name(".".join(part for part in (prefix, path) if part))
        for prefix, root in run.host.modules()
        for path, module in root.named_modules()
        if not module.training
    ]


def _add_state(parts: Parts, run: Run, moment: str, *, room: int) -> None:
    named = dict(run.host.named_parameters())
    buffers = dict(run.scene.buffers.kept() if moment == BEFORE else run.scene.buffers.named())
    moments = [dict(optimizer.state) for optimizer in run.host.optimizers]
    weights, extra = nbytes([named, buffers]), nbytes([[*state.values()] for state in moments])
    if weights > room - parts.nbytes:
        _fits(parts, "weights and buffers", weights, room)
        return
    parts.nbytes += weights
    meta = {
        "moment": moment,
        "sharded": any(hasattr(p, "to_local") for p in named.values()),
        "optimizers": True,
    }
    if _fits(parts, "optimizer state", extra, room):
        snapshot = run.capture(before_step=moment == BEFORE)
        parts.holds.append(snapshot)
        tree = snapshot.to_tree()
    else:
        meta["optimizers"] = False
        tree = _weights_only(run, named, buffers)
    for name in ("optimizers", "stateful"):
        tree[name], lost = to_storable(tree.get(name), name=name, copied=True)
        parts.left_out += lost
    parts.archives["state"] = (tree, meta)


@torch.no_grad()
def _weights_only(run: Run, parameters: Mapping[str, Any], buffers: Mapping[str, Any]) -> dict[str, Any]:
    def keep(tensors: Mapping[str, Any]) -> dict[str, Any]:
        there = {n: t for n, t in tensors.items() if not t.is_meta and not torch.nn.parameter.is_lazy(t)}
        return {name: stored(tensor).detach().to("cpu", copy=True) for name, tensor in there.items()}

    rng = run.scene.rng
    return {
        "step": run.step,
        "parameters": keep(parameters),
        "buffers": keep(buffers),
        "optimizers": [],
        "stateful": {},
        "rng": None if rng is None else rng.to_tree(),
        "data": dict(run.data),
    }


@torch.no_grad()
def _add_gradients(parts: Parts, run: Run, moment: str, *, room: int) -> None:
    """Keep the gradients as they were found: comparing them with a replay's shows a flipped bit."""
    found = {name: g for name, p in run.host.named_parameters() if (g := gradient_of(p)) is not None}
    if moment != BEFORE or not found or not _fits(parts, "gradients", nbytes(found), room):
        return
    copies, lost = to_storable(found, name="gradients")
    parts.left_out += lost
    parts.archives["gradients"] = ({"gradients": copies}, {"world_size": run.consensus.world_size})


def _add_known_good(parts: Parts, run: Run, *, room: int) -> None:
    """Keep the weights of the last known-good state: with them it shows whether the run diverged."""
    good: Snapshot | None = run.known_good
    if good is None or not _fits(parts, "weights of the known-good state", nbytes(good.parameters), room):
        return
    good.settle()
    parts.holds.append(good)  # nothing writes into a snapshot, so it need not be copied
    groups = [
        {"groups": one["groups"]} for one in good.optimizers if isinstance(one, Mapping) and "groups" in one
    ]
    state = {"parameters": dict(good.parameters), "optimizers": to_storable(groups)[0]}
    parts.archives["known-good"] = (state, {"step": good.step})


def _fits(parts: Parts, what: str, size: int, room: int) -> bool:
    if parts.nbytes + size > room:
        left = max(room - parts.nbytes, 0)
        parts.left_out.append(f"{what}: {size_of(size)}, only {size_of(left)} left of what max_bytes allows")
        return False
    parts.nbytes += size
    return True
