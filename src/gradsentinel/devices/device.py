"""A device as GradSentinel sees it: this one knows what torch tells of any accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradsentinel.devices.health import HealthSource
from gradsentinel.switches import SWITCHES, Switch

_STREAMS = ("Stream", "Event", "stream", "current_stream")


class Device:
    """Streams, events, pinned memory, random state, overflow flag and habits of one device.

    Nothing here waits for the device unless its docstring says so, and nothing starts a device that the
    program does not use. Subclasses say what their kind does otherwise.

    Args:
        device: with an index, or without one for all devices of a kind (random states only).
    """

    wide: torch.dtype = torch.float64
    """The widest floating-point type that the device computes in."""
    takes_host_factors: bool = False
    """True if many tensors are multiplied in one launch only by a number that the host knows."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def module(self) -> Any:
        """``torch.cuda``, ``torch.npu`` and their like; None if this process has none for the kind."""
        return getattr(torch, self.device.type, None)

    @property
    def initialised(self) -> bool:
        """True if the program uses devices of this kind already."""
        is_initialized = getattr(self.module, "is_initialized", None)
        return bool(is_initialized is not None and is_initialized())

    @property
    def name(self) -> str:
        """The model, such as ``NVIDIA H200`` or ``Ascend910B2``; ``npu:0`` where nobody tells."""
        if self.initialised:
            with suppress(Exception):  # drivers raise anything, and a name is not worth it
                return str(self.module.get_device_name(self.device))
        return str(self.device)

    # -- streams and events ------------------------------------------------------------------------

    @cached_property
    def has_streams(self) -> bool:
        """True if there are streams beside the one that computes."""
        return all(hasattr(self.module, name) for name in _STREAMS)

    def side_stream(self) -> Any:
        """Return a stream beside the one that computes."""
        return self.module.Stream(device=self.device)

    def current_stream(self) -> Any:
        """Return the stream that work goes to now."""
        return self.module.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Send the work of a block to a stream."""
        context: AbstractContextManager[Any] = self.module.stream(stream)
        return context

    def event(self, stream: Any = None) -> Any:
        """Return an event that happens when what a stream was given so far is done; None: the current one.

        It has `query()`, and `synchronize()`, which waits. None on a device that nobody waits for.
        """
        done = torch.Event(device=self.device)
        done.record(self.current_stream() if stream is None else stream)
        return done

    # -- memory ------------------------------------------------------------------------------------

    def host_memory(self, like: Tensor) -> Tensor:
        """Return host memory for a copy of a tensor; pinned where that goes, so that copies need not wait."""
        # Where nobody can pin, or no more memory may be pinned, copies have to wait.
        with suppress(RuntimeError, NotImplementedError):
            return torch.empty_like(like, device="cpu", pin_memory=True)
        return torch.empty_like(like, device="cpu")

    def send(self, values: Tensor) -> Tensor:
        """Return a copy of a host tensor on the device, by way of pinned memory: no wait."""
        return self.host_memory(values).copy_(values).to(self.device, non_blocking=True)

    def in_plain_format(self, values: Tensor) -> Tensor:
        """Return values whose bits lie in order, to be looked at as integers."""
        return values

    # -- random numbers ----------------------------------------------------------------------------

    def generator_states(self) -> dict[str, Tensor]:
        """Return the states of the device's generators by device name; empty if the program uses none.

        Of all devices of the kind if this one has no index.
        """
        module = self.module
        if not (hasattr(module, "get_rng_state") and self.initialised):
            return {}
        places = [self.device]
        if ":" not in str(self.device):
            places = [torch.device(self.device.type, index) for index in range(module.device_count())]
        return {str(place): module.get_rng_state(place) for place in places}

    def set_generator_state(self, state: Tensor) -> bool:
        """Put a generator back; False if this process has no such device."""
        module = self.module
        if not (hasattr(module, "set_rng_state") and hasattr(module, "is_initialized")):
            return False
        if (self.device.index or 0) >= module.device_count():
            return False
        module.set_rng_state(state, self.device)
        return True

    # -- numbers -----------------------------------------------------------------------------------

    @property
    def saturates(self) -> bool:
        """True if an overflow becomes the largest finite number and NaN becomes 0: none is ever seen.

        Asked once, which may wait for the device.
        """
        return self._saturates

    @cached_property
    @torch.no_grad()
    def _saturates(self) -> bool:
        try:
            largest = torch.full((1,), torch.finfo(torch.float16).max, device=self.device).half()
            return bool(torch.isfinite(largest + largest).all())
        except (RuntimeError, NotImplementedError, TypeError):  # does not compute in float16
            return False

    def overflow_flag(self) -> Tensor | None:
        """Return whether there was an overflow since the flag was cleared, 0-dim bool on the device.

        None if the device has no such flag: it makes infinities, which anybody can see.
        """
        return None

    def clear_overflow_flag(self) -> None:
        """Forget overflows up to now."""

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply tensors of one dtype on this device in place by a 0-dim tensor, in few launches."""
        torch._foreach_mul_(list(tensors), factor)

    # -- what readers of a bundle and of a profile want to know ------------------------------------

    @property
    def switches(self) -> tuple[Switch, ...]:
        """What, besides `torch.use_deterministic_algorithms`, makes the device compute the same again."""
        return SWITCHES.get(self.device.type, ())

    def health_source(self) -> HealthSource | None:
        """Return where to ask for temperature, power and memory errors; None where nobody knows.

        Raises:
            Exception: whatever a driver raises where it is asked which card this is.
        """
        return None

    def settings(self) -> dict[str, Any]:
        """Return the settings of this kind of device that change results, as JSON."""
        return {}

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that shows up under a name in the device's profiler."""
        return torch.profiler.record_function(name)
