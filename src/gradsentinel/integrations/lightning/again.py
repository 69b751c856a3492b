"""The training step of a LightningModule, run again with a captured batch."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradsentinel.host import Forward

if TYPE_CHECKING:
    from gradsentinel.integrations.engine import Engine

_REMEMBERED = 1024
"""Of so many micro-batches the numbers are kept: more than a step ever has."""


class TrainingStep:
    """Gives the loss of a captured micro-batch as automatic optimization computes it.

    Through `training_step`, with the strategy's wrapper and the precision's context. What it logs is not
    logged twice, and torchmetrics do not count twice.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer = trainer
        self._module = module
        self._parameters = inspect.signature(module.training_step).parameters
        self._numbers: deque[int] = deque(maxlen=_REMEMBERED)
        self.engine: Engine | None = None

    @property
    def takes_iterator(self) -> bool:
        """True if the module draws its batches itself, so that nobody else sees them."""
        return "dataloader_iter" in self._parameters

    @property
    def _takes_number(self) -> bool:
        """True if the step is given the number of its batch, by the rule that Lightning itself has."""
        some = any(one.kind is one.VAR_POSITIONAL for one in self._parameters.values())
        return "batch_idx" in self._parameters or some or len(self._parameters) >= 2

    def remember(self, number: int) -> None:
        """Keep the number that Lightning gives the micro-batch that comes next."""
        self._numbers.append(number)

    def forward(self) -> Forward | None:
        """Return the function that computes the loss again, or None where that cannot be done."""
        return None if self.reason_against() else self._loss

    def reason_against(self) -> str:
        """Return why a step of this module cannot be computed again, "" if it can."""
        if not self._module.automatic_optimization:
            return "in manual optimization training_step runs the optimizers itself"
        if self.takes_iterator:
            return "training_step draws its batches itself (dataloader_iter)"
        if not type(self._module).backward.__module__.endswith("core.module"):
            return f"{type(self._module).__name__} has a backward of its own"
        return ""

    def _loss(self, model: Any, batch: Any) -> Tensor:
        trainer, module = self._trainer, self._module
        kwargs: dict[str, Any] = {"batch": batch}
        if self._takes_number:
            kwargs["batch_idx"] = self._number_of(batch)
        precision = trainer.precision_plugin
        with self._quiet():
            if model is module:
                with precision.train_step_context():
                    output = module.training_step(*kwargs.values())
            else:
                output = trainer.strategy.training_step(*kwargs.values())
        return output["loss"] if isinstance(output, Mapping) else output  # type: ignore[no-any-return]

    def _number_of(self, batch: Any) -> int:
        engine = self.engine
        if engine is None or not self._numbers:
            return 0
        count = len(engine.run.scene.microbatches)
        index = engine.microbatch_of(batch) - count
        return self._numbers[index] if -len(self._numbers) <= index < 0 else self._numbers[-1]

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Nothing is logged, and no metric counts a batch, while the step runs again."""
        module = self._module
        metrics = [m for m in module.modules() if hasattr(m, "_defaults") and hasattr(m, "_update_count")]
        kept = [
            (metric, {k: _copy(v) for k, v in vars(metric).items() if k in metric._defaults or k in _COUNTED})
            for metric in metrics
        ]
        own = {name: vars(module).get(name) for name in ("log", "log_dict")}
        vars(module).update(log=_ignored, log_dict=_ignored)
        try:
            yield
        finally:
            for name, before in own.items():
                if before is None:
                    vars(module).pop(name, None)
                else:
                    vars(module)[name] = before
            for metric, state in kept:
                vars(metric).update(state)


_COUNTED = {"_update_count", "_computed", "_forward_cache"}
"""What a torchmetrics.Metric keeps beside its states."""


def _copy(state: Any) -> Any:
    """Metrics add to their tensors and lists in place."""
    return state.clone() if isinstance(state, Tensor) else copy.copy(state)


def _ignored(*_: Any, **__: Any) -> None:
    """Take what is logged, and forget it."""
