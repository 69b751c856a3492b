"""The state of torch's optimizers by parameter name: copied, checked, and written back in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsentinel.errors import SnapshotMismatch
from gradsentinel.measures.inspection import local
from gradsentinel.state.tree import clone_tree, tensors_in

Keep = Callable[[Tensor], Tensor]
"""Makes the copy of a tensor that a snapshot keeps."""


def named_moments(
    optimizers: Iterable[Optimizer], parameters: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the state tensors of the optimizers as 'parameter:key'."""
    names = {id(parameter): name for name, parameter in parameters}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if isinstance(state, Mapping):
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        yield f"{names.get(id(parameter), '?')}:{key}", value


def prepare_optimizers(
    optimizers: Sequence[Optimizer], saved: Sequence[Any], parameters: Iterable[tuple[str, Tensor]]
) -> Callable[[], None]:
    """Return what writes captured states back; what can fail is done before it returns.

    Tensors of the same shape and dtype are written in place.

    Raises:
        SnapshotMismatch: if the saved states are malformed or of other optimizers; nothing was changed.
    """
    if len(saved) != len(optimizers):
        raise SnapshotMismatch(f"the snapshot holds {len(saved)} optimizers, the run has {len(optimizers)}")
    known = dict(parameters)
    writes = [_Write(optimizer, state, known) for optimizer, state in zip(optimizers, saved, strict=True)]

    def write() -> None:
        for part in writes:
            part()

    return write


