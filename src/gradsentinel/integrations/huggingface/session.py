"""One `train()` of a Hugging Face Trainer, watched."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from gradsentinel.again.recompute import RecomputeError
from gradsentinel.callbacks.tensorboard import TensorBoardCallback
from gradsentinel.decision import Action
from gradsentinel.integrations.accelerate.driver import AcceleratorDriver, check_accelerator
from gradsentinel.integrations.engine import Engine
from gradsentinel.integrations.host import FrameworkHost, raw
from gradsentinel.integrations.huggingface.running_loss import RunningLoss
from gradsentinel.integrations.loaders import draw_through
from gradsentinel.integrations.natives import Native
from gradsentinel.integrations.state_check import check_own, may_end_badly
from gradsentinel.integrations.wraps import Wraps, take_off
from gradsentinel.state.archive import ArchiveError, read_archive, write_archive
from gradsentinel.state.tree import UnsupportedStateError, map_tensors
from gradsentinel.store import unused

logger = logging.getLogger("gradsentinel")

_KIND = "huggingface-run"


class Session:
    """From `on_train_begin` to the end of training: one run of the watch, driven by the Trainer's methods."""

    def __init__(
        self,
        trainer: Any,
        natives: Sequence[Native],
        loader: Any,
        checkpoint: Any,
        earlier: Mapping[str, Any] | None,
    ) -> None:
        check_accelerator(trainer.accelerator)
        self.trainer = self._trainer = trainer
        take_off(trainer, "save_model")  # of a run that ended badly
        self.model = trainer.model
        """What is trained; another one is another run."""
        self._written: set[Path] = set()
        """The checkpoints that are of this run."""
        self._items: Any = None
        self._number = 0
        """So many batches this epoch has given."""
        self._left_out = 0
        """So many it had left out when the checkpoint was written that the run goes on from."""
        self._epoch = 0
        self._reported = 0
        self._step = trainer.training_step
        self._save_checkpoint = trainer._save_checkpoint
        self._saving = False
        """True while a checkpoint is written, for which the state was looked at."""
        self._driver = AcceleratorDriver(trainer.accelerator, [trainer.optimizer])
        scheduler = trainer.lr_scheduler
        host = FrameworkHost(
            trainer.model_wrapped,
            raw([trainer.optimizer]),
            scheduler=[] if scheduler is None else [getattr(scheduler, "scheduler", scheduler)],
            scaler=trainer.accelerator.scaler,
        )
        callbacks = [one.begin() for one in natives]
        _share_writer(trainer, callbacks)
        directory = Path(trainer.args.output_dir) / "gradsentinel"
        self.engine = Engine(
            host,
            callbacks,
            model=trainer.model_wrapped,
            forward=self._loss,
            directory=directory,
            earlier=self._from_checkpoint(checkpoint, host) or earlier,
            save=self._save,
        )
        self._driver.attach(self.engine)
        wraps = self._driver.wraps
        self._loss_sum = RunningLoss(trainer, wraps)
        self._sampler = draw_through(loader, wraps)
        wraps.wrap(trainer, "training_step", self._around_training_step)
        wraps.wrap(trainer, "_save_checkpoint", self._around_save)
        wraps.wrap(trainer, "save_model", self._around_save_model)
        wraps.wrap(trainer, "get_batch_samples", self._around_samples)
        # Whatever is raised in there ends the run.
        for owner, name in _around_everything(trainer, natives[0]):
            wraps.wrap(owner, name, self._around_part)
        if hasattr(trainer, "_run_epoch"):
            wraps.wrap(trainer, "_run_epoch", self._around_epoch)
        self._state: Mapping[str, Any] | None = None

    @property
    def over(self) -> bool:
        """True when the run has ended."""
        return self._state is not None

    # -- what the events call -------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Take note of the epoch, and tell its sampler of the run's list."""
        run = self.engine.run
        self._number = run.data["batch"] if run.data["epoch"] == epoch and self._number == 0 else 0
        self._epoch = run.data["epoch"] = epoch
        run.skipped.draw_through(self._sampler, run)

    def step_done(self) -> None:
        """End the step, now that the scheduler has moved, and log the true numbers if it was no ordinary one.

        The Trainer's own line says what the steps came to.
        """
        self._settle_loss()
        self.engine.finish()
        decision = self.engine.decision
        incidents = self.engine.run.incidents
        if decision is None or decision.action <= Action.WARN or len(incidents) == self._reported:
            return
        self._reported = len(incidents)
        logs: dict[str, Any] = {"gradsentinel_action": decision.action.label}
        if decision.incident is not None:
            logs["gradsentinel_incident"] = decision.incident.id
            loss, norm = decision.incident.loss, decision.incident.grad_norm
            logs.update(gradsentinel_loss=math.nan if loss is None else loss)
            logs.update(gradsentinel_grad_norm=math.nan if norm is None else norm)
        wanted = self._trainer.control.should_log
        self._trainer.log(logs)
        self._trainer.control.should_log = wanted  # logging has taken it back, and the Trainer has yet to log

    def _settle_loss(self) -> None:
        """Have the Trainer's sum say what the step came to; a second time changes nothing."""
        judged = self.engine.judged
        if judged is not None and not judged.decision.apply:
            self._loss_sum.dropped(judged.decision.loss)
        elif judged is not None and judged.decision.recomputed:
            self._loss_sum.healed(len(self.engine.run.scene.microbatches))

    def save_beside_checkpoint(self, step: int) -> None:
        """Write what the run has to remember into the Trainer's checkpoint; a failure is logged."""
        folder = Path(self._trainer.args.output_dir) / f"checkpoint-{step}"
        run = self.engine.run
        if not folder.is_dir():
            return
        path = folder / f"gradsentinel-rank{run.rank.rank}"
        if path.exists():
            path = unused(folder, path.name)
        try:
            left_out = max(0, run.data["batch"] - self._number)
            about = {"step": run.step, "left_out": left_out}
            write_archive(path, self.engine.state_dict(), about, kind=_KIND)
        except (OSError, UnsupportedStateError, TypeError, ValueError) as error:
            logger.error("what the callbacks remember is not in %s: %s", folder, error)  # noqa: TRY400

    def leave(self, error: BaseException | None) -> Mapping[str, Any]:
        """End the run once, take everything off again, and return what it has to remember.

        A bad model that an exception leaves behind is not saved by `save_model` afterwards either.
        """
        if self._state is None:
            self._driver.wraps.undo()
            self._state = self.engine.state_dict()
            if error is not None and may_end_badly(self.engine.run, error):
                Wraps().wrap(self._trainer, "save_model", self._around_late_save)
            self.engine.close(error)
        return self._state

    # -- around methods of this trainer ---------------------------------------------------------------

    def _around_training_step(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None, *rest: Any) -> Any:
            window = int(getattr(self._trainer, "current_gradient_accumulation_steps", 1))
            self._items = num_items_in_batch
            self._driver.weight = window
            number = self._number if self._sampler is None else self._sampler.number_of(self._number)
            self._number += 1
            self.engine.finish()
            if not self.engine.in_step:
                self._loss_sum.begin()
            # A copy of the containers: some models take their labels out.
            self.engine.take(
                map_tensors(lambda tensor: tensor, inputs), place=(self._epoch, number), expected=window
            )
            try:
                return plain(model, inputs, num_items_in_batch, *rest)
            except BaseException as error:
                self.leave(error)
                raise

        return training_step

    def _around_samples(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A last window that is not full, because some batches are left out, would never be stepped."""

        def get_batch_samples(iterator: Any, count: int, *rest: Any) -> Any:
            found = plain(iterator, count, *rest)
            short = self._sampler is not None and self._sampler.left_out > 0 and len(found[0]) < count
            return plain(iter(()), 0, *rest) if short else found

        return get_batch_samples

    def _around_epoch(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def _run_epoch(*args: Any, **kwargs: Any) -> Any:
            self._pass_over(kwargs)
            return plain(*args, **kwargs)

        return _run_epoch

    def _around_part(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def part(*args: Any, **kwargs: Any) -> Any:
            try:
                return plain(*args, **kwargs)
            except BaseException as error:
                self.leave(error)
                raise

        return part

    def _pass_over(self, told: Mapping[str, Any]) -> None:
        """Have an epoch go on where a checkpoint was written in its midst.

        The Trainer draws as many batches as the epoch had given by then and passes over them. One of them may
        be on the run's list by now; were it left out, the next good one would be passed over in its place.
        """
        given = told.get("steps_trained_in_current_epoch") or 0
        here = (
            told.get("epoch") == told.get("epochs_trained") and told.get("resume_from_checkpoint") is not None
        )
        if not given or not here or self._trainer.args.ignore_data_skip:
            return
        data = self.engine.run.data
        left_out = self._left_out if data["epoch"] == told["epoch"] else 0
        self._number = given
        if self._sampler is not None:
            self._sampler.start_at(given + left_out, given=given)

    def _around_save(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def _save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            self.engine.check_state()
            with self._known():
                written = plain(*args, **kwargs)
            self._written.add(self._folder().resolve())
            return written

        return _save_checkpoint

    def _around_save_model(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def save_model(*args: Any, **kwargs: Any) -> None:
            if not self._saving:
                self._settle_loss()  # before the look ends the step
            if self._saving or check_own(self.engine):
                plain(*args, **kwargs)

        return save_model

    def _around_late_save(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def save_model(*args: Any, **kwargs: Any) -> None:
            if self._trainer.model is not self.model or self.engine.may_save():
                plain(*args, **kwargs)

        return save_model

    @contextmanager
    def _known(self) -> Iterator[None]:
        """Have the Trainer write its model without a further look at the state."""
        before, self._saving = self._saving, True
        try:
            yield
        finally:
            self._saving = before

    # -- what the engine calls ------------------------------------------------------------------------

    def _loss(self, model: Any, batch: Any) -> Tensor:
        """Return what `training_step` gives to `accelerator.backward`, with nothing counted twice."""
        trainer = self._trainer
        kept = {name: copy.deepcopy(vars(trainer)[name]) for name in _COUNTED if name in vars(trainer)}
        try:
            with self._driver.capturing() as losses:
                returned = self._step(model, batch, self._items)
        finally:
            vars(trainer).update(kept)
        if len(losses) != 1:
            raise RecomputeError(f"training_step runs {len(losses)} backward passes where one is expected")
        if isinstance(returned, Tensor):
            self._loss_sum.recompute(self.engine.microbatch_of(batch), returned)
        return losses[0][0]

    def _save(self, directory: Path) -> str:
        """Write the Trainer's checkpoint of an aborted run, where `resume_from_checkpoint` finds it."""
        trainer, folder = self._trainer, self._folder()
        if folder.resolve() in self._written and folder.is_dir():
            return f"{folder} (written before)"
        if trainer.args.should_save and folder.is_dir():  # of an earlier run with the same output_dir
            aside = unused(folder.parent, f"earlier-{folder.name}")
            folder.rename(aside)
            logger.warning("%s is of an earlier run, and is now %s", folder, aside.name)
        self.engine.run.consensus.all_of(True)
        with self._known():
            self._save_checkpoint(trainer.model, trial=None)
        self.save_beside_checkpoint(trainer.state.global_step)
        return str(folder)

    def _folder(self) -> Path:
        """Return where the Trainer writes its checkpoint of this step."""
        trainer = self._trainer
        return Path(trainer._get_output_dir(trial=None)) / f"checkpoint-{trainer.state.global_step}"

    def _from_checkpoint(self, checkpoint: Any, host: FrameworkHost) -> Mapping[str, Any] | None:
        """Return what the checkpoint holds of the run; None, and logged, if it cannot be read."""
        if not isinstance(checkpoint, (str, Path)):
            return None
        self._written.add(Path(checkpoint).resolve())
        path = Path(checkpoint) / f"gradsentinel-rank{self._trainer.args.process_index}"
        if not path.exists():
            logger.warning(
                "%s was written without GradSentinel: its step counters, budgets and histories begin anew",
                checkpoint,
            )
            return None
        try:
            state, about = read_archive(path, kind=_KIND)
        except ArchiveError as error:
            logger.error("what the callbacks remembered is lost: %s", error)  # noqa: TRY400
            return None
        self._left_out = int(about.get("left_out", 0))
        return dict(state)


_COUNTED = ("_metrics", "_total_train_tokens")
"""What trl's trainers count in their loss."""


def _around_everything(trainer: Any, leader: Any) -> Iterator[tuple[Any, str]]:
    """Yield the methods in which the rest of a training happens, whose own method is running already."""
    for name in ("_run_epoch", "_evaluate"):
        if hasattr(trainer, name):
            yield trainer, name
    handler = trainer.callback_handler
    if hasattr(handler, "call_event"):
        yield handler, "call_event"
    for later in handler.callbacks[handler.callbacks.index(leader) + 1 :]:
        yield later, "on_train_begin"


def _share_writer(trainer: Any, callbacks: Sequence[Any]) -> None:
    """Let a TensorBoardCallback without a place of its own write into the files of the Trainer's own."""
    writers = [getattr(one, "tb_writer", None) for one in trainer.callback_handler.callbacks]
    writer = next((one for one in writers if one is not None), None)
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and not callback.writer and not callback.log_dir:
            callback.writer = writer
