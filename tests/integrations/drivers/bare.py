"""Loops that are written around Fabric and Accelerate."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import contextlib
import gc

import torch
from safetensors.torch import load_file
from training import Driver, Result


class Fabric(Driver):
    name = "fabric"
    package = "lightning"
    hidden = ("lightning", "lightning_fabric")
    module = "gradsentinel.integrations.lightning.fabric"
    oldest = "2.6"

    def train(self, task, folder, callbacks, **settings):
        from lightning.fabric import Fabric as LightningFabric

        from gradsentinel.integrations.lightning.fabric import prepare

        fabric = LightningFabric(accelerator="cpu", devices=1, **settings)
        net = task.net()
        inner = task.optimizer(net)
        scheduler = task.scheduler(inner)
        model, optimizer = fabric.setup(net, inner)
        result = Result(net, inner, scheduler, host=fabric)
        task.begins()
        for _ in range(task.runs):
            sentinel = None
            if callbacks is not None:
                sentinel = prepare(
                    fabric,
                    model,
                    optimizer,
                    callbacks=callbacks,
                    scheduler=scheduler,
                    forward=task.divided,
                    run_dir=folder,
                )
            with sentinel or contextlib.nullcontext():
                loader = task.loader()
                for number, batch in enumerate(sentinel.steps(loader) if sentinel else loader, 1):
                    fabric.backward(task.divided(model, batch))
                    if task.ends_step(number, loader):
                        if task.max_norm is not None:
                            strict = sentinel is None
                            fabric.clip_gradients(
                                model, optimizer, max_norm=task.max_norm, error_if_nonfinite=strict
                            )
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
            if sentinel:
                result.incidents += sentinel.incidents
        return result

    def begin(self):
        from gradsentinel.integrations.lightning.fabric import prepare

        prepare(None, None, None)

    def saved(self, where):
        return torch.load(where, weights_only=False)["model0"]

    def parts(self, result):
        return [result.host, result.host.strategy, result.optimizer]


class Accelerate(Driver):
    name = "accelerate"
    package = "accelerate"
    hidden = ("accelerate",)
    module = "gradsentinel.integrations.accelerate"
    oldest = "1.10"

    def train(self, task, folder, callbacks, **settings):
        from accelerate import Accelerator

        from gradsentinel.integrations.accelerate import prepare

        if not task.nested:
            forget_accelerator()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=task.accumulate, **settings)
        net = task.net()
        inner = task.optimizer(net)
        plain_scheduler = task.scheduler(inner)
        model, optimizer, loader, scheduler = accelerator.prepare(net, inner, task.loader(), plain_scheduler)
        result = Result(net, inner, plain_scheduler, host=accelerator)
        task.begins()
        for _ in range(task.runs):
            sentinel = None
            if callbacks is not None:
                sentinel = prepare(
                    accelerator,
                    model,
                    optimizer,
                    callbacks=callbacks,
                    scheduler=scheduler,
                    forward=task.loss,
                    run_dir=folder,
                )
            with sentinel or contextlib.nullcontext():
                for batch in sentinel.steps(loader) if sentinel else loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(task.loss(model, batch))
                        if accelerator.sync_gradients and task.max_norm is not None:
                            accelerator.clip_grad_norm_(model.parameters(), task.max_norm)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
            if sentinel:
                result.incidents += sentinel.incidents
        return result

    def begin(self):
        from gradsentinel.integrations.accelerate import prepare

        prepare(None, None, None)

    def saved(self, where):
        return load_file(where / "model.safetensors")

    def parts(self, result):
        return [result.host, *result.host._optimizers]


def forget_accelerator():
    """Accelerate keeps one state per process, which another test may have set up otherwise."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if not gc.get_freeze_count():  # the Trainer collects garbage several times a run; this makes that quick
        gc.collect()
        gc.freeze()
