"""Watching a loop that cannot be edited, through the optimizers' own hooks."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsentinel.decision import Decision
from gradsentinel.host import TorchHost
from gradsentinel.watch import Watch

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("gradsentinel")

LIMITS = (
    "attached through optimizer hooks: the loss is not seen, the LR scheduler of the loop moves on after a "
    "dropped step, a step that a GradScaler drops is not seen, and clipping has been done before the check "
    "(which parameter it was is taken from the backward pass instead)"
)


class Attachment:
    """Checks before every `optimizer.step()` and drops the step by taking the gradients away.

    Each optimizer's step is a step of its own. Evidence is taken once per backward pass, with one
    fused norm over the gradients, because clipping spreads one NaN over all parameters.
    """

    def __init__(self, host: TorchHost, watch: Watch) -> None:
        self._host = host
        self._watch = watch
        self._handles: list[Any] = []
        self._decision: Decision | None = None
        self._suspects: list[tuple[tuple[str, ...], Tensor]] = []

    def __enter__(self) -> Self:
        logger.warning(LIMITS)
        self._watch.prepare()  # a checkpoint may have been loaded since the sentinel was made
        trainable = [p for _, p in self._host.named_parameters() if p.requires_grad]
        if trainable:
            self._handles.append(
                torch.autograd.graph.register_multi_grad_hook(trainable, self._in_backward, mode="any")
            )
        for optimizer in self._host.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def detach(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _in_backward(self, _: Tensor) -> None:
        """Ask the engine to call back at the end of this backward pass, when all hooks have run."""
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._after_backward)  # as DDP and FSDP do

    def _after_backward(self) -> None:
        view = self._host.gradients()
        self._suspects.append((view.names, view.norms))
        self._watch.after_backward(None, view, scaled=True)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._judge(optimizer)
            return None

        def judged() -> Any:
            """The gradients are those of the closure, so they are judged when it has run."""
            loss = closure()
            self._judge(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], judged, *args[2:]), kwargs
        return args, {**kwargs, "closure": judged}

    def _judge(self, optimizer: Optimizer) -> None:
        view = self._host.gradients([optimizer])
        view.origin, view.final = self._origin, True
        # A fused optimizer is called even when the GradScaler found an overflow; it then does nothing.
        scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        decision = self._watch.before_clip(view, optimizers=[optimizer], loss_scale=scale, overflow=overflow)
        self._decision = decision
        if not decision.apply:
            self._host.drop([optimizer])

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        decision, self._decision = self._decision, None
        self._suspects.clear()
        if decision is not None:
            self._watch.after_step(decision, learning_rates=self._host.learning_rates())
            self._watch.prepare()

    def _origin(self) -> frozenset[str]:
        """Return the parameters that were bad in the backward passes, before clipping spread it; waits."""
        bad: set[str] = set()
        for names, norms in self._suspects:
            finite = torch.isfinite(norms).tolist()
            bad.update(name for name, fine in zip(names, finite, strict=True) if not fine)
        return frozenset(bad)
