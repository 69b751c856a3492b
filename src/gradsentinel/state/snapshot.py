"""Capture and restore of the whole training state, bit for bit and in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from gradsentinel.errors import SnapshotMismatch
from gradsentinel.gradients import GradientView
from gradsentinel.host import Host
from gradsentinel.measures.inspection import local, nonfinite_in, stored, values_of
from gradsentinel.state.buffers import BufferShadow
from gradsentinel.state.rng import RngState
from gradsentinel.state.staging import Pending, Staging
from gradsentinel.state.stateful import load_stateful
from gradsentinel.state.tree import clone_tree, paths_in, tensors_in

__all__ = ["Snapshot", "SnapshotMismatch", "capture", "is_initialised", "restore"]

_SMALL = 1 << 20
"""Bytes up to which a tensor of schedulers, averages and the like is copied on the device at once."""


@dataclass(kw_only=True, eq=False)
class Snapshot:
    """The training state between two steps, as copies in host memory that nothing else writes to.

    Each rank holds its own shard; nothing is gathered. On an accelerator the copies may still be under
    way: `settle` waits for them. The memory is used again when the snapshot is gone, so keep the snapshot,
    not its tensors.
    """

    step: int
    """Number of optimizer steps done."""
    iteration: int = 0
    """Number of steps attempted until then; never goes back, so of two snapshots it tells the later one."""
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizers: list[Any]
    """As the host gives them."""
    stateful: dict[str, Any]
    """State dicts of schedulers, scaler and the user's extra objects, by name."""
    rng: RngState
    data: dict[str, int] = field(default_factory=dict)
    """Position in the data, as `Sentinel.steps` counts it."""
    epoch: dict[str, Any] = field(default_factory=dict)
    """How to get to that position again: see `gradsentinel.position`."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """What the callbacks must remember over a restart, by their names."""
    loss: float | None = None
    """Of the step before it; once it is known good, the median of the steps that proved it."""
    grad_norm: float | None = None
    norms: dict[str, Any] = field(default_factory=dict)
    """2-norms of the parts of the state: floats, or 0-dim tensors until `settle`."""
    frozen: tuple[str, ...] = ()
    """Names of the parameters that are not trained."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Which parts of the whole its tensors are: see `gradsentinel.state.layout`."""
    pending: Pending | None = field(default=None, repr=False)
    """Copies that may still be under way."""
    torn: bool = False
    """True if somebody wrote to the state while it was copied: it must not be used."""
    _nbytes: int | None = field(default=None, init=False, repr=False)

    def settle(self) -> None:
        """Wait until the copies can be read."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        self.norms = {part: float(norm) for part, norm in self.norms.items()}

    def nbytes(self) -> int:
        """Return the memory held by the tensors, in bytes."""
        if self._nbytes is None:  # asked for by whoever writes it, too, while the training runs
            held = [self.parameters, self.buffers, self.optimizers, self.stateful]
            tensors = (tensor for _, tensor in paths_in(held))
            self._nbytes = sum(
                t.nbytes if t.layout is torch.strided else values_of(t).nbytes for t in tensors
            )
        return self._nbytes

    def flaws(self) -> tuple[str, ...]:
        """Return the names of trained parameters and moments that are not finite: it must not be used then.

        Buffers and frozen parameters may hold an infinity on purpose; the run looks at those.
        """
        self.settle()
        frozen = set(self.frozen)
        trained = [(name, value) for name, value in self.parameters.items() if name not in frozen]
        moments = [value for _, value in paths_in(list(_states(self.optimizers)))]
        # One fast pass, without the moments' names: most snapshots are sound.
        if bool(torch.isfinite(GradientView([*trained, *(("", value) for value in moments)]).total_norm)):
            return ()
        return tuple(entry.name for entry in nonfinite_in([*trained, *_moments(self.optimizers)]))

    def to_tree(self) -> dict[str, Any]:
        """Return a plain nested state for an archive."""
        self.settle()
        tree = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name in _LAYOUT}
        return {**tree, "rng": self.rng.to_tree(), "frozen": list(self.frozen)}

    @classmethod
    def from_tree(cls, tree: Any) -> Snapshot:
        """Rebuild a snapshot from what `to_tree` returned; raises SnapshotMismatch if it is none."""
        if not isinstance(tree, Mapping):
            raise SnapshotMismatch(f"malformed snapshot: a {type(tree).__name__} instead of named parts")
        for name, fits in _LAYOUT.items():
            if name in tree and not fits(tree[name]):
                raise SnapshotMismatch(f"malformed snapshot: {name} is {tree[name]!r:.60}")
        missing = [name for name in _NEEDED if name not in tree]
        unknown = [name for name in tree if name not in _LAYOUT]
        if missing or unknown:
            what = f"it has no {missing[0]}" if missing else f"nobody knows its {unknown[0]!r:.60}"
            raise SnapshotMismatch(f"malformed snapshot: {what}")
        try:
            rng = RngState.from_tree(tree["rng"])
        except ValueError as error:
            raise SnapshotMismatch(f"malformed snapshot: {error}") from error
        return cls(**{**tree, "rng": rng, "frozen": tuple(tree.get("frozen", ()))})


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
    staging: Staging | None = None,
    before_step: bool = False,
    norms: Mapping[str, Tensor] | None = None,
) -> Snapshot:
    """Begin to copy the training state into host memory.

    On the CPU the copies are finished on return. On an accelerator they may be under way: `pending.hold()`
    is to be called before the optimizer's next step, and `settle()` before they are read.

    Args:
        host: whose state it is.
        buffers: the model's buffers.
        step: number of optimizer steps done.
        data: position in the data.
        staging: where the memory comes from; None takes new one.
        before_step: take the buffers as they were before the step in flight, whose forward pass may have
            written to them already.
        norms: of the parts of the state, 0-dim, to be kept along.
    """
    shot = (staging or Staging()).begin()

    def keep_volatile(tensor: Tensor) -> Tensor:
        return shot.keep(local(tensor), volatile=tensor.nbytes <= _SMALL)

    named_buffers = buffers.kept() if before_step else buffers.named()
    snapshot = Snapshot(
        step=step,
        parameters={n: shot.keep(stored(p)) for n, p in host.named_parameters() if _has_values(p)},
        buffers={n: shot.keep(stored(b), volatile=True) for n, b in named_buffers if _has_values(b)},
        optimizers=host.capture_optimizers(shot.keep),
        stateful={n: clone_tree(e.state_dict(), keep=keep_volatile) for n, e in host.stateful().items()},
        rng=RngState.capture((host.device.type,)),
        frozen=tuple(name for name, p in host.named_parameters() if not p.requires_grad),
        data=dict(data),
        norms={part: shot.keep(norm, volatile=True) for part, norm in (norms or {}).items()},
    )
    snapshot.pending = shot.finish(snapshot)
    return snapshot


@torch.no_grad()
def restore(snapshot: Snapshot, host: Host, buffers: BufferShadow, *, rng: bool = True) -> None:
    """Write the snapshot back into the very same tensors and objects; gradients are dropped.

    Whatever can fail is done, and undone if it does, before the first parameter is written.

    Raises:
        SnapshotMismatch: if names, shapes, dtypes or the optimizers differ, or if a scheduler or another
            object does not take its state; nothing was changed then.
    """
    snapshot.settle()
    parameters = dict(host.named_parameters())
    _check("parameter", snapshot.parameters, parameters)
    _check("buffer", snapshot.buffers, dict(buffers.named()))
    write_optimizers = host.prepare_optimizers(snapshot.optimizers)
    undo_rng = _try_rng(snapshot.rng, host) if rng else None
    try:
        load_stateful(snapshot.stateful, host.stateful())
    except SnapshotMismatch:
        if undo_rng is not None:
            undo_rng.restore()
        raise
    for name, value in snapshot.parameters.items():
        stored(parameters[name]).copy_(value)
    buffers.put(snapshot.buffers)
    write_optimizers()
    host.drop(host.optimizers)
    host.restored()
    if rng:
        snapshot.rng.restore()


def _has_values(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and not torch.nn.parameter.is_lazy(tensor)


def _states(optimizers: Sequence[Any]) -> Iterator[Any]:
    """What of each optimizer holds its moments: by parameter where it is ordered like that."""
    for optimizer in optimizers:
        ordered = isinstance(optimizer, Mapping) and isinstance(optimizer.get("state"), Mapping)
        yield optimizer["state"] if ordered else [optimizer]


def _moments(optimizers: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the optimizers' states, as 'parameter:key' where they are ordered like that."""
    for states in _states(optimizers):
        if isinstance(states, Mapping):
            for name, state in states.items():
                yield from ((f"{name}:{path}", tensor) for path, tensor in tensors_in(state))
        else:
            yield from tensors_in(states[0])


