"""Profiler marks: what the sentinel does within a step, as named ranges. Off unless asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from gradsentinel.devices import Device, device_of
from gradsentinel.switches import switched_on

if TYPE_CHECKING:
    from gradsentinel.watch import Watch

VARIABLE = "GRADSENTINEL_MARKS"
"""Set to 1 to have the ranges in a profile."""

_PHASES = {
    "after_backward": "after_backward",
    "before_clip": "before_clip",
    "submit": "before_clip",
    "settle_late": "settle",
    "settle_pending": "settle",
    "after_step": "after_step",
    "prepare": "prepare",
}
"""Methods of a watch, and what their ranges are called."""


def wanted() -> bool:
    """Return True if the environment asks for marks."""
    return switched_on(VARIABLE)


def mark(watch: Watch) -> None:
    """Show the phases of a watch, the agreement of the ranks and each callback under `gradsentinel/...`.

    As mstx ranges on an NPU, NVTX ranges with CUDA, and in torch's own profiler everywhere. The methods are
    wrapped on these very objects: where nobody asks, there is nothing to run.
    """
    device = device_of(watch.run.host.device)
    for method, name in _PHASES.items():
        _wrap(watch, method, name, device)
    _wrap(watch.inquiry, "handle", "incident", device)
    _wrap(watch.run.consensus, "agree", "agree", device)
    for listener in watch.bus.listeners():
        method = getattr(listener.function, "__name__", "function")
        name = listener.name if method == listener.name else f"{listener.name}.{method}"
        listener.function = _ranged(listener.function, name, device)


def _wrap(owner: object, method: str, name: str, device: Device) -> None:
    setattr(owner, method, _ranged(getattr(owner, method), name, device))


def _ranged(function: Callable[..., Any], name: str, device: Device) -> Callable[..., Any]:
    @wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with device.mark(f"gradsentinel/{name}"):
            return function(*args, **kwargs)

    return inside
