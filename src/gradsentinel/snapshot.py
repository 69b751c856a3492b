"""Capture and restore of the whole training state, bit for bit and in place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsentinel.buffers import BufferShadow
from gradsentinel.errors import GradSentinelError
from gradsentinel.host import Host
from gradsentinel.inspection import local, nonfinite_in, stored
from gradsentinel.rng import RngState
from gradsentinel.tree import clone_tree


class SnapshotMismatch(GradSentinelError, RuntimeError):
    """A snapshot does not fit the model or optimizer it should be restored into."""


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The training state between two steps, as copies that nothing else refers to.

    Each rank holds its own shard; nothing is gathered.
    """

    step: int
    """Number of optimizer steps done."""
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    stateful: dict[str, Any]
    """State dicts of schedulers, scaler and the user's extra objects, by name."""
    rng: RngState
    data: dict[str, int] = field(default_factory=dict)
    """Position in the data, as `Sentinel.steps` counts it."""
    loss: float | None = None
    grad_norm: float | None = None
    frozen: tuple[str, ...] = ()
    """Names of the parameters that are not trained."""

    def nbytes(self) -> int:
        """Return the memory held by the tensors, in bytes."""
        tensors = [*self.parameters.values(), *self.buffers.values()]
        for optimizer in self.optimizers:
            for state in optimizer["state"].values():
                tensors.extend(value for value in state.values() if isinstance(value, Tensor))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def flaws(self) -> tuple[str, ...]:
        """Return the names of trained parameters and moments that are not finite: it must not be used then.

        Buffers and frozen parameters may hold an infinity on purpose; the run looks at those.
        """
        moments = [
            (f"{name}:{key}", value)
            for optimizer in self.optimizers
            for name, state in optimizer["state"].items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        ]
        trained = [(name, value) for name, value in self.parameters.items() if name not in self.frozen]
        return tuple(entry.name for entry in nonfinite_in([*trained, *moments]))

    def to_tree(self) -> dict[str, Any]:
        """Return a plain nested state for an archive."""
        return {
            "step": self.step,
            "parameters": self.parameters,
            "buffers": self.buffers,
            "optimizers": self.optimizers,
            "stateful": self.stateful,
            "rng": self.rng.to_tree(),
            "data": self.data,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "frozen": list(self.frozen),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Snapshot:
        """Rebuild a snapshot from what `to_tree` returned."""
        fields = dict(tree)
        fields["rng"] = RngState.from_tree(fields["rng"])
        fields["frozen"] = tuple(fields.get("frozen", ()))
        return cls(**fields)


def is_initialised(host: Host, buffers: BufferShadow) -> bool:
    """Return False while a lazy module has not seen its first batch: there is no state to go back to yet."""
    lazy = any(torch.nn.parameter.is_lazy(parameter) for _, parameter in host.named_parameters())
    return buffers.complete and not lazy


@torch.no_grad()
def capture(
    host: Host,
    buffers: BufferShadow,
    *,
    step: int,
    data: Mapping[str, int],
    device: torch.device | None = None,
    before_step: bool = False,
) -> Snapshot:
    """Copy the training state; `device` is where the copies go (default: the host's memory, CPU).

    `before_step` takes the buffers as they were before the step in flight, whose forward pass may
    have written to them already.
    """
    target = device or torch.device("cpu")

    def keep(tensor: Tensor) -> Tensor:
        return stored(tensor).detach().to(target, copy=True)

    return Snapshot(
        step=step,
        parameters={name: keep(p) for name, p in host.named_parameters() if _has_values(p)},
        buffers={
            name: keep(buffer)
            for name, buffer in (buffers.kept() if before_step else buffers.named())
            if _has_values(buffer)
        },
        optimizers=[_capture_optimizer(optimizer, host, target) for optimizer in host.optimizers],
        stateful={name: clone_tree(entry.state_dict(), target) for name, entry in host.stateful().items()},
        rng=RngState.capture((host.device.type,)),
        frozen=tuple(name for name, p in host.named_parameters() if not p.requires_grad),
        data=dict(data),
    )


@torch.no_grad()
def restore(snapshot: Snapshot, host: Host, buffers: BufferShadow, *, rng: bool = True) -> None:
    """Write the snapshot back into the very same tensors and objects; gradients are dropped.

    Everything that can be checked is checked before anything is written.

    Raises:
        SnapshotMismatch: if names, shapes or the number of optimizers differ; nothing was changed then.
    """
    parameters = dict(host.named_parameters())
    current = dict(buffers.named())
    _check("parameter", snapshot.parameters, parameters)
    _check("buffer", snapshot.buffers, current)
    if len(snapshot.optimizers) != len(host.optimizers):
        raise SnapshotMismatch(
            f"the snapshot holds {len(snapshot.optimizers)} optimizers, the run has {len(host.optimizers)}"
        )
    for name, value in snapshot.parameters.items():
        stored(parameters[name]).copy_(value)
    for name, value in snapshot.buffers.items():
        stored(current[name]).copy_(value)
    for optimizer, state in zip(host.optimizers, snapshot.optimizers, strict=True):
        _restore_optimizer(optimizer, state, parameters)
    stateful = host.stateful()
    for name, state in snapshot.stateful.items():
        if name in stateful:
            stateful[name].load_state_dict(copy.deepcopy(state))
    host.drop(host.optimizers)
    host.restored()
    if rng:
        snapshot.rng.restore()


def _has_values(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and not torch.nn.parameter.is_lazy(tensor)


def _check(what: str, saved: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> None:
    missing = [name for name in saved if name not in present]
    if missing:
        raise SnapshotMismatch(f"the run has no {what} {missing[0]!r} that the snapshot holds")
    for name, value in saved.items():
        shape, saved_shape = tuple(stored(present[name]).shape), tuple(value.shape)
        if shape != saved_shape:
            raise SnapshotMismatch(f"{what} {name!r} has shape {shape}, in the snapshot {saved_shape}")


def _capture_optimizer(optimizer: Optimizer, host: Host, target: torch.device) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in host.named_parameters()}
    state: dict[str, Any] = {}
    for parameter, entries in optimizer.state.items():
        if id(parameter) not in names or not isinstance(entries, Mapping):
            continue  # a counter of the optimizer's own, under a key that is no parameter
        kept = {}
        for key, value in entries.items():
            if isinstance(value, Tensor):
                # Adam's step counter may live on the host while the moments are on the device.
                where = value.device if value.device.type == "cpu" else target
                kept[key] = local(value).detach().to(where, copy=True)
            else:
                kept[key] = clone_tree(value, target)
        state[names[id(parameter)]] = kept
    groups = [
        {key: clone_tree(value, target) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {"state": state, "groups": groups}


def _restore_optimizer(
    optimizer: Optimizer, saved: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> None:
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=False):
        for key, value in values.items():
            present = group.get(key)
            if isinstance(present, Tensor) and isinstance(value, Tensor):
                present.copy_(value)
            else:
                group[key] = copy.deepcopy(value)
    kept = {id(parameters[name]): (parameters[name], entries) for name, entries in saved["state"].items()}
    for parameter in [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in kept]:
        del optimizer.state[parameter]
    for parameter, entries in kept.values():
        state = optimizer.state[parameter]
        for key in [key for key in state if key not in entries]:
            del state[key]
        for key, value in entries.items():
            present = state.get(key)
            if (
                isinstance(value, Tensor)
                and isinstance(present, Tensor)
                and local(present).shape == value.shape
            ):
                local(present).copy_(value)
            elif isinstance(value, Tensor):
                # A step counter that Adam keeps on the CPU stays there; moments follow their parameter.
                where = value.device if value.dim() == 0 and value.device.type == "cpu" else parameter.device
                state[key] = _as_shard(value.to(where, copy=True), parameter)
            else:
                state[key] = copy.deepcopy(value)


def _as_shard(values: Tensor, parameter: Tensor) -> Tensor:
    """Return a moment of a distributed parameter as its optimizer would have made it: distributed too."""
    if not hasattr(parameter, "device_mesh") or local(parameter).shape != values.shape:
        return values
    shard = torch.zeros_like(parameter, dtype=values.dtype)
    local(shard).copy_(values)
    return shard
