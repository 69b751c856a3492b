"""Watches a loop that is written around Lightning Fabric.

model, optimizer = fabric.setup(model, optimizer)
sentinel = prepare(fabric, model, optimizer, scheduler=scheduler, forward=loss)
for batch in sentinel.steps(loader):
    fabric.backward(loss(model, batch))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
sentinel.close()
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsentinel.callback import Callback
from gradsentinel.errors import ConfigurationError
from gradsentinel.host import Forward
from gradsentinel.integrations.bare import LoopSentinel
from gradsentinel.integrations.driver import LoopDriver, listed, watch_loop
from gradsentinel.integrations.engine import Engine
from gradsentinel.integrations.host import raw
from gradsentinel.integrations.versions import require

__all__ = ["LoopSentinel", "prepare"]


def prepare(
    fabric: Any,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    callbacks: Sequence[Callback] | None = None,
    scheduler: Any = None,
    forward: Forward | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    extra: Mapping[str, Any] | None = None,
    mesh: Any = None,
    timeout: float = 600.0,
    diagnosis_budget: float = 30.0,
) -> LoopSentinel:
    """Begin to watch a loop, which goes on calling Fabric as before; called on every rank.

    Wrapped are `backward`, `clip_gradients` and `save` of this Fabric, and `step` and `zero_grad` of these
    optimizers, until `close()`.
    Fabric has no skip that a scheduler knows of, so one that is given here is put back before the next step
    if it moved after a dropped one.

    Args:
        fabric: as it is, launched, after `setup`.
        model: what `fabric.setup` returned, one or several.
        optimizer: what `fabric.setup` returned, one or several.
        callbacks: as for `Sentinel`.
        scheduler: the LR scheduler(s) of the loop.
        forward: `forward(model, batch) -> loss`: exactly what the loop gives to `fabric.backward`, divided
            for accumulation if the loop does so.
        run_dir: where events and incidents are written; None: `gradsentinel-runs/<time>` if there is need.
        extra: further objects with state_dict and load_state_dict that belong to the training state.
        mesh: the job's DeviceMesh.
        timeout: seconds that a rank may keep the others waiting before they stop, naming it.
        diagnosis_budget: seconds that finding out about one incident may take.

    Raises:
        FrameworkError: if lightning is missing or too old.
        ConfigurationError: for anything else that cannot work.
        TrainingAborted: if a detector finds the initial state unusable.
    """
    require("lightning", "lightning_fabric", oldest="2.6", extra="lightning")
    models, optimizers, schedulers = listed(model), listed(optimizer), listed(scheduler)
    for one, part in ((models, "_forward_module"), (optimizers, "_strategy")):
        for each in one:
            if not hasattr(each, part):
                raise ConfigurationError(
                    f"{type(each).__name__} was not set up: give what fabric.setup(model, optimizer) returned"
                )
    if any(kind.__name__ == "DeepSpeedStrategy" for kind in type(fabric.strategy).__mro__):
        raise ConfigurationError("DeepSpeed clips and steps by itself, where nobody sees the gradients")
    driver = _FabricDriver(fabric, optimizers, forward)
    driver.check_free(fabric)
    plain_save: Callable[..., Any] = fabric.save

    def save(directory: Path) -> str:
        state = {f"model{n}": one for n, one in enumerate(models)}
        state |= {f"optimizer{n}": one for n, one in enumerate(optimizers)}
        state |= {f"scheduler{n}": one for n, one in enumerate(schedulers)}
        path = directory / "aborted.ckpt"
        plain_save(path, state)
        return str(path)

    return watch_loop(
        driver,
        [one._forward_module for one in models],
        called=models[0] if len(models) == 1 else models,
        callbacks=callbacks,
        schedulers=schedulers,
        scaler=getattr(fabric.strategy.precision, "scaler", None),
        forward=None if forward is None else driver.forward,
        run_dir=run_dir,
        extra=extra,
        mesh=mesh,
        timeout=timeout,
        diagnosis_budget=diagnosis_budget,
        save=save,
    )


class _FabricDriver(LoopDriver):
    """Drives an engine from one Fabric's methods."""

    def __init__(self, fabric: Any, optimizers: Sequence[Any], forward: Forward | None) -> None:
        super().__init__(optimizers)
        self._fabric = fabric
        self._forward = forward

    def attach(self, engine: Engine) -> None:
        """Begin to drive; `wraps.undo()` ends it."""
        super().attach(engine)
        self.wraps.wrap(self._fabric, "backward", self._around_backward)
        self.wraps.wrap(self._fabric, "clip_gradients", self._around_clip)
        self.wraps.wrap(self._fabric, "save", self.checked)

    def forward(self, model: Any, batch: Any) -> Tensor:
        """Compute the loss again; Fabric refuses any backward pass that it does not know of, so tell it."""
        _announce_backward(True)
        assert self._forward is not None
        return self._forward(model, batch)

    def judge(self, inner: Optimizer, norm_type: float | None = None) -> None:
        """Judge the step of an optimizer; if it was computed again, Fabric's mind is at rest after that."""
        try:
            super().judge(inner, norm_type)
        finally:
            _announce_backward(False)

    def _around_backward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            plain(tensor, *args, **kwargs)
            settings = {name: value for name, value in kwargs.items() if name != "model"}
            self.engine.backward_done(tensor.detach(), settings=settings)

        return backward

    def _around_clip(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def clip_gradients(
            module: Any,
            optimizer: Any,
            clip_val: float | None = None,
            max_norm: float | None = None,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = True,  # noqa: FBT001, FBT002 - as theirs
        ) -> Tensor | None:
            if (clip_val is None) == (max_norm is None):  # Fabric says what is wrong with that
                return plain(module, optimizer, clip_val=clip_val, max_norm=max_norm)  # type: ignore[no-any-return]
            (inner,) = raw([optimizer])
            first = not self.engine.concerns(inner)
            self.judge(inner, float(norm_type))
            refuses = error_if_nonfinite and self._norm_is_bad()
            if max_norm is not None and not refuses and (first or self.engine.dropped):
                return self.engine.clip(float(max_norm))
            parameters = [p for group in inner.param_groups for p in group["params"]]
            if max_norm is not None:
                return nn.utils.clip_grad_norm_(
                    parameters, max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
                )
            if not self.engine.dropped:  # torch cannot clip nothing by value
                nn.utils.clip_grad_value_(parameters, clip_val)  # type: ignore[arg-type] # one of them is given
            return None

        return clip_gradients

    def _norm_is_bad(self) -> bool:
        """True if a step is made although its norm is not finite: nobody minded who was asked to."""
        latest = self.engine.latest
        if latest is None or not latest.apply or latest.safe_norm is not None:
            return False
        return not math.isfinite(latest.grad_norm)


def _announce_backward(running: bool) -> None:  # noqa: FBT001 - a switch is what it is
    for name in ("lightning.fabric.wrappers", "lightning_fabric.wrappers"):
        module = sys.modules.get(name)
        if module is not None:
            vars(module)["_in_fabric_backward"] = running
