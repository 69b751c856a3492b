"""A step of the watch, in pieces that a framework's hooks call in its own order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradsentinel.again.backward import BackwardPass
from gradsentinel.assembly import default_diagnosers, default_examiners, make_run, with_defaults
from gradsentinel.callback import Callback
from gradsentinel.data.records import fingerprint
from gradsentinel.decision import Action, Decision
from gradsentinel.errors import ConsensusError, TrainingAborted
from gradsentinel.gradients import GradientView
from gradsentinel.host import Forward
from gradsentinel.integrations.host import FrameworkHost
from gradsentinel.integrations.pace import HeldSchedulers
from gradsentinel.integrations.settings import RunSettings
from gradsentinel.integrations.state_check import StateCheck
from gradsentinel.run import Run
from gradsentinel.state.health import in_words
from gradsentinel.state.restart import claim_directory
from gradsentinel.state.restart import resume as resume_run
from gradsentinel.state.tree import tensors_in
from gradsentinel.watch import Watch

logger = logging.getLogger("gradsentinel")


@dataclass(slots=True)
class Judged:
    """A step that was judged and is not over yet."""

    optimizers: tuple[Optimizer, ...]
    """Those it is about."""
    decision: Decision
    view: GradientView
    """Its gradients, before clipping."""
    waiting: list[Optimizer]
    """Those that have not run yet."""
    clipped: bool = False


class Engine:
    """Drives a watch from a framework's hooks: `take`, `backward_done`, `judge`, `clip`, `stepped`.

    Called on: every rank, in the same order.

    Args:
        host: the framework's modules and optimizers.
        callbacks: ours; one `RunSettings` among them says where the run is written.
        model: what the framework calls; handed to `forward`.
        forward: `forward(model, batch) -> loss`, as the framework computes it; None if that cannot be done.
        directory: where the run is written if nothing else is said.
        earlier: the state of an earlier run that this one goes on from, as `state_dict` returned it.
        several: True if one micro-batch may have several optimizer steps, or comes without `take`.
        ends_late: True if somebody calls `finish` when the framework's schedulers and averages have moved;
            False ends a step as soon as its optimizers ran.
        by_steps: True if the loop can draw its data with `steps`, so that a rollback may go back in it.
        save: writes the framework's own checkpoint, and returns where; called when a run is aborted, in a
            state that is known to be good.
    """

    def __init__(
        self,
        host: FrameworkHost,
        callbacks: Sequence[Callback] | None,
        *,
        model: Any,
        forward: Forward | None,
        directory: Path | None = None,
        earlier: Mapping[str, Any] | None = None,
        several: bool = False,
        ends_late: bool = True,
        by_steps: bool = False,
        save: Callable[[Path], str] | None = None,
    ) -> None:
        given = None if callbacks is None else [one for one in callbacks if not isinstance(one, RunSettings)]
        settings = RunSettings.among(callbacks or ())
        self.host = host
        run = make_run(host, settings.run_dir or directory, mesh=settings.mesh, timeout=settings.timeout)
        run.model, run.forward, run.diagnosis_budget = model, forward, settings.diagnosis_budget
        run.course.by_steps = by_steps
        run.has_resume = False
        self.state_check = StateCheck()
        self.watch = Watch(
            run,
            [*with_defaults(given, host.device), self.state_check],
            examiners=default_examiners(),
            diagnosers=default_diagnosers(),
        )
        self.judged: Judged | None = None
        """The step that is being made."""
        self.decision: Decision | None = None
        """What became of the last one."""
        self.held = HeldSchedulers(host)
        self._several = several
        self._ends_late = ends_late
        self._save = save
        self._open = False
        self._closed = False
        try:
            claim_directory(run)
            resume_run(self.watch, None)
            if earlier:
                self.watch.load_state_dict(earlier)
            self.watch.start()
        except BaseException as error:
            self.close(error)
            raise
        self.watch.prepare()

    @property
    def run(self) -> Run:
        """The run that is watched."""
        return self.watch.run

    @property
    def latest(self) -> Decision | None:
        """What was decided about the step in flight, or about the last one if none is."""
        return self.decision if self.judged is None else self.judged.decision

    @property
    def in_step(self) -> bool:
        """True between the first micro-batch of a step and its end."""
        return self._open

    @property
    def applied(self) -> bool:
        """True if the last step changed the weights."""
        latest = self.latest
        return latest is not None and latest.apply and not latest.scaler_skips

    @property
    def dropped(self) -> bool:
        """True if the last step was dropped or undone by the sentinel, so that no scheduler may move."""
        return self.latest is not None and not self.latest.apply

    # -- the pieces of a step, in their order ---------------------------------------------------------

    def take(self, batch: Any, *, place: tuple[int, int] | None = None, expected: int | None = None) -> None:
        """Take note of a micro-batch that is about to enter the model.

        Args:
            batch: as the model gets it.
            place: epoch, and number of the micro-batch in it.
            expected: so many micro-batches the step will have.
        """
        self.finish()
        if not self._open:
            self.held.put_back()
            self.watch.prepare()
            self.watch.begin_step()
            self._open = True
        if expected is not None:
            self.watch.expected_microbatches = expected
        data = self.run.data
        if place is not None:
            data["epoch"], data["batch"] = place
        self.watch.batch(batch)
        if place is not None:
            data["batch"] += 1
            data["batches"] += 1

    def backward_done(
        self,
        loss: Tensor | None,
        *,
        shown: Tensor | None = None,
        divisor: int = 1,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Take note of a finished backward pass; never communicates.

        Args:
            loss: as `forward` returns it, before it is divided and scaled.
            shown: the loss to be judged and logged where that is another one.
            divisor: the framework has divided it by this.
            settings: arguments of `Tensor.backward`.
        """
        if self.judged is not None and not self.judged.waiting:
            self.finish()
        scene, reduction = self.run.scene, self.host.reduction.state()
        number = len(scene.microbatches) - 1
        kept = None if loss is None else loss.detach()
        self.watch.after_backward(
            kept if shown is None else shown,
            self.host.gradients,
            scaled=self.host.scaler is not None,
            reduced=all(reduction),
            microbatch=number if number >= 0 else None,
        )
        scene.passes.append(BackwardPass(max(0, number), kept, divisor, reduction, dict(settings or {})))

    def judge(
        self, optimizers: Sequence[Optimizer], *, norm_type: float = 2.0, clipped: bool = True
    ) -> Decision:
        """Look at the final gradients before they are clipped; a step that must not be made has none after.

        `clipped` is False where it is known that nobody clips them.

        Raises:
            TrainingAborted: when the run must not go on.
        """
        self.finish()
        if not self.run.scene.microbatches:
            self.run.course.refuse(None)
        self.held.begin(optimizers)
        host, watch = self.host, self.watch
        scale, overflow = host.unscale(optimizers)
        view = host.gradients(optimizers, norm_type=norm_type)
        view.final = not clipped
        try:
            decision = watch.before_clip(view, optimizers=optimizers, loss_scale=scale, overflow=overflow)
        except TrainingAborted as error:
            watch.forget_step()
            self._leave(error)
            raise
        if decision.apply:
            if decision.recomputed:
                view = host.gradients(optimizers, norm_type=norm_type)
                decision = watch.look_again(decision, view)
            if decision.scaler_skips:
                host.overflow_everywhere(optimizers)
        self.judged = Judged(tuple(optimizers), decision, view, list(optimizers))
        return decision

    def clip(self, max_norm: float) -> Tensor:
        """Clip what was judged, with the norms it was judged by; return the norm before, 0-dim."""
        judged = self.judged
        if judged is None:
            raise RuntimeError("there is no step to clip")
        decision = judged.decision
        if decision.apply:
            judged.view.clip_(max_norm, total_norm=decision.safe_norm, known_norm=decision.grad_norm)
        judged.clipped = True
        return judged.view.total_norm

    def concerns(self, optimizer: Optimizer) -> bool:
        """Return True if the step in flight is judged, and waits for this optimizer."""
        return self.judged is not None and any(optimizer is one for one in self.judged.waiting)

    def stepped(self, optimizer: Optimizer) -> None:
        """Hear that an optimizer ran, perhaps without gradients."""
        judged = self.judged
        if judged is None:
            return
        judged.waiting = [one for one in judged.waiting if one is not optimizer]
        if judged.waiting:
            return
        judged.view.retire()  # so that the gradients are gone when they are cleared
        if not judged.decision.apply:
            self.held.hold(judged.optimizers)
        if not self._ends_late:
            self.finish()

    def finish(self) -> None:
        """End a step that was judged, if there is one: count it, and settle what may not wait."""
        judged, self.judged = self.judged, None
        if judged is None:
            return
        self.held.put_back()
        judged.view.retire()
        decision = judged.decision
        try:
            late = self.watch.after_step(
                decision, learning_rates=self.host.learning_rates(), clipped=judged.clipped
            )
        except TrainingAborted as error:
            self._leave(error)
            raise
        if late > Action.WARN:  # the step was made, found bad, and undone
            decision = replace(decision, apply=False, action=late)
            if not self._ends_late:
                self.held.hold(judged.optimizers)
        self.decision = decision
        self._open = False
        if self._several:  # another step on the same batches, or one whose batches nobody shows
            self.watch.prepare(same_batches=bool(self.run.scene.microbatches))

    def start_over(self) -> None:
        """Forget micro-batches whose step never came: the framework begins another one."""
        self.finish()
        if self._open:
            self.watch.forget_step()
            self._open = False

    def end_unseen(self) -> None:
        """End a step whose batches nobody shows, so that there will be no `take` to do it."""
        if self.judged is not None and not self.judged.waiting and not self.run.scene.microbatches:
            self.finish()

    # -- between steps --------------------------------------------------------------------------------

    def check_state(self) -> None:
        """Look at the whole state before a checkpoint is written of it; called on every rank.

        A bad one is rolled back, so that what is written is good.

        Raises:
            TrainingAborted: if there is nothing to go back to.
        """
        if self.judged is None or not self.judged.waiting:  # else the optimizer has yet to run
            self.finish()
            self.held.put_back()
        finding = self.state_check.look(self.run)
        self.watch.file(self.watch.bus.file(self.state_check, finding, self.run.step))
        try:
            self.watch.settle_pending()
        except TrainingAborted as error:
            self._leave(error)
            raise

    def may_save(self) -> bool:
        """Say whether this rank's state may be written while an exception ends the run; logs why not.

        Other ranks are elsewhere by then, so nobody is asked and nothing is rolled back.
        """
        found = self.run.health.scan()
        if found:
            logger.error("no checkpoint is written of this state: non-finite values in %s", in_words(found))
        return not found

    def close(self, error: BaseException | None = None) -> None:
        """End the run; a second call does nothing. The framework's exception is never replaced by ours."""
        if self._closed:
            return
        self._closed = True
        late: BaseException | None = error
        try:
            if error is None:
                self.finish()
                self.held.put_back()
            self.watch.close(error)
        except BaseException as trouble:
            late = late or trouble
            if error is None:
                raise
            logger.exception("the sentinel could not end its run in order")
        finally:
            self.run.local.detach()
            self.run.close(late)
        if late is None:
            self.run.consensus.close()

    def state_dict(self) -> dict[str, Any]:
        """Return step counters and what the callbacks must remember over a restart."""
        return self.watch.state_dict()

    def state_of(self, callback: Callback) -> Mapping[str, Any]:
        """Return what one of the callbacks must remember; nothing of one that is none of the run's."""
        bus = self.watch.bus
        if all(callback is not one for one in bus.callbacks):
            return {}
        return bus.ask(callback, callback.state_dict, self.run.step, "state_dict") or {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.watch.load_state_dict(state)

    def microbatch_of(self, batch: Any) -> int:
        """Return which micro-batch of the step a batch is that `forward` was given, perhaps as a copy."""
        known = self.run.scene.microbatches
        if len(known) > 1:
            mine = [id(tensor) for _, tensor in tensors_in(batch)]
            for number, one in enumerate(known):
                if mine and mine == [id(tensor) for _, tensor in tensors_in(one.batch)]:
                    return number
            content = fingerprint(batch)
            for number, one in enumerate(known):
                if fingerprint(one.batch) == content:
                    return number
        return 0

    def _leave(self, error: TrainingAborted) -> None:
        """Write the framework's own checkpoint of a good state, and say where, before the run is left."""
        if self._save is None or isinstance(error, ConsensusError):
            return
        run = self.run
        try:
            good = run.known_good is not None
            if not run.consensus.all_of(good or not run.health.scan()):
                return
            if run.known_good is not None:
                run.restore(run.known_good)
            self.held.forget()
            where = self._save(run.directory.path)
        except Exception:  # the framework's own code: the run ends by its reason to stop, not by this one
            logger.exception("no checkpoint of the framework could be written for the aborted run")
            return
        error.args = (f"{error}. The framework's own checkpoint of a good state is {where}", *error.args[1:])
