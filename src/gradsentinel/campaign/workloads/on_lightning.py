"""The same task in Lightning: the Trainer's own loop, and GradSentinel's callbacks as Lightning ones."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradsentinel import standard
from gradsentinel.campaign.feed import Feed
from gradsentinel.campaign.journal import Journal, Notes
from gradsentinel.campaign.kinds import Site
from gradsentinel.campaign.policies import DIAGNOSIS_BUDGET
from gradsentinel.campaign.probe import Probe
from gradsentinel.campaign.workloads.text import MAX_NORM, Text, loss_of
from gradsentinel.errors import TrainingAborted
from gradsentinel.faults import FaultPlan

if TYPE_CHECKING:
    from gradsentinel.campaign.trial import Trial


def _loss_of_module(module: Any, batch: Any) -> Tensor:
    return loss_of(module.gpt, batch)


def train(trial: Trial, policy: str, scratch: Path) -> dict[str, Any]:
    """Train under a policy and return what is kept of it. A run that is aborted is not started again."""
    import lightning  # noqa: PLC0415 - optional

    from gradsentinel.campaign.trial import result  # noqa: PLC0415 - it imports this module
    from gradsentinel.integrations.lightning import RunSettings, adapt  # noqa: PLC0415 - imports Lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed = trial.seed * 1000 + 500 + trial.number
    task, faults, journal = Text(steps=trial.steps, seed=seed), trial.faults(), Journal()

    class Module(lightning.LightningModule):  # type: ignore[misc] # it has no types here
        def __init__(self) -> None:
            super().__init__()
            self.gpt = task.model()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return loss_of(self.gpt, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            if policy != "gradsentinel":
                finite = bool(outputs["loss"].isfinite().all())
                journal.step(journal.number, applied=True, finite=finite)

    module = Module()
    optimizer = task.optimizer(module)
    plan = None
    if policy != "clean":
        plan = FaultPlan([one.fault(Site(optimizer=optimizer)) for one in faults], seed=seed, rank=0)
    probe = Probe(module, optimizer, _loss_of_module, task.optimizer)
    feed = Feed(task.batches(), faults, journal, plan=plan, probe=probe, seed=seed)
    callbacks = []
    if policy == "gradsentinel":
        callbacks = [adapt(one) for one in (*standard(scratch), Notes(journal=journal))]
        callbacks.append(RunSettings(run_dir=scratch, diagnosis_budget=DIAGNOSIS_BUDGET))
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=MAX_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        default_root_dir=scratch,
    )
    torch.manual_seed(seed)
    attached = None if plan is None else plan.attach(module)
    started = time.perf_counter()
    try:
        trainer.fit(module, feed)
    except TrainingAborted as death:
        journal.died(str(death))
    finally:
        if attached is not None:
            attached.detach()
    journal.rest()
    seconds = time.perf_counter() - started
    return result(trial, journal, module.gpt, {**feed.as_dict(), "seconds": seconds})
