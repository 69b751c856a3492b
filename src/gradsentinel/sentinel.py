"""The facade that a plain training loop holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsentinel.again.backward import BackwardPass, check_loss, run_backward
from gradsentinel.assembly import default_diagnosers, default_examiners, make_guard, make_run, with_defaults
from gradsentinel.attach import Attachment
from gradsentinel.bus import Handle
from gradsentinel.callback import Callback
from gradsentinel.decision import Action, Decision
from gradsentinel.errors import ConfigurationError
from gradsentinel.events import Event, IncidentEvent
from gradsentinel.guard import chosen
from gradsentinel.hints import BLIND, LEFT_OVER, NEVER_STEPPED, Hints, holds_gradients
from gradsentinel.host import Forward, TorchHost
from gradsentinel.incident import Incident
from gradsentinel.state.buffers import version_of, versions_of
from gradsentinel.state.restart import claim_directory, recall
from gradsentinel.state.restart import resume as resume_run
from gradsentinel.watch import Watch

if TYPE_CHECKING:
    from typing_extensions import Self

B = TypeVar("B")
E = TypeVar("E", bound=Event)

_ALWAYS_SINGLE = 3
"""After so many batches with one step each, no further step on the same batch is expected."""


class Sentinel:
    """Watches a plain PyTorch loop: no bad update reaches the weights, and the run goes on.

    Make it when the model is on its device and its checkpoint is loaded; it reads the initial state.

    Args:
        model: the module, several, or a mapping from name to module. torch.compile and DDP wrappers
            are looked through for names.
        optimizer: one optimizer or several; none that needs a closure.
        callbacks: what to watch for and what to do, in any order; None is `[NanCallback()]`. Without a
            `Skip` one with default budgets is added, without an `EventLog` likewise.
        run_dir: where events and incidents are written. None: `gradsentinel-runs/<time>`, made only
            when there is an incident to keep.
        scheduler: LR scheduler(s), stepped after each step that is not dropped.
        scaler: a torch.amp.GradScaler; `backward` scales, `step` unscales and updates it.
        forward: `forward(model, batch) -> loss`, with which a step can be computed again.
        ema: an average of the weights (AveragedModel, or an object with update(model) or update());
            updated after each applied step, and part of snapshots if it has a state_dict.
        extra: further objects with state_dict and load_state_dict that belong to the training state.
        mesh: the job's DeviceMesh, whose dimensions become a rank's coordinates; None asks
            GRADSENTINEL_TOPOLOGY, Megatron-Core's groups, and the mesh of the parameters, in this order.
        timeout: seconds that a rank may keep the others waiting before they stop, naming it.
        diagnosis_budget: seconds that finding out about one incident may take.
        guard: "host" reads the decision before each step, one wait for the device a step, exact for every
            optimizer. "device" never waits: a fused optimizer drops a bad step by itself, and the incident
            is handled two steps later (see docs/performance.md).
        lag: with guard="device", handle it so many steps later: what is kept of steps until then is bounded.
        resume: "auto" goes on from the newest known-good state in the run directory that every rank has, or
            starts afresh if there is none; a path takes that one. `steps` then goes on where the data was,
            and `data_position` says where that is (see docs/recovery.md).

    Raises:
        ConfigurationError: for anything that cannot work, at construction; for a run directory in use.
        TrainingAborted: if a detector finds the initial state unusable.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        callbacks: Sequence[Callback] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        forward: Forward | None = None,
        ema: Any = None,
        extra: Mapping[str, Any] | None = None,
        mesh: Any = None,
        timeout: float = 600.0,
        diagnosis_budget: float = 30.0,
        guard: str = "host",
        lag: int = 2,
        resume: str | os.PathLike[str] | None = None,
    ) -> None:
        state = dict(extra or {})
        if ema is not None and hasattr(ema, "state_dict"):
            state["ema"] = ema
        self.host = TorchHost(model, optimizer, scheduler=scheduler, scaler=scaler, extra=state)
        self.model = model
        self.forward = forward
        run = make_run(self.host, run_dir, mesh=mesh, timeout=timeout, diagnosis_budget=diagnosis_budget)
        run.model, run.forward = model, forward
        run.course.by_steps = True
        self._watch = Watch(
            run,
            with_defaults(callbacks, self.host.device),
            examiners=default_examiners(),
            diagnosers=default_diagnosers(),
        )
        self._guard = make_guard(guard, self.host, self._watch, ema, model, lag)
        self._window, self._in_window = 1, 0
        self._stepped = False
        self._made = 0  # steps on the batches in flight
        self._single = 0  # for so many batches in a row it was one
        self._last_of_loader = False
        self._asked: Callable[[], Any] | None = None  # the step, in the middle of a window
        self._in_steps = self._saw_backward = self._closed = False
        self._hints = Hints()
        self._left_over: tuple[Optimizer, ...] = ()
        self._decision: Decision | None = None
        self._untouched: list[tuple[Tensor, int]] | None = versions_of(self.host.named_parameters())
        try:
            claim_directory(run)
            resume_run(self._watch, resume)
            self._watch.start()
        except BaseException as error:
            self._end(error)  # the event log ends with the reason
            raise
        self._watch.prepare()

    # -- the loop ------------------------------------------------------------------------------------

    def steps(self, loader: Iterable[B], *, accumulate: int = 1) -> Iterator[B]:
        """Yield the loader's batches, remembering each until its step is done.

        With `accumulate=k` each batch is one of k micro-batches of a step: `backward` divides the
        loss by k, and `step` does its work on every k-th batch and on the last one of a loader whose
        length is known; on the others it returns None. If what comes behind that one is left out, the
        step is made at the loop's end. An unfinished window of a loader of unknown length is carried over.
        """
        if accumulate < 1:
            raise ConfigurationError(f"accumulate={accumulate} must be at least 1")
        if not isinstance(loader, Iterable):
            raise ConfigurationError(f"{type(loader).__name__} cannot be iterated over")
        self._watch.run.course.refuse(loader)
        return self._steps(loader, accumulate)

    def _steps(self, loader: Iterable[B], accumulate: int) -> Iterator[B]:
        run = self._watch.run
        if self._in_steps:
            raise ConfigurationError("steps() inside steps(): draw validation data without the sentinel")
        self._window = accumulate
        self._in_steps = True
        try:
            for index, batch, total in run.course.batches(run, loader, self._close_window):
                if self._stepped:
                    self._in_window, self._stepped = 0, False
                    self._single = self._single + 1 if self._made == 1 else 0
                    self._made = 0
                if self._in_window == 0:
                    self._watch.prepare(rng=False)
                    self._watch.begin_step()
                    self._watch.expected_microbatches = (
                        accumulate if total is None else min(accumulate, max(1, total - index))
                    )
                self._watch.batch(batch)
                self._in_window, self._asked = self._in_window + 1, None
                self._last_of_loader = total is not None and index + 1 >= total
                run.data["batch"] = index + 1
                run.data["batches"] += 1
                yield batch
        finally:
            self._in_steps = self._last_of_loader = False
            run.scene.passed(over=True)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run `loss.backward()`, scaled for accumulation and by the GradScaler, and look at the loss.

        Args:
            loss: 0-dim or one element, as computed: neither divided nor scaled.
            kwargs: passed to `Tensor.backward` (retain_graph and the like).
        """
        check_loss(loss)
        if self._untouched is not None:
            self._freshen()
        if self._left_over and holds_gradients(self._left_over):
            self._hints.tell(LEFT_OVER)
        self._left_over = ()
        if (scene := self._watch.run.scene).calls is not None:
            scene.passed()
        divisor, number = self._window if self._in_steps else 1, self._in_window - 1 if self._in_window else 0
        run_backward(self.host, loss, divisor=divisor, settings=kwargs)
        self._saw_backward = True
        reduction: tuple[bool, ...] = self.host.reduction.state() if self.host.reduction.switches else ()
        plain = loss.detach()
        self._watch.after_backward(
            plain,
            self.host.gradients,
            scaled=self.host.scaler is not None,
            reduced=all(reduction),
            microbatch=self._in_window - 1 if self._in_steps else None,
        )
        scene.passes.append(BackwardPass(number, plain, divisor, reduction, kwargs))
        scene.root = number, loss, loss._version

    def step(
        self,
        max_norm: float | None = None,
        *,
        norm_type: float = 2.0,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ) -> Tensor | None:
        """Check, agree, clip, step the optimizer and scheduler, clear the gradients; recover if need be.

        Args:
            max_norm: clip the global gradient norm to this; None does not clip.
            norm_type: order of the norm that is clipped.
            optimizer: step only these (of several), as a GAN does; None steps all.

        Returns:
            The gradient norm before clipping, 0-dim: what `clip_grad_norm_` returns. None in the
            middle of an accumulation window.

        Raises:
            TrainingAborted: when the run must not go on.
        """
        if self._closed:
            raise RuntimeError("this Sentinel is closed")
        if self._in_steps and self._in_window < self._window and not self._last_of_loader:
            self._asked = partial(self.step, max_norm, norm_type=norm_type, optimizer=optimizer)
            return None
        self._asked = None
        if self._untouched is not None:
            self._freshen()
        if not self._saw_backward:
            self._hints.tell(BLIND)
        known = self.host.optimizers
        optimizers = known if optimizer is None else chosen(optimizer, known)
        norm, self._decision = self._guard.step(optimizers, max_norm=max_norm, norm_type=norm_type)
        self._stepped, self._saw_backward = True, False
        if optimizers is known:
            self._left_over = ()
        else:
            self._left_over = tuple(one for one in known if all(one is not mine for mine in optimizers))
        # Another step may follow on the same batches: a GAN's other player, a second epoch of PPO.
        self._made += 1
        further = not self._in_steps or self._made > 1 or self._single < _ALWAYS_SINGLE
        self._watch.prepare(same_batches=self._in_steps, rng=further)
        return norm

    def attached(self) -> Attachment:
        """Watch a loop that cannot be edited, through the optimizers' official hooks: a context manager.

        Says at attach what cannot be seen from there: the loss, micro-batches and the LR scheduler.
        """
        if not self._guard.knows:
            raise ConfigurationError("attached() decides before each step: it needs guard='host'")
        self._watch.run.course.refuse(None)
        return Attachment(self.host, self._watch)

    # -- callbacks and results -----------------------------------------------------------------------

    def on(
        self, event: type[E], function: Callable[[E], Any], *, every: int = 1, once: bool = False
    ) -> Handle:
        """Call a plain function for an event; the handle's `remove()` takes it off again.

        Args:
            event: an event class, such as `BeforeClip`.
            function: takes the event; may return findings, like a detector.
            every: only on steps divisible by this.
            once: only the first time.
        """
        if event is IncidentEvent:  # which shows the scene
            self._watch.run.scene.notes_random_states = True
        return self._watch.bus.on(event, function, every=every, once=once)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """The incidents of this run so far, oldest first."""
        return tuple(self._watch.run.incidents)

    @property
    def applied(self) -> bool:
        """True if the last `step` changed the weights; guard your own per-step work (an EMA) with it.

        Raises RuntimeError where only the device knows yet.
        """
        if self._decision is None and self._watch.run.iteration and not self._guard.knows:
            raise RuntimeError("with guard='device' nobody knows yet whether the step was made")
        return self._decision is not None and self._decision.apply and not self._decision.scaler_skips

    @property
    def last_action(self) -> Action:
        """What was done about the last step."""
        return Action.CONTINUE if self._decision is None else self._decision.action

    @property
    def step_count(self) -> int:
        """Number of the step in flight, from 0; goes back on a rollback."""
        return self._watch.run.step

    @property
    def applied_steps(self) -> int:
        """How many steps changed the weights since this Sentinel was made."""
        return self._watch.run.applied

    def state_dict(self) -> dict[str, Any]:
        """Return step counters and what the callbacks must remember, for the loop's own checkpoint."""
        return self._watch.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned; callbacks that are not there any more are left out."""
        self._watch.load_state_dict(state)

    def restore(self, path: str | os.PathLike[str] | None = None, *, missing_ok: bool = False) -> int:
        """Put the training state back to one that an earlier run left on disk, and return its step.

        Called on: every rank.

        Args:
            path: the snapshot's directory; None takes the newest of this run directory that every
                rank has.
            missing_ok: return 0 and change nothing if there is none.

        Raises:
            ArchiveError: if there is none, or it is damaged.
            SnapshotMismatch: if it does not fit the model or optimizer; nothing was changed then.
        """
        self._guard.drain()
        run = self._watch.run
        if path is None and missing_ok and run.states.newest() is None:
            return 0
        recall(self._watch, run.resume(path).callbacks)
        self._watch.prepare()
        # These writes are no checkpoint loaded behind our back.
        self._untouched = versions_of(self.host.named_parameters())
        return run.step

    @property
    def data_position(self) -> Mapping[str, int]:
        """Where `steps` is in the data: epoch, batches drawn in it, batches drawn over all epochs."""
        return dict(self._watch.run.data)

    @property
    def run_dir(self) -> Path:
        """Where events and incidents are written."""
        return self._watch.run.directory.path

    def close(self) -> None:
        """End the run: settle what is left, emit the last event; a second call does nothing."""
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if error is None and not self._closed and self._saw_backward and not self._watch.run.iteration:
            self._hints.tell(NEVER_STEPPED)
        self._closed = True
        try:
            (self._guard.drain if error is None else self._guard.give_up)()
            self._watch.close(error)
        except BaseException as late:
            error = error or late
            raise
        finally:
            self._watch.run.local.detach()
            self._watch.run.close(error)
        if error is None:
            self._watch.run.consensus.close()

    def _close_window(self) -> None:
        """Make the step that the loop asked for at the last batch before those that are left out at the end.

        Gradients that the ranks have not added up wait for the pass that does it, in the next epoch.
        """
        if self._asked is None:
            return
        run = self._watch.run
        switches = run.scene.passes[-1].reduction if run.scene.passes else ()
        if run.consensus.world_size == 1 or (switches and all(switches)):
            self._last_of_loader = True
            self._asked()
        self._stepped = True  # the loop counts anew, so that pass is not where this window would be full

    def _freshen(self) -> None:
        """Take the initial state again if a checkpoint was loaded between construction and first use."""
        if not self._in_steps:
            self._watch.run.course.refuse(None)
            if any(version_of(one) != version for one, version in self._untouched or ()):
                self._watch.prepare()
        self._untouched = None
