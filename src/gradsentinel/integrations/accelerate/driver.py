"""Puts the watch around the methods of one Accelerator and of its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations.driver import LoopDriver
from gradsentinel.integrations.engine import Engine
from gradsentinel.integrations.host import raw, same_parameters

_SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_MUSA", "FSDP")


class AcceleratorDriver(LoopDriver):
    """Drives an engine from `backward`, `clip_grad_norm_` and the optimizers' `step`.

    Args:
        accelerator: whose methods are wrapped, of this instance only.
        optimizers: as `accelerator.prepare` returned them.
    """

    def __init__(self, accelerator: Any, optimizers: Sequence[Any]) -> None:
        super().__init__(optimizers)
        self.accelerator = accelerator
        self.weight = 1
        """The loss is shown times this: what somebody has divided it by before `backward`."""
        self._captured: list[tuple[Tensor, dict[str, Any]]] | None = None

    def attach(self, engine: Engine) -> None:
        """Begin to drive; `wraps.undo()` ends it."""
        super().attach(engine)
        self.wraps.wrap(self.accelerator, "backward", self._around_backward)
        self.wraps.wrap(self.accelerator, "clip_grad_norm_", self._around_clip_norm)
        self.wraps.wrap(self.accelerator, "clip_grad_value_", self._around_clip_value)

    def steps_now(self, optimizer: Any) -> bool:
        """Return False within a window of accumulation, where Accelerate's optimizers do nothing."""
        return bool(optimizer.gradient_state.sync_gradients)

    def has_stepped(self, optimizer: Any) -> None:
        """Let Accelerate know whether the step was skipped, which is what holds a scheduler back."""
        dropped = self.engine.dropped
        if dropped or optimizer.scaler is None:
            optimizer._is_overflow = dropped

    @contextmanager
    def capturing(self) -> Iterator[list[tuple[Tensor, dict[str, Any]]]]:
        """Take the losses that are given to `backward`, instead of running it."""
        before, self._captured = self._captured, []
        try:
            yield self._captured
        finally:
            self._captured = before

    def _around_backward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def backward(loss: Tensor, **kwargs: Any) -> None:
            if self._captured is not None:
                self._captured.append((loss, kwargs))
                return
            plain(loss, **kwargs)
            detached = loss.detach()
            self.engine.backward_done(
                detached,
                shown=detached * self.weight if self.weight > 1 else None,
                divisor=self.accelerator.gradient_accumulation_steps,
                settings=kwargs,
            )

        return backward

    def _around_clip_norm(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if not self.accelerator.sync_gradients:
                return plain(listed, max_norm, norm_type=norm_type)
            first = self._judge_those_of(listed, norm_type)
            judged = self.engine.judged
            if judged is None:
                return plain(listed, max_norm, norm_type=norm_type)
            if not judged.decision.apply:
                return judged.view.total_norm
            if first and judged.view.norm_type == norm_type and same_parameters(judged.view, listed):
                return self.engine.clip(float(max_norm))
            judged.clipped = True
            if self.accelerator.scaler is None:
                return plain(listed, max_norm, norm_type=norm_type)
            return self.accelerator._clip_grad_norm_dtensor_aware(listed, max_norm, norm_type=norm_type)

        return clip_grad_norm_

    def _around_clip_value(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_value_(parameters: Any, clip_value: float) -> None:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if not self.accelerator.sync_gradients:
                plain(listed, clip_value)
                return
            self._judge_those_of(listed, 2.0)
            judged = self.engine.judged
            if judged is not None and not judged.decision.apply:
                return  # torch cannot clip nothing by value, which is what a dropped step leaves
            if self.accelerator.scaler is None:
                plain(listed, clip_value)
            else:  # the plain one would unscale a second time
                nn.utils.clip_grad_value_(listed, clip_value)

        return clip_grad_value_

    def _judge_those_of(self, parameters: Sequence[Tensor], norm_type: float) -> bool:
        """Judge the step of the optimizers of these parameters; False if that was done before."""
        mine = {id(parameter) for parameter in parameters}
        inner = [
            one
            for one in raw(self.optimizers)
            if any(id(p) in mine for group in one.param_groups for p in group["params"])
        ]
        if not inner or any(self.engine.concerns(one) for one in inner):
            return False
        self.engine.judge(inner, norm_type=float(norm_type))
        return True


def check_accelerator(accelerator: Any) -> None:
    """Raise ConfigurationError if gradients are clipped and stepped where nobody sees them."""
    kind = getattr(accelerator.distributed_type, "name", str(accelerator.distributed_type))
    if kind not in _SUPPORTED:
        raise ConfigurationError(
            f"an Accelerator with distributed_type={kind} clips and steps by itself, where nobody sees the "
            "gradients; supported are one process, DDP and FSDP2"
        )