def _check(what: str, saved: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> None:
    missing = [name for name in saved if name not in present]
    if missing:
        raise SnapshotMismatch(f"the run has no {what} {missing[0]!r} that the snapshot holds")
    for name, value in saved.items():
        here = stored(present[name])
        if here.shape != value.shape:
            raise SnapshotMismatch(
                f"{what} {name!r} has shape {tuple(here.shape)}, in the snapshot {tuple(value.shape)}"
            )
        ours, theirs = (here.dtype, here.layout), (value.dtype, value.layout)
        if ours != theirs:
            raise SnapshotMismatch(f"{what} {name!r} is {ours}, in the snapshot {theirs}")


def _try_rng(rng: RngState, host: Host) -> RngState:
    """Set the generators, and return what they were; they are put back if they do not take it."""
    before = RngState.capture((host.device.type,))
    try:
        rng.restore()
    except Exception as error:
        before.restore()
        raise SnapshotMismatch(f"malformed snapshot: the random states are none: {error}") from error
    return before


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _mapping(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, Mapping)
        and all(isinstance(name, str) and fits(entry) for name, entry in value.items())
    )


def _tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _anything(value: Any) -> bool:
    del value
    return True


_LAYOUT: dict[str, Callable[[Any], bool]] = {
    "step": _whole,
    "iteration": _whole,
    "parameters": _mapping(_tensor),
    "buffers": _mapping(_tensor),
    "optimizers": lambda value: isinstance(value, list),
    "stateful": _mapping(_anything),
    "rng": _mapping(_anything),
    "data": _mapping(_whole),
    "epoch": _mapping(_anything),
    "callbacks": _mapping(lambda value: isinstance(value, Mapping)),
    "loss": _number,
    "grad_norm": _number,
    "norms": _mapping(_number),
    "layout": _mapping(_anything),
    "frozen": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
}
"""What each part of a snapshot's tree has to be."""
_NEEDED = ("step", "parameters", "buffers", "optimizers", "stateful", "rng")
