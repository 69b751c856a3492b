"""What a plain loop is told, once each, when it uses the sentinel in a way that leaves it blind."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch.optim import Optimizer

logger = logging.getLogger("gradsentinel")

BLIND = (
    "step() without sentinel.backward(loss): the loss and the micro-batches are not seen, so a NaN loss "
    "whose gradients are zero is missed; call sentinel.backward(loss) instead of loss.backward()"
)
LEFT_OVER = (
    "gradients of an optimizer that did not step are still there and this backward() adds to them: "
    "step(optimizer=...) clears only what it steps, so call the other optimizer's zero_grad() first"
)
NEVER_STEPPED = "sentinel.backward() was called but sentinel.step() never: nothing was watched"


class Hints:
    """Says each thing once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, text: str) -> None:
        """Log a warning, unless it was logged before."""
        if text not in self._told:
            self._told.add(text)
            logger.warning(text)


def holds_gradients(optimizers: Iterable[Optimizer]) -> bool:
    """Return True if a parameter of these optimizers has a gradient."""
    return any(
        p.grad is not None for one in optimizers for group in one.param_groups for p in group["params"]
    )
