"""One fit of a Lightning Trainer, watched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsentinel.callbacks.recomputing import Recomputing
from gradsentinel.callbacks.tensorboard import TensorBoardCallback
from gradsentinel.data.sampler import SkipBatches
from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations.engine import Engine
from gradsentinel.integrations.host import FrameworkHost, raw
from gradsentinel.integrations.lightning.again import TrainingStep
from gradsentinel.integrations.lightning.logged import Logged
from gradsentinel.integrations.loaders import draw_through
from gradsentinel.integrations.natives import Native
from gradsentinel.integrations.state_check import may_end_badly
from gradsentinel.integrations.wraps import Wraps

logger = logging.getLogger("gradsentinel")

_OWN_STEPS = ("DeepSpeed", "XLA", "HPU", "Colossal")
"""Strategies that clip, scale or step where no hook sees it."""


class Session:
    """Between `on_train_start` and the end of training: one run of the watch, driven by Lightning's hooks.

    Args:
        trainer: that is about to train.
        module: what it trains.
        natives: its callbacks of ours.
        earlier: what a run of before has to remember.
        wraps: those of `begin_early`; the session's own are added.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        natives: Sequence[Native],
        earlier: Mapping[str, Any] | None,
        wraps: Wraps,
    ) -> None:
        _check_strategy(trainer.strategy)
        self.trainer = self._trainer = trainer
        self._module = module
        self._automatic = bool(module.automatic_optimization)
        self._loss: Tensor | None = None
        self._shown: Tensor | None = None
        """The same memory as the loss that was given to the last backward pass."""
        self._sampler: SkipBatches | None = None
        self._given = 0
        """Number of batches that this epoch has given so far."""
        strategy, precision = trainer.strategy, trainer.precision_plugin
        host = FrameworkHost(
            strategy.model,
            raw(trainer.optimizers),
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            scaler=getattr(precision, "scaler", None),
            extra={f"average.{index}": average for index, (_, average) in enumerate(_averages(trainer))},
        )
        callbacks = [one.begin() for one in natives]
        _share_writer(trainer, callbacks)
        self._step = TrainingStep(trainer, module)
        reason = self._step.reason_against()
        if reason and trainer.is_global_zero and any(isinstance(one, Recomputing) for one in callbacks):
            logger.warning("no step can be computed again: %s", reason)
        self.engine = Engine(
            host,
            callbacks,
            model=strategy.model,
            forward=self._step.forward(),
            directory=_directory(trainer),
            earlier=earlier,
            several=not self._automatic,
            ends_late=len(trainer.optimizers) == 1,
            save=self._save,
        )
        self._step.engine = self.engine
        self.engine.held.wanted = not self._automatic
        self._wraps = wraps
        self._wraps.wrap(strategy, "optimizer_step", self._around_optimizer_step)
        self._wraps.wrap(precision, "clip_grad_by_norm", self._around_clip_norm)
        self._wraps.wrap(precision, "clip_grad_by_value", self._around_clip_value)
        self._wraps.wrap(trainer.fit_loop.epoch_loop, "update_lr_schedulers", self._around_schedulers)
        self._wraps.wrap(trainer.fit_loop.epoch_loop, "advance", self._around_advance)
        self._wraps.wrap(trainer, "save_checkpoint", self._around_save)
        self._logged = self._step.logged = Logged(trainer, module, self._wraps)
        averaging = [callback for callback, _ in _averages(trainer)]
        for callback in averaging:
            if hasattr(callback, "should_update"):
                self._wraps.wrap(callback, "should_update", self._around_average)
        leader = trainer.callbacks.index(natives[0])
        later = [one for one in averaging if trainer.callbacks.index(one) > leader]
        self._late_average = later[-1] if later else None
        if self._late_average is not None:
            self._wraps.wrap(self._late_average, "on_train_batch_end", self._around_batch_end)
        self.begin_epoch()  # one that goes on in its middle is not announced

    # -- what the hooks call --------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Draw the epoch through a sampler that leaves out what is on the run's list, where that can be."""
        trainer, run = self._trainer, self.engine.run
        if self._automatic:
            self.engine.start_over()
        self._given = 0
        self._logged.begin_epoch()
        run.data["epoch"] = trainer.current_epoch
        combined = trainer.fit_loop._combined_loader
        loaders = [] if combined is None else combined.flattened
        self._sampler = draw_through(loaders[0], self._wraps) if len(loaders) == 1 else None
        run.skipped.draw_through(self._sampler, run)

    def take(self, batch: Any, number: int) -> None:
        """Take note of a micro-batch."""
        self._logged.begin_batch()
        self.engine.finish()
        if not self.engine.in_step:
            self._logged.begin()
        if self._step.takes_iterator:
            return
        trainer = self._trainer
        self._step.remember(number)
        drawn = number if self._sampler is None else self._sampler.number_of(self._given)
        self._given += 1
        expected = None
        if self._automatic:
            window = trainer.accumulate_grad_batches
            left = trainer.num_training_batches - (number - number % window)
            expected = int(min(window, left))
        self.engine.take(batch, place=(trainer.current_epoch, drawn), expected=expected)

    def see_loss(self, loss: Tensor) -> None:
        """Keep the loss of the backward pass that comes now."""
        self._loss = self._shown = loss.detach()

    def backward_done(self) -> None:
        """Take note of the gradients, with the loss as the module returned it."""
        loss, self._loss = self._loss, None
        divisor = self._trainer.accumulate_grad_batches if self._automatic else 1
        scaler = self.engine.host.scaler
        if loss is not None and scaler is not None:
            loss = loss / scaler._scale  # a power of two
        if loss is not None and divisor > 1:
            loss = loss * divisor
        self.engine.backward_done(loss, divisor=divisor)

    def judge(self, optimizer: Any) -> None:
        """Judge the step of an optimizer, unless that was done when the module clipped by itself."""
        (inner,) = raw([optimizer])
        if not self.engine.concerns(inner):
            self._judge(inner)

    def _judge(self, inner: Optimizer) -> None:
        """Judge a step, and have the log hear of it."""
        decision = self.engine.judge([inner])
        if decision.apply and not decision.recomputed:
            self._logged.judged(dropped=False, recomputed=False, batches=())
            return
        batches = [one.batch for one in self.engine.run.scene.microbatches]
        self._logged.judged(dropped=not decision.apply, recomputed=decision.recomputed, batches=batches)
        if not self._automatic:
            self._logged.heal(self._shown)

    def batch_done(self, *, last: bool = False) -> None:
        """End the step: schedulers have moved, and averages of the weights, unless those come later."""
        if self._late_average is None or last:
            self.engine.finish()
            self.engine.held.put_back()
            self.engine.held.forget()  # an epoch's end may move them

    def at_last(self, after: Callable[[], None]) -> None:
        """Have something done when everybody was told of the end; the ranks are still together then."""

        def around(plain: Callable[..., Any]) -> Callable[..., Any]:
            def on_train_end() -> None:
                plain()
                after()

            return on_train_end

        self._wraps.wrap(self._trainer.strategy, "on_train_end", around)

    def end(self, error: BaseException | None) -> Mapping[str, Any]:
        """End the run, take everything off again, and return what it has to remember.

        Other callbacks may yet write a checkpoint because of an exception; the Trainer takes its strategy
        down when all have heard of it, and with that the last wrap is gone, unless what is left is bad.
        """
        self._wraps.undo()
        if error is not None:
            gate, last = Wraps(), Wraps()
            gate.wrap(self._trainer, "save_checkpoint", self._around_last_save)
            ends = [last.undo] if may_end_badly(self.engine.run, error) else [last.undo, gate.undo]
            last.wrap(self._trainer.strategy, "teardown", partial(_then, ends))
        state = self.engine.state_dict()
        self.engine.close(error)
        return state

    # -- around methods of this trainer ---------------------------------------------------------------

    def _around_optimizer_step(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def optimizer_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._step.running:
                return None
            output = plain(optimizer, *args, **kwargs)
            self.engine.stepped(*raw([optimizer]))
            if self._automatic and args:  # what on_train_batch_end is given as the module's output
                result = getattr(args[0], "_result", None)
                self._logged.heal(getattr(result, "loss", None), self._trainer.accumulate_grad_batches)
            return output

        return optimizer_step

    def _judge_own_clip(self, optimizer: Any) -> Optimizer:
        """Judge a module that clips by itself before it does; with a GradScaler it clips what is scaled."""
        (inner,) = raw([optimizer])
        if not self.engine.concerns(inner) and not self._automatic and self.engine.host.scaler is None:
            self._judge(inner)
        return inner

    def _around_clip_norm(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Clip with the norms that are known already."""

        def clip_grad_by_norm(optimizer: Any, clip_val: Any) -> None:
            if self.engine.concerns(self._judge_own_clip(optimizer)):
                self.engine.clip(float(clip_val))
            else:
                plain(optimizer, clip_val)

        return clip_grad_by_norm

    def _around_clip_value(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Clip what is there: torch cannot clip nothing by value, which is what a dropped step leaves."""

        def clip_grad_by_value(optimizer: Any, clip_val: Any) -> None:
            if not (self.engine.concerns(self._judge_own_clip(optimizer)) and self.engine.dropped):
                plain(optimizer, clip_val)

        return clip_grad_by_value

    def _around_schedulers(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:  # noqa: FBT001 - as theirs
            if interval == "step" and not update_plateau_schedulers:  # the first thing after a micro-batch
                self._logged.settle()
            if interval != "step" or not self.engine.dropped:
                plain(interval, update_plateau_schedulers=update_plateau_schedulers)

        return update_lr_schedulers

    def _around_advance(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """An epoch that is shorter than announced ends like any other: with validation and schedulers."""

        def advance(fetcher: Any) -> None:
            try:
                plain(fetcher)
            except StopIteration:
                loop, sampler = self._trainer.fit_loop.epoch_loop, self._sampler
                missing = self._trainer.num_training_batches - loop.batch_progress.current.ready
                if sampler is None or not 0 < missing <= sampler.left_out:
                    raise
                loop.batch_progress.increment_by(missing, is_last_batch=True)
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
                loop._batches_that_stepped -= 1  # what ends the epoch counts one that was not made

        return advance

    def _around_average(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def should_update(step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            if step_idx is not None and self.engine.dropped:
                return False
            return bool(plain(step_idx=step_idx, epoch_idx=epoch_idx))

        return should_update

    def _around_batch_end(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def on_train_batch_end(*args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            self.batch_done(last=True)

        return on_train_batch_end

    def _around_save(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            if self._trainer.interrupted:
                last_save(*args, **kwargs)
                return
            self.engine.check_state()
            plain(*args, **kwargs)

        last_save = self._around_last_save(plain)

        plain_save = plain

        def save(path: Path) -> str:
            plain_save(path)
            return str(path)

        self._plain_save = save
        return save_checkpoint

    def _around_last_save(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            if self._trainer.lightning_module is not self._module or self.engine.may_save():
                plain(*args, **kwargs)

        return save_checkpoint

    def _save(self, directory: Path) -> str:
        """Write Lightning's checkpoint of an aborted run."""
        return self._plain_save(directory / "aborted.ckpt")


def begin_early(trainer: Any) -> Wraps:
    """Have each training loader drawn through a sampler of ours, there before its iterator is made."""
    wraps = Wraps()

    def around(plain: Callable[..., Any]) -> Callable[..., Any]:
        def process_dataloader(loader: Any) -> Any:
            made = plain(loader)
            if trainer.training:
                draw_through(made, wraps)
            return made

        return process_dataloader

    wraps.wrap(trainer.strategy, "process_dataloader", around)
    return wraps


def _then(after: Sequence[Callable[[], None]], plain: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        finally:
            for each in after:
                each()

    return method


def _check_strategy(strategy: Any) -> None:
    name = type(strategy).__name__
    if any(name.startswith(known) for known in _OWN_STEPS) or strategy.handles_gradient_accumulation:
        raise ConfigurationError(
            f"{name} clips and steps by itself, where no hook sees the gradients; supported are the "
            "strategies of one device, DDP, and FSDP2 through ModelParallelStrategy"
        )


def _averages(trainer: Any) -> list[tuple[Any, nn.Module]]:
    """Return the callbacks that keep an average of the weights, with the average."""
    found = ((one, getattr(one, "_average_model", None)) for one in trainer.callbacks)
    return [(one, average) for one, average in found if isinstance(average, nn.Module)]


def _directory(trainer: Any) -> Path | None:
    """Return a directory beside the logger's files; called on every rank."""
    place = trainer.log_dir if trainer.loggers else None
    return None if place is None else Path(place) / "gradsentinel"


def _share_writer(trainer: Any, callbacks: Sequence[Any]) -> None:
    """Let a TensorBoardCallback without a place of its own write into the files of Lightning's logger."""
    for callback in callbacks:
        if not isinstance(callback, TensorBoardCallback) or callback.writer or callback.log_dir:
            continue
        for logger_ in trainer.loggers:
            writer = getattr(logger_, "experiment", None)
            if trainer.is_global_zero and all(
                callable(getattr(writer, name, None))
                for name in ("add_scalar", "add_text", "add_custom_scalars")
            ):
                callback.writer = writer
                break
