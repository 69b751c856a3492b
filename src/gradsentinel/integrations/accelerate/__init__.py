"""Watches a loop that is written around Accelerate.

model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
sentinel = prepare(accelerator, model, optimizer, scheduler=scheduler,
                   forward=lambda model, batch: model(**batch).loss)
for batch in sentinel.steps(loader):
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
sentinel.close()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradsentinel.callback import Callback
from gradsentinel.errors import ConfigurationError
from gradsentinel.host import Forward
from gradsentinel.integrations.accelerate.driver import AcceleratorDriver, check_accelerator
from gradsentinel.integrations.bare import LoopSentinel
from gradsentinel.integrations.driver import listed, watch_loop
from gradsentinel.integrations.versions import require

__all__ = ["LoopSentinel", "prepare"]

OLDEST = "1.10"


def prepare(
    accelerator: Any,
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
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
    """Begin to watch a loop, which goes on calling the accelerator as before; called on every rank.

    Wrapped are methods of this accelerator and of these optimizers, until `close()`. A dropped step counts
    as a skipped one for Accelerate, so a scheduler that was prepared with the optimizer stands still; any
    other scheduler given here is put back before the next step.

    Args:
        accelerator: as it is, after everything was prepared.
        model: what `accelerator.prepare` returned, one or several.
        optimizer: what `accelerator.prepare` returned, one or several.
        callbacks: as for `Sentinel`.
        scheduler: the LR scheduler(s), prepared or not: part of snapshots.
        forward: `forward(model, batch) -> loss`, with which a step can be computed again: what the loop
            gives to `accelerator.backward`.
        run_dir: where events and incidents are written; None: `gradsentinel-runs/<time>` if there is need.
        extra: further objects with state_dict and load_state_dict that belong to the training state.
        mesh: the job's DeviceMesh.
        timeout: seconds that a rank may keep the others waiting before they stop, naming it.
        diagnosis_budget: seconds that finding out about one incident may take.

    Raises:
        FrameworkError: if accelerate is missing or too old.
        ConfigurationError: for anything else that cannot work.
        TrainingAborted: if a detector finds the initial state unusable.
    """
    require("accelerate", oldest=OLDEST, extra="huggingface")
    check_accelerator(accelerator)
    optimizers = listed(optimizer)
    for one in optimizers:
        if not hasattr(one, "gradient_state"):
            raise ConfigurationError(
                f"{type(one).__name__} was not prepared: give what accelerator.prepare(optimizer) returned"
            )
    driver = AcceleratorDriver(accelerator, optimizers)
    driver.check_free(accelerator)
    plain_save: Callable[..., Any] = accelerator.save_state

    def save(directory: Path) -> str:
        return str(plain_save(str(directory / "aborted")))

    sentinel = watch_loop(
        driver,
        model,
        called=model,
        callbacks=callbacks,
        schedulers=[getattr(one, "scheduler", one) for one in listed(scheduler)],
        scaler=accelerator.scaler,
        forward=forward,
        run_dir=run_dir,
        extra=extra,
        mesh=mesh,
        timeout=timeout,
        diagnosis_budget=diagnosis_budget,
        save=save,
    )
    driver.wraps.wrap(accelerator, "save_state", driver.checked)
    driver.wraps.wrap(accelerator, "save_model", driver.checked_own)
    return sentinel
