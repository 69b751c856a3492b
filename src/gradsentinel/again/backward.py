"""The backward pass of a micro-batch, and what it takes to run it the same way again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from gradsentinel.errors import ConfigurationError


@dataclass(slots=True)  # made in each step: to make a frozen one takes three times as long
class BackwardPass:
    """One backward pass of the step in flight, as the loop ran it; nobody changes it."""

    microbatch: int = 0
    """Number of the micro-batch whose loss it started from."""
    loss: Tensor | None = None
    """As the loop computed it, without its graph; None if the loop did not show it."""
    divisor: int = 1
    """The loss was divided by this, for accumulation."""
    reduction: tuple[bool, ...] = ()
    """`Reduction.state()` at the time."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Tensor.backward`."""


class Reduction:
    """The switches that say whether a backward pass adds up the gradients of all ranks.

    DDP turns its own off under `no_sync()`, FSDP2 by `set_requires_gradient_sync(False)` and
    `set_requires_all_reduce(False)`, FSDP1 under `no_sync()`.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.switches = [switch for module in modules for switch in _switches(module)]
        """Mostly there are none."""

    def state(self) -> tuple[bool, ...]:
        """Return the position of each switch; all true if the gradients are added up."""
        return tuple(bool(getattr(owner, name)) for owner, name in self.switches)

    @contextmanager
    def set_to(self, state: tuple[bool, ...]) -> Iterator[None]:
        """Put the switches as they were at another time; back again on leaving the block."""
        before = self.state()
        try:
            self._set(state)
            yield
        finally:
            self._set(before)

    def _set(self, state: tuple[bool, ...]) -> None:
        for (owner, name), position in zip(self.switches, state, strict=True):
            setattr(owner, name, position)


def check_loss(loss: object) -> None:
    """Raise ConfigurationError unless a backward pass can start from it."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigurationError(f"backward needs a scalar loss, got {shape}; reduce it, as with loss.mean()")
    if not loss.requires_grad:
        raise ConfigurationError("the loss needs no gradient: was it detached, or computed under no_grad?")


def run_backward(
    host: object, loss: Tensor, *, divisor: int = 1, settings: Mapping[str, Any] | None = None
) -> None:
    """Run the backward pass of a micro-batch: divided for accumulation, scaled if there is a GradScaler."""
    scaled = loss / divisor if divisor > 1 else loss
    scaler = getattr(host, "scaler", None)
    if scaler is not None:
        scaled = scaler.scale(scaled)
    scaled.backward(**settings) if settings else scaled.backward()  # type: ignore[no-untyped-call]


def _switches(root: nn.Module) -> Iterator[tuple[Any, str]]:
    for module in root.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            yield module, "require_backward_grad_sync"
        names = {base.__name__ for base in type(module).__mro__}
        if "FullyShardedDataParallel" in names and hasattr(module, "_sync_gradients"):
            yield module, "_sync_gradients"
        if "FSDPModule" in names and hasattr(module, "_get_fsdp_state"):
            state = module._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for group in groups:
                if group is not None:  # a module whose parameters all belong to modules inside it has none
                    yield group, "reduce_grads"
                    yield group, "all_reduce_grads"
