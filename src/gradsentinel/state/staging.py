"""Copies of the training state in host memory, taken beside the training and into memory used again."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradsentinel.devices import Device, device_of
from gradsentinel.state.buffers import version_of
from gradsentinel.state.shared import SharedMemory

logger = logging.getLogger("gradsentinel")

_is_wrapper: Callable[[Tensor], bool] = is_traceable_wrapper_subclass
_SMALL = 1 << 20
"""Tensors up to this many bytes are worth a copy on the device, so that nobody has to wait for theirs."""


Signature = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]
"""Shape, strides, dtype, and whether it is to be pinned."""


class Lane(Protocol):
    """One device's way into host memory."""

    beside: bool
    """True if it copies while the device goes on computing."""

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> Any:
        """Begin to copy, after all that the device was told so far, and return a receipt."""

    def hold(self, receipt: Any) -> None:
        """Have the device finish these copies before what it is told from now on; the host does not wait."""

    def wait(self, receipt: Any) -> None:
        """Wait on the host until these copies are finished."""


class HostLane:
    """Tensors that are in host memory already are copied at once, at the speed of the memory.

    A thread beside the training would only be right if the optimizer waited for it, and would take the
    memory bandwidth that the training needs; at 10 GB/s and more the plain copy is the cheaper way.
    """

    beside = False

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def hold(self, receipt: None) -> None:
        """Do nothing: it is done."""

    def wait(self, receipt: None) -> None:
        """Do nothing: it is done."""


class StreamLane:
    """An accelerator copies on a stream of its own into pinned memory, while it goes on computing."""

    beside = True

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.side_stream()

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> Any:
        """Begin to copy; the receipt is an event of the side stream."""
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on(self._stream):
            # One by one: not every foreach copy leaves a device.
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)  # if it is freed sooner, its memory must wait, too
        return self._device.event(self._stream)

    def hold(self, receipt: Any) -> None:
        """Let the device's current stream wait for the event."""
        self._device.current_stream().wait_event(receipt)

    def wait(self, receipt: Any) -> None:
        """Wait for the event on the host, if it is not over yet."""
        if not receipt.query():
            receipt.synchronize()


@dataclass
class Cost:
    """What snapshots have cost so far."""

    count: int = 0
    seconds: float = 0.0
    """For which the training had to wait for copies; of an accelerator: for them to be begun."""
    nbytes: int = 0
    """Host memory that is held for snapshots, in use or waiting for the next one."""
    written: int = 0
    """Snapshots written to disk."""
    write_seconds: float = 0.0
    """Beside the training."""
    wait_seconds: float = 0.0
    """For which the training had to wait for the disk: it is slower than the snapshots follow each other."""


class Pending:
    """Copies that have been begun."""

    def __init__(self, receipts: list[tuple[Lane, Any]], sources: list[tuple[Tensor, int]]) -> None:
        self._receipts = receipts
        self._sources = sources
        """What is read from beside the computation, and its version: nobody may write to it before `hold`."""

    def hold(self) -> bool:
        """Have the devices finish the copies before what comes now; False if somebody wrote before that.

        Then the copy is torn: part of it may be from before, part from after.
        """
        for lane, receipt in self._receipts:
            lane.hold(receipt)
        whole = all(version_of(source) == version for source, version in self._sources)
        self._sources = []
        return whole

    def wait(self) -> None:
        """Wait on the host until the copies can be read."""
        for lane, receipt in self._receipts:
            lane.wait(receipt)
        self._receipts = []


