"""What Megatron keeps beside torch, as a snapshot holds it: schedule, random states, scaler, main weights."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradsentinel.errors import SnapshotMismatch
from gradsentinel.integrations.megatron.names import Inner

MAIN = "main_parameter"
"""The key under which the snapshot of an optimizer's state holds float32 copies and shards."""


class Schedule:
    """Megatron's schedule, whose own `load_state_dict` adds to the steps that it has made."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return how far it has come."""
        return {"num_steps": int(self._scheduler.num_steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to there, and set the learning rates and weight decays that belong to it."""
        self._scheduler.num_steps = int(state["num_steps"])
        self._scheduler.step(increment=0)


def stateful_schedule(scheduler: Any) -> Any:
    """Return the scheduler as a snapshot can hold it."""
    return Schedule(scheduler) if hasattr(scheduler, "num_steps") else scheduler


class TrackedRandomStates:
    """The random states that Megatron keeps beside the device's own, such as tensor parallelism's."""

    def __init__(self) -> None:
        self._held: dict[str, Any] | None = None

    def hold(self) -> None:
        """Keep the present states as those between two steps: the next step begins."""
        self._held = self.now()

    def release(self) -> None:
        """Forget them: the step is over, and the present states are those between two steps."""
        self._held = None

    def now(self) -> dict[str, Any]:
        """Return copies of the present states."""
        return {name: _copied(state) for name, state in _tracker().get_states().items()}

    def put(self, states: Mapping[str, Any]) -> None:
        """Put states back; one that is a generator stays the same object."""
        tracker = _tracker()
        present = tracker.get_states()
        for name, state in states.items():
            if isinstance(present.get(name), torch.Generator):
                present[name].set_state(state)
            else:
                present[name] = state.clone()
        tracker.set_states(present)

    def state_dict(self) -> dict[str, Any]:
        """Return the states between two steps."""
        return dict(self.now() if self._held is None else self._held)

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Put the states back, now and for the step that comes next."""
        self.put({name: state.cpu() for name, state in states.items()})
        if self._held is not None:
            self.hold()


def _tracker() -> Any:
    return importlib.import_module("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()


def _copied(state: Any) -> Any:
    return state.get_state() if isinstance(state, torch.Generator) else state.clone()


class ScalerState:
    """The loss scaler's own state before the step in flight; it is updated before anybody can decide."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._kept: dict[str, Any] = {}

    def keep(self) -> None:
        """Remember it as it is."""
        self._kept = dict(vars(self._scaler))  # updates make new tensors

    def put_back(self) -> None:
        """Make it what it was."""
        vars(self._scaler).update(self._kept)

    def update(self, *, overflow: bool) -> None:
        """Make it what it is after a step with or without an overflow."""
        self.put_back()
        self._scaler.update(overflow)


def without_mains(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Part a captured state into what torch's optimizer has and what Megatron keeps beside it."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return state, {}
    mains: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for name, entries in state["state"].items():
        rest = dict(entries) if isinstance(entries, Mapping) else entries
        if isinstance(rest, dict) and MAIN in rest:
            mains[name] = rest.pop(MAIN)
        if rest:
            plain[name] = rest
    return {**state, "state": plain}, mains


def checked_mains(mains: Mapping[str, Tensor], named: Mapping[str, Inner]) -> list[tuple[Tensor, Tensor]]:
    """Return float32 copies and shards with their captured values; raises SnapshotMismatch."""
    wanted = {name for name, one in named.items() if one.tensor is not one.model}
    if wanted != mains.keys():
        odd = min(wanted ^ mains.keys())
        raise SnapshotMismatch(f"the float32 copy of {odd!r} is in the snapshot or in the run, not in both")
    for name, value in mains.items():
        here = named[name].tensor
        if not isinstance(value, Tensor) or here.shape != value.shape or here.dtype != value.dtype:
            raise SnapshotMismatch(f"the float32 copy of {name!r} is another one in the snapshot")
    return [(named[name].tensor, value) for name, value in mains.items()]
