"""Lightning's Trainer, under both names of its package, with automatic and manual optimization."""

import importlib
from typing import ClassVar

import torch
from training import Driver, Result, quiet


def lightning_module(pl, task, net, *, manual):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net
            self.automatic_optimization = not manual
            self.window = 0

        def training_step(self, batch, batch_idx):
            loss = task.loss(self.net, batch)
            self.log("loss", loss.detach(), on_step=True)
            if not manual:
                return loss
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            self.manual_backward(loss / task.accumulate if task.accumulate > 1 else loss)
            self.window += 1
            if self.window == task.accumulate or self.trainer.is_last_batch:
                if task.max_norm is not None:
                    self.clip_gradients(
                        optimizer, gradient_clip_val=task.max_norm, gradient_clip_algorithm="norm"
                    )
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                self.window = 0
            return None

        def configure_optimizers(self):
            optimizer = task.optimizer(self.net)
            scheduler = task.scheduler(optimizer)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Module()


class Lightning(Driver):
    name = "lightning"
    package = "lightning"
    hidden = ("lightning", "lightning.pytorch", "pytorch_lightning")
    module = "gradsentinel.integrations.lightning"
    oldest = "2.6"
    rivals = ("pytorch_lightning",)
    imported = "lightning.pytorch"
    manual = False
    lacks: ClassVar = {"draws": "Lightning does it"}

    def settings(self, folder, callbacks):
        from gradsentinel.integrations.lightning import RunSettings, adapt  # noqa: PLC0415 - it takes seconds

        if callbacks is None:
            return []
        return [*(adapt(one) for one in callbacks), RunSettings(run_dir=folder)]

    def trainer(self, task, callbacks, **settings):
        pl = importlib.import_module(self.imported)
        settings = {
            "max_epochs": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        }
        if not self.manual:
            settings |= {"accumulate_grad_batches": task.accumulate, "gradient_clip_val": task.max_norm}
        return pl, pl.Trainer(callbacks=callbacks, **settings)

    def train(self, task, folder, callbacks, **settings):
        natives = self.settings(folder, callbacks)
        pl, trainer = self.trainer(task, natives, **settings)
        net = task.net()
        module = lightning_module(pl, task, net, manual=self.manual)
        incidents = ()
        task.begins()
        with quiet() as warned:
            for run in range(task.runs):
                trainer.fit_loop.max_epochs = run + 1
                trainer.fit(module, task.loader())
                incidents += incidents_of(natives)
        return Result(net, trainer.optimizers[0], schedule_of(trainer), incidents, trainer, warned)

    def begin(self):
        importlib.import_module("gradsentinel.integrations.lightning")

    def saved(self, where):
        return torch.load(where, weights_only=False)["state_dict"]

    def parts(self, result):
        trainer = result.host
        loop = trainer.fit_loop
        loaders = loop._combined_loader.flattened
        return [
            trainer,
            trainer.strategy,
            trainer.precision_plugin,
            loop.epoch_loop,
            result.optimizer,
            *loaders,
        ]


def schedule_of(trainer):
    return trainer.lr_scheduler_configs[0].scheduler


def incidents_of(natives):
    """Of the run that is over."""
    told = [one.callback for one in natives if hasattr(one, "told")]
    return tuple(told[0].run.incidents) if told else ()


class PytorchLightning(Lightning):
    name = "pytorch_lightning"
    package = "pytorch_lightning"
    rivals = ("lightning.pytorch",)
    imported = "pytorch_lightning"


class Manual(Lightning):
    name = "lightning, manual optimization"
    manual = True


def fit(task, given, *, module=None, path=None, loader=None, **settings):
    """Train with Lightning however the Trainer is set."""
    pl, trainer = Lightning().trainer(task, given, **settings)
    module = module or lightning_module(pl, task, task.net(), manual=False)
    with quiet():
        trainer.fit(module, task.loader() if loader is None else loader, ckpt_path=path)
    return trainer


def native(folder, *given):
    return Lightning().settings(folder, given)


def state_of(trainer):
    return {
        "model": trainer.lightning_module.state_dict(),
        "optimizers": [one.state_dict() for one in trainer.optimizers],
        "schedulers": [one.scheduler.last_epoch for one in trainer.lr_scheduler_configs],
    }