class Staging:
    """Host memory for snapshots: pinned where an accelerator copies, and used again when one is dropped.

    So after the first few nothing is allocated, and no more is held than for as many snapshots as are
    kept at once, and one. Accelerators copy beside the computation, since nobody writes to parameters
    and moments between two optimizer steps: `Pending.hold` is to be called before the next. What may be
    written sooner (buffers) is copied on the device first. A program that writes in between all the same
    is noticed by the version of the tensor (not if it writes through `.data`): that snapshot is torn and
    not to be used, and after `in_line` the device copies before it goes on.

    Args:
        lane_of: gives a device's lane; None takes streams where there are some.
    """

    def __init__(self, lane_of: Callable[[torch.device], Lane] | None = None) -> None:
        self.cost = Cost()
        self.overlaps = True
        """False once something wrote between the steps."""
        self.shared: SharedMemory | None = None
        """Where copies of what is in host memory go that are going to be written to disk: see `share`."""
        self._process = os.getpid()
        self._lane_of = lane_of or default_lane
        self._lanes: dict[torch.device, Lane] = {}
        self._free: dict[Signature, list[Tensor]] = {}

    def begin(self) -> Shot:
        """Begin a snapshot."""
        if self._process != os.getpid():  # a forked child: the memory may be its parent's as well
            self._process, self._free = os.getpid(), {}
            self.shared = None if self.shared is None else SharedMemory()
        return Shot(self)

    def share(self) -> None:
        """From now on take memory that a process which writes to disk sees as well."""
        self.shared = self.shared or SharedMemory()

    def lane(self, device: torch.device) -> Lane:
        """Return the lane of a device."""
        if device not in self._lanes:
            self._lanes[device] = self._lane_of(device)
        return self._lanes[device]

    def in_line(self) -> None:
        """Have the device copy before it goes on, from now on."""
        if self.overlaps:
            self.overlaps = False
            logger.warning(
                "something writes to the weights or the optimizer between the steps: that snapshot is not "
                "used, and from now on the device copies before it goes on"
            )

    def take(self, signature: Signature, source: Tensor) -> Tensor:
        """Return host memory for a tensor: some that became free, or new."""
        free = self._free.get(signature)
        if free:
            return free.pop()
        target = None
        if self.shared is not None and source.device.type == "cpu":  # pinned memory cannot be shared
            target = self.shared.tensor_like(source)
        if target is None:
            target = device_of(source.device).host_memory(source)
        self.cost.nbytes += target.nbytes
        return target

    def give_back(self, process: int, pending: Pending, taken: list[tuple[Signature, Tensor]]) -> None:
        """Take memory back; called when a snapshot is gone, in whatever thread."""
        if process != os.getpid():
            return
        pending.wait()
        for signature, tensor in taken:
            self._free.setdefault(signature, []).append(tensor)

    def trim(self, used: set[Signature]) -> None:
        """Let go of memory that the state has no use for any more."""
        for signature in set(self._free) - used:
            for tensor in self._free.pop(signature, ()):
                self.cost.nbytes -= tensor.nbytes
                if self.shared is not None:
                    self.shared.release(tensor)


class Shot:
    """One snapshot being taken: `keep` every tensor, then `finish`."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._began = time.perf_counter()
        self._taken: list[tuple[Signature, Tensor]] = []
        self._pairs: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        self._watched: list[tuple[Tensor, int]] = []

    def keep(self, tensor: Tensor, *, volatile: bool = False) -> Tensor:
        """Return the host memory that holds the values of a plain tensor once the copies are finished.

        `volatile` says that it may be written to before the next optimizer step.
        """
        source = tensor.detach()
        if source.layout is not torch.strided or source.is_quantized or _is_wrapper(source):
            return source.to("cpu", copy=True)
        lane = self._staging.lane(source.device)
        if lane.beside and self._staging.overlaps:
            if volatile or source.nbytes <= _SMALL:
                source = source.clone()
            else:
                self._watched.append((source, version_of(source)))
        signature = (tuple(source.shape), source.stride(), source.dtype, source.device.type != "cpu")
        target = self._staging.take(signature, source)
        self._taken.append((signature, target))
        if source.numel():
            targets, sources = self._pairs.setdefault(source.device, ([], []))
            targets.append(target)
            sources.append(source)
        return target

    @torch.no_grad()
    def finish(self, owner: object) -> Pending:
        """Begin the copies; when the owner is gone their memory is given back, so nothing may outlive it."""
        staging = self._staging
        receipts = []
        for device, (targets, sources) in self._pairs.items():
            lane = staging.lane(device)
            receipts.append((lane, lane.copy(targets, sources)))
        pending = Pending(receipts, self._watched)
        if not staging.overlaps:
            pending.hold()
        weakref.finalize(owner, staging.give_back, os.getpid(), pending, self._taken).atexit = False
        staging.trim({signature for signature, _ in self._taken})
        staging.cost.count += 1
        staging.cost.seconds += time.perf_counter() - self._began
        return pending


def default_lane(device: torch.device) -> Lane:
    """Return a side stream where the device has streams, else plain copies that wait."""
    here = device_of(device)
    return StreamLane(here) if here.has_streams else HostLane()
