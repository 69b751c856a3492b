"""What a LightningModule logs in `training_step`, kept to the steps that were made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsentinel.integrations.wraps import Wraps

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments of one `self.log`."""
States = list[tuple[Any, dict[str, Any]]]
"""What each torchmetrics.Metric of the module holds."""

_STEP = "training_step"
_VALUES = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "has_reset", "_update_count")
"""What a logged value is kept in. Lightning replaces these and never writes into them."""
_COUNTED = {"_update_count", "_computed", "_forward_cache"}
"""What a torchmetrics.Metric keeps beside its states."""


class Logged:
    """Takes back what a bad step has logged, and logs what it came to when it was computed again.

    Lightning has added the loss to an epoch's mean, and torchmetrics have counted the batch, before anybody
    can judge the step. Concerned is what `training_step` itself logs; other hooks' values stay.

    Args:
        trainer: that is training.
        module: what it trains.
        wraps: where a wrap around the trainer's results is put.
    """

    def __init__(self, trainer: Any, module: Any, wraps: Wraps) -> None:
        self._trainer = trainer
        self._module = module
        self._results: Any = trainer.fit_loop.epoch_loop._results
        self._before: dict[str, dict[str, Any]] = {}
        """The values at the start of the step in flight."""
        self._metrics: list[Any] = []
        self._counted: States = []
        self._again: dict[int, tuple[list[Call], States]] = {}
        """What each micro-batch logged and counted when it was computed again."""
        self._loss: Tensor | None = None
        """The last loss that was computed again."""
        self._hidden: dict[str, Any] = {}
        """Values of a dropped step that nobody shall monitor, and what they are to be instead."""
        self._judged = 0
        self._dropped = self._healed = False
        wraps.wrap(self._results, "metrics", self._around_metrics)

    def begin_epoch(self) -> None:
        """Forget the values of the epoch before; metrics may have been added since."""
        self._metrics = metrics_in(self._module)
        self.begin()

    def begin(self) -> None:
        """Remember the values at the start of a step."""
        self._before = {key: _values(one) for key, one in self._results.items() if one.meta.fx == _STEP}
        if self._metrics:
            self._counted = states_of(self._metrics)
        self._again.clear()

    def begin_batch(self) -> None:
        """Hear that a micro-batch is about to enter the model."""
        self._judged, self._dropped, self._healed, self._loss = 0, False, False, None
        self._hidden.clear()

    def counted_before(self, number: int) -> States:
        """Return what the metrics hold when this micro-batch of the step is computed again."""
        return self._again[number - 1][1] if number - 1 in self._again else self._counted

    def recompute(self, number: int, calls: list[Call], states: States) -> None:
        """Keep what a micro-batch logged and counted; if it is computed several times, the last counts."""
        self._again[number] = (calls, states)

    def see_loss(self, loss: Tensor) -> None:
        """Keep the loss of a micro-batch that was computed again."""
        self._loss = loss.detach()

    def heal(self, loss: Any, divisor: int = 1) -> None:
        """Write the loss of a healed step where somebody may yet read the bad one."""
        if self._healed and self._loss is not None and isinstance(loss, Tensor):
            loss.data.copy_(self._loss / divisor if divisor > 1 else self._loss)  # no new version

    def judged(self, *, dropped: bool, recomputed: bool, batches: Sequence[Any]) -> None:
        """Hear what becomes of a step; of one that was computed again, the new values count at once."""
        self._judged += 1
        self._dropped = self._dropped or dropped
        if recomputed and not dropped and len(self._again) == max(1, len(batches)):
            self._healed = True
            self._log_again(batches)

    def settle(self) -> None:
        """Take back what a dropped step has logged, when its micro-batch is over and before any other hook.

        Of a batch with several optimizer steps only what is not finite: it may come from another one. So of
        a step that was healed: a module that clips and steps by itself may log its old loss after that.
        """
        if not (self._dropped or self._healed):
            return
        several = self._judged > 1 or not self._dropped
        self._dropped = self._healed = False
        for key, one in self._of_the_step():
            if several and not (one.is_tensor and _spoilt(one)):
                continue
            before, cache = self._before.get(key, {}), one._forward_cache
            if one.meta.on_step:
                self._hidden[key] = before.get("_forward_cache")
            self._put_back(one, before)
            one._forward_cache, one.has_reset = cache, False  # the loggers show what it was
        if not several:
            put_back(self._counted)

    def _log_again(self, batches: Sequence[Any]) -> None:
        results, module = self._results, self._module
        now = results.batch, results.batch_size, module._current_fx_name
        for key, one in self._of_the_step():
            self._put_back(one, self._before.get(key, {}))
        module._current_fx_name = _STEP
        try:
            for number in sorted(self._again):
                calls, states = self._again[number]
                put_back(states)
                results.batch, results.batch_size = batches[number] if batches else now[0], None
                for args, kwargs in calls:
                    module.log(*args, **kwargs)
        finally:
            results.batch, results.batch_size, module._current_fx_name = now

    def _of_the_step(self) -> list[tuple[str, Any]]:
        return [(key, one) for key, one in self._results.items() if one.meta.fx == _STEP]

    @staticmethod
    def _put_back(one: Any, before: Mapping[str, Any]) -> None:
        """Have a logged value where it was; one that was not there yet is as if nothing had been logged."""
        if not one.is_tensor:  # the metric itself is put back with the others
            one._forward_cache, one._computed = before.get("_forward_cache"), None
        elif before:
            vars(one).update(before)
        else:
            device = one.value.device
            one.reset()
            for name in one._defaults:
                setattr(one, name, getattr(one, name).to(device))

    def _around_metrics(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def metrics(on_step: bool) -> Any:  # noqa: FBT001 - as theirs
            found = plain(on_step)
            if on_step:
                for key, instead in self._hidden.items():
                    one = self._results[key]
                    for name in {one.meta.name, one.meta.forked_name(on_step)}:
                        if instead is None:
                            found["callback"].pop(name, None)
                        else:
                            found["callback"][name] = instead
            return found

        return metrics


def metrics_in(module: Any) -> list[Any]:
    """Return the torchmetrics inside a module."""
    return [one for one in module.modules() if hasattr(one, "_defaults") and hasattr(one, "_update_count")]


def states_of(metrics: Sequence[Any]) -> States:
    """Return what metrics hold; they add to their tensors and lists in place, so it is copied."""
    return [
        (one, {k: _copy(v) for k, v in vars(one).items() if k in one._defaults or k in _COUNTED})
        for one in metrics
    ]


def put_back(states: States) -> None:
    """Have metrics hold what they held; what is given stays as it is."""
    for one, state in states:
        one.__dict__.update({name: _copy(value) for name, value in state.items()})


def _values(one: Any) -> dict[str, Any]:
    held = vars(one)
    return {name: held[name] for name in _VALUES if name in held}


def _copy(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else copy.copy(state)


def _spoilt(one: Any) -> bool:
    seen = [one.value, one._forward_cache]
    return any(isinstance(value, Tensor) and not bool(torch.isfinite(value).all()) for value in seen)
