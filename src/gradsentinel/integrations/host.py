"""The training program as the adapters of torch frameworks see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradsentinel.errors import ConfigurationError
from gradsentinel.gradients import GradientView
from gradsentinel.host import TorchHost


class FrameworkHost(TorchHost):
    """A framework's modules and optimizers; it scales, clears gradients and steps schedulers itself.

    Raises:
        ConfigurationError: as `TorchHost` does, and for FSDP1, whose flat parameters hide what is in them.
    """

    def __init__(self, model: Any, optimizer: Any, *, scheduler: Sequence[Any] = (), **settings: Any) -> None:
        kept = [one for one in scheduler if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]
        super().__init__(model, optimizer, scheduler=kept, **settings)
        for _, root in self.modules():
            if any(
                base.__name__ == "FullyShardedDataParallel"
                for m in root.modules()
                for base in type(m).__mro__
            ):
                raise ConfigurationError(
                    "the model is wrapped by FSDP1 (FullyShardedDataParallel), whose flat parameters hide "
                    "which parameter a gradient belongs to; use FSDP2 (fully_shard)"
                )

    def _check_schedulers(self) -> None:
        """Take any scheduler: it is the framework that steps it."""

    def overflow_everywhere(self, optimizers: Sequence[Optimizer]) -> None:
        """Have the GradScaler drop this rank's step too: perhaps only another rank has seen an overflow."""
        if self.scaler is None:
            return
        for optimizer in optimizers:
            for found in self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                found.fill_(1.0)


def raw(optimizers: Iterable[Any]) -> list[Optimizer]:
    """Return the torch optimizers inside a framework's wrappers around them."""
    found = []
    for optimizer in optimizers:
        inner = optimizer
        while isinstance(getattr(inner, "optimizer", None), Optimizer) and inner.optimizer is not inner:
            inner = inner.optimizer
        found.append(inner)
    return found


def same_parameters(view: GradientView, parameters: Sequence[Tensor]) -> bool:
    """Return True if these parameters' gradients are exactly those of the view."""
    present = {id(p.grad) for p in parameters if p.grad is not None}
    return present == {id(gradient) for gradient in view.gradients}