def capture_optimizer(
    optimizer: Optimizer, parameters: Iterable[tuple[str, Tensor]], keep: Keep
) -> dict[str, Any]:
    """Return the optimizer's state as a nest of plain data whose tensors are what `keep` made of them.

    `state` holds each parameter's moments by the parameter's name, `own` what the optimizer keeps under
    keys that are no parameters, `groups` the settings of the parameter groups, `on_host` the names of
    moments that lie in host memory although their parameter does not (Adam's step counter).
    """
    names = {id(parameter): name for name, parameter in parameters}
    state: dict[str, Any] = {}
    own: dict[Any, Any] = {}
    on_host: list[str] = []

    def kept(value: Any) -> Any:
        if isinstance(value, Tensor):  # nearly all are
            return keep(local(value))
        return clone_tree(value, keep=lambda tensor: keep(local(tensor)))

    keyed: Iterable[tuple[Any, Any]] = optimizer.state.items()
    for parameter, entries in keyed:
        if isinstance(parameter, (str, int)):
            own[parameter] = kept(entries)
        elif id(parameter) in names and isinstance(entries, Mapping):
            name = names[id(parameter)]
            state[name] = {key: kept(value) for key, value in entries.items()}
            if parameter.device.type != "cpu":
                on_host += [f"{name}:{key}" for key, value in entries.items() if _is_on_host(value)]
    groups = [
        {key: kept(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {"state": state, "own": own, "groups": groups, "on_host": on_host}


def as_shard(values: Tensor, like: Tensor | None) -> Tensor:
    """Return this rank's values as a distributed tensor if the other one is; else as they are."""
    if like is None or not hasattr(like, "device_mesh") or local(like).shape != values.shape:
        return values
    shard = torch.zeros_like(like, dtype=values.dtype)
    local(shard).copy_(values)
    return shard


class _Write:
    """One optimizer's state, ready to be written back; what can fail is done when it is made."""

    def __init__(self, optimizer: Optimizer, saved: Any, parameters: Mapping[str, Tensor]) -> None:
        _check(optimizer, saved, parameters)
        self._optimizer = optimizer
        self._on_host = set(saved.get("on_host", ()))
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._states: list[tuple[Tensor, dict[Any, Any]]] = []
        for name, entries in saved["state"].items():
            parameter = parameters[name]
            present = optimizer.state.get(parameter, {})
            values = {
                key: self._rebuilt(value, present.get(key), parameter, f"{name}:{key}")
                for key, value in entries.items()
            }
            self._states.append((parameter, values))
        own = saved.get("own", {})
        self._own = {key: self._rebuilt(value, optimizer.state.get(key)) for key, value in own.items()}
        self._groups = [
            {key: self._rebuilt(value, group.get(key)) for key, value in values.items()}
            for group, values in zip(optimizer.param_groups, saved["groups"], strict=False)
        ]

    def __call__(self) -> None:
        """Write."""
        state = self._optimizer.state
        for target, value in self._copies:
            target.copy_(value)
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=False):
            group.update(values)
        kept = {id(parameter) for parameter, _ in self._states}
        for key in list(state):
            is_stale = id(key) not in kept if isinstance(key, Tensor) else key not in self._own
            if is_stale and isinstance(key, (Tensor, str, int)):
                del state[key]
        for parameter, values in self._states:
            state[parameter].clear()
            state[parameter].update(values)
        state.update(self._own)

    def _rebuilt(self, value: Any, present: Any, parameter: Tensor | None = None, label: str = "") -> Any:
        """Return the value as the optimizer is to hold it: tensors that are there stay the same objects."""
        if isinstance(value, Tensor) and _takes(present, value):
            self._copies.append((local(present), value))
            return present
        where = torch.device("cpu")
        if parameter is not None and label not in self._on_host:
            where = parameter.device
        elif parameter is None and isinstance(present, Tensor):
            where = present.device
        return clone_tree(value, keep=lambda tensor: as_shard(tensor.to(where, copy=True), parameter))


def _check(optimizer: Optimizer, saved: Any, parameters: Mapping[str, Tensor]) -> None:
    """Raise SnapshotMismatch unless the saved state can be that of this optimizer."""
    name = type(optimizer).__name__
    fields: Mapping[str, Any] = saved if isinstance(saved, Mapping) else {}
    states, groups, own = fields.get("state"), fields.get("groups"), fields.get("own", {})
    sound = _is_mapping_of(states, str, Mapping) and _is_mapping_of(own, (str, int), object)
    on_host = fields.get("on_host", [])
    sound = sound and isinstance(on_host, list) and all(isinstance(label, str) for label in on_host)
    if not sound or not isinstance(groups, list) or not all(_is_mapping_of(g, str, object) for g in groups):
        raise SnapshotMismatch(f"the saved state of {name} is malformed")
    if len(groups) > len(optimizer.param_groups):
        raise SnapshotMismatch(
            f"the snapshot holds {len(groups)} parameter groups of {name}, the run has "
            f"{len(optimizer.param_groups)}"
        )
    for number, (group, values) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        odd = next((key for key, value in values.items() if not _alike(group.get(key), value)), None)
        if odd is not None:
            raise SnapshotMismatch(
                f"{odd!r} of parameter group {number} of {name} is {group[odd]!r:.60}, in the snapshot "
                f"{values[odd]!r:.60}"
            )
    _check_states(name, fields["state"], optimizer.state, parameters)


def _check_states(
    name: str, saved: Mapping[str, Any], present: Mapping[Tensor, Any], parameters: Mapping[str, Tensor]
) -> None:
    for parameter, entries in saved.items():
        if parameter not in parameters:
            raise SnapshotMismatch(
                f"{name} has moments of {parameter!r} in the snapshot; the run has no such"
            )
        here = parameters[parameter]
        there = present.get(here, {})
        odd = next((key for key, value in entries.items() if not _fits(there.get(key), value, here)), None)
        if odd is not None:
            raise SnapshotMismatch(
                f"{odd!r} of {parameter!r} in {name} is {entries[odd]!r:.60} in the snapshot"
            )


def _fits(present: Any, value: Any, parameter: Tensor) -> bool:
    """False if a moment cannot be the same one: no tensor, or not of the parameter's shape any more."""
    if not isinstance(present, Tensor):
        return True
    if not isinstance(value, Tensor):
        return False
    shape = local(present).shape
    fixed = not shape or shape == local(parameter).shape  # others may change from step to step
    return shape == value.shape or not fixed


def _alike(present: Any, value: Any) -> bool:
    """False if a setting cannot be the same one: a word for a number, a list of another length."""
    if present is None or value is None:
        return True
    if isinstance(present, (list, tuple)):
        return isinstance(value, (list, tuple)) and len(value) == len(present)
    if isinstance(present, (Number, Tensor)):
        return isinstance(value, (Number, Tensor))
    return not isinstance(present, (str, Mapping)) or isinstance(value, (str, Mapping))


def _takes(present: Any, value: Tensor) -> bool:
    if not isinstance(present, Tensor):
        return False
    held = local(present)
    return held.shape == value.shape and held.dtype == value.dtype and held.layout == value.layout


def _is_on_host(value: Any) -> bool:
    return any(tensor.device.type == "cpu" for _, tensor in tensors_in(value))


def _is_mapping_of(value: Any, keys: type | tuple[type, ...], values: type) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, keys) and isinstance(entry, values) for key, entry in value.items()
    )
