"""Computes the step in flight again, for real: through the loop's own model, on all ranks, with gradients."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradsentinel.again.backward import BackwardPass, Reduction, run_backward
from gradsentinel.again.generators import own_generators
from gradsentinel.devices import device_of
from gradsentinel.gradients import GradientView
from gradsentinel.measures.inspection import nonfinite_in
from gradsentinel.run import Run
from gradsentinel.state.rng import RngState
from gradsentinel.state.tree import map_tensors
from gradsentinel.testing import record_swallowed

logger = logging.getLogger("gradsentinel")

_SAME = 1e-3
"""Two computations of the same step differ by less than this, relatively, where a device is not exact."""
_NO_FORWARD = "there is no forward= to run: pass forward=lambda model, batch: loss to the Sentinel"


Mark = tuple[float, float]
"""2-norm and largest magnitude of one gradient."""


class Recomputes(Protocol):
    """What a host must have, beyond `Host`, for its steps to be computed again."""

    reduction: Reduction
    scaler: Any

    def unscale(self, optimizers: Sequence[Optimizer]) -> tuple[Tensor | None, Tensor | None]:
        """Unscale the gradients; return the loss scale and the overflow flag, or None without a scaler."""

    def gradients(self, optimizers: Sequence[Optimizer] | None = None) -> GradientView:
        """Return the view of the present gradients."""


class OwnRecompute(Protocol):
    """What a host has instead of that if it runs the step again by itself, as through a pipeline schedule."""

    def why_no_recompute(self, run: Run) -> str | None:
        """Return why this rank cannot compute the step in flight again, or None if it can."""

    def compute_again(
        self, run: Run, around: Callable[[], AbstractContextManager[Any]] | None
    ) -> Sequence[Tensor]:
        """Run all micro-batches again, from their random states, and return this rank's losses.

        Called on: every rank, with gradients enabled and the old ones gone. `around` is a context for each
        forward pass; raises RecomputeError if there cannot be one.
        """


class RecomputeError(RuntimeError):
    """The user's forward did not give what a step needs; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What the step came to; the same on every rank, but for the losses."""

    failure: str = ""
    """Why it could not be computed again, on this or another rank; the rest means nothing then."""
    losses: tuple[Tensor, ...] = ()
    """One per backward pass, on the device, as `forward=` returned them."""
    finite_forward: bool = False
    """True if the losses are finite, and what the forward pass has written to buffers."""
    finite_gradients: bool = False
    overflow: bool = False
    """True if only the gradients are not finite, and there is a GradScaler whose business that may be."""
    draws_alike: bool = True
    """True if it left the random generators of this rank where the loop's own step had."""
    node: Any = None
    """The autograd node behind the loss of the micro-batch that `Scene.graph` is about, where it is known."""
    own_draws: bool = False
    """True if `forward=` drew, on this rank, from a generator that the program made itself."""
    grad_norm: float = 0.0
    marks: Mapping[str, Mark] = field(default_factory=dict)
    """Of this rank's gradients, also of those that are not finite and are gone."""

    @property
    def finite(self) -> bool:
        """True if the gradients can be used."""
        return not self.failure and self.finite_forward and self.finite_gradients

    @property
    def loss(self) -> float | None:
        """Mean loss of this rank's micro-batches; waits for the device."""
        seen = [float(loss) for loss in self.losses]
        return sum(seen) / len(seen) if seen else None


def knows_how(run: Run) -> bool:
    """Return True if it was said how a step is computed: by `forward=`, or by the host itself."""
    return run.forward is not None or hasattr(run.host, "compute_again")


def reason_against(run: Run) -> str | None:  # noqa: PLR0911 - one line per reason is what it is
    """Return why this rank cannot compute the step in flight again, or None if it can."""
    scene = run.scene
    if hasattr(run.host, "compute_again"):
        host: OwnRecompute = run.host  # type: ignore[assignment] # it has that one, so it has both
        return host.why_no_recompute(run)
    if run.forward is None:
        return _NO_FORWARD
    reason: str | None = getattr(run.forward, "why_not", lambda _: None)(run)
    if reason is not None:  # an adapter's own
        return reason
    if run.late_step is not None:
        return "the step is over: the device has dropped it"
    if not scene.microbatches:
        return "no micro-batch of the step was seen: iterate over sentinel.steps(loader)"
    if not all(hasattr(run.host, name) for name in ("reduction", "scaler", "unscale", "gradients")):
        return f"{type(run.host).__name__} does not say how its backward pass is run"
    if any(is_lazy(p) for _, p in run.host.named_parameters()) or not scene.buffers.complete:
        return "the model was initialised in this very step"
    if len(run.optimizers) < len(run.host.optimizers):
        return "only some of the optimizers step, and forward= gives the loss of all"
    if any(microbatch.written for microbatch in scene.microbatches):
        return "the loop has written to the batch: what forward= would get is not what the model got"
    return _reason_in_passes(run)


def _reason_in_passes(run: Run) -> str | None:
    scene = run.scene
    count = len(scene.microbatches)
    if scene.repeated and (count > 1 or scene.rng is None):
        return "it is a further step on the same micro-batches, whose random states are gone"
    if not scene.passes:
        return None if count == 1 else "its backward passes were not seen: call sentinel.backward(loss)"
    if [done.microbatch for done in scene.passes] != list(range(count)):
        return "not every micro-batch had exactly one backward pass"
    return None


def recompute(
    run: Run,
    *,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    tentative: bool = False,
) -> Recomputed:
    """Compute the step in flight again and leave its gradients in place. Called on: every rank.

    From the same micro-batches, random states, buffers and loss scale, in the order of the loop, through
    the model as the loop calls it: compiled code, DDP and FSDP do what they always do. Micro-batches that
    the loop did not reduce (`no_sync`) are not reduced here either. Gradients are reduced and unscaled
    then, and not clipped; the GradScaler is as it is in the loop at that moment. The random generators go
    on from where the loop's own step had left them, and so do those of the program that can be found. If it
    fails on some rank, or if the outcome is not
    finite, everything is undone as for a dropped step, on every rank.

    Ranks talk in the forward and backward pass, so a rank on which `forward=` raises keeps the others
    waiting where the model itself makes them wait; see `gradsentinel.diagnosis.replay` for a rehearsal.

    Args:
        run: the run; `reason_against` must be None on every rank.
        around: a context for each forward pass, as for another precision.
        tentative: it is no surprise if it fails, and nothing to be logged with a traceback.
    """
    after_loop = RngState.capture((run.host.device.type,))
    flags = _scaler_flags(run)
    device_of(run.host.device).clear_overflow_flag()
    losses: list[Tensor] = []
    failure: Exception | None = None
    after_forward = after_loop
    own = own_generators(run)
    nodes: list[Any] = []
    try:
        with torch.enable_grad(), _counters_kept(run):
            _clear(run)
            losses.extend(_compute_all(run, around, nodes))
            after_forward = RngState.capture((run.host.device.type,))
    except Exception as error:
        if not tentative:
            logger.exception("step %d could not be computed again", run.step)
            record_swallowed(error)
        failure = error.with_traceback(None)  # its frames hold the activations
    finally:
        after_loop.restore()
        moved = [generator for generator in own if generator.put_back()]
    if not run.consensus.all_of(failure is None):
        _clear(run, flags)
        told = run.consensus.gather("" if failure is None else f"{type(failure).__name__}: {failure}")
        return Recomputed(failure=f"computing the step again failed: {next(filter(None, told))}")
    outcome = _look_at(run, tuple(losses), draws_alike=after_loop.draws_like(after_forward))
    outcome = replace(outcome, own_draws=bool(moved), node=nodes[-1] if nodes else None)
    if not outcome.finite and not outcome.overflow:
        _clear(run, flags)
    return outcome


def _look_at(run: Run, losses: tuple[Tensor, ...], *, draws_alike: bool) -> Recomputed:
    host: Recomputes = run.host  # type: ignore[assignment] # `reason_against` has looked
    overflow = device_of(run.host.device).overflow_flag()  # a scaler clears it
    host.unscale(run.optimizers)
    view = host.gradients(run.optimizers)
    norm = float(view.total_norm)  # every rank: it is a reduction where gradients are sharded
    present = zip(view.names, view.gradients, strict=True)
    # Statistics of a forward pass that does not fit into its own buffers are no success either.
    bad_forward = not all(bool(torch.isfinite(loss).all()) for loss in losses) or bool(run.health.scan())
    bad_gradients = bool(nonfinite_in(present)) or (overflow is not None and bool(overflow))
    answer = torch.tensor([int(bad_forward), int(bad_gradients)], dtype=torch.int32)
    any_forward, any_gradients = run.consensus.agree(answer).tolist()
    outcome = Recomputed(
        losses=losses,
        finite_forward=not any_forward,
        finite_gradients=not any_gradients,
        overflow=bool(any_gradients and not any_forward and host.scaler is not None),
        draws_alike=draws_alike,
        grad_norm=norm,
        marks=_marks_in(view),
    )
    if outcome.finite or outcome.overflow:
        run.last_loss, run.last_grad_norm = outcome.loss, norm
    return outcome


def marks_of(run: Run) -> Mapping[str, Mark]:
    """Return what tells two computations of a step apart, by parameter; waits for the device."""
    host: Recomputes = run.host  # type: ignore[assignment] # `reason_against` has looked
    return _marks_in(host.gradients(run.optimizers))


def _marks_in(view: GradientView) -> Mapping[str, Mark]:
    return dict(zip(view.names, zip(view.norms.tolist(), view.magnitudes.tolist(), strict=True), strict=True))


def close_marks(before: Mapping[str, Mark], after: Mapping[str, Mark]) -> bool:
    """Say whether two computations gave the same gradients, as far as norms and peaks tell."""
    return before.keys() == after.keys() and all(
        _close(one, other)
        for name, mark in before.items()
        for one, other in zip(mark, after[name], strict=True)
    )


def _close(one: float, other: float) -> bool:
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) <= _SAME * max(abs(one), abs(other))
    return math.isfinite(one) == math.isfinite(other)  # which of NaN and Inf it is differs between devices


def _passes(run: Run) -> Sequence[BackwardPass]:
    host: Recomputes = run.host  # type: ignore[assignment] # `reason_against` has looked
    # A loop that calls loss.backward() itself has one plain backward pass.
    return tuple(run.scene.passes) or (BackwardPass(reduction=host.reduction.state()),)


def _compute_all(
    run: Run, around: Callable[[], AbstractContextManager[Any]], nodes: list[Any]
) -> Iterator[Tensor]:
    if hasattr(run.host, "compute_again"):
        host: OwnRecompute = run.host  # type: ignore[assignment] # likewise
        yield from host.compute_again(run, None if around is nullcontext else around)
        return
    for done in _passes(run):
        yield _compute(run, done, around, nodes)


def _compute(
    run: Run, done: BackwardPass, around: Callable[[], AbstractContextManager[Any]], nodes: list[Any]
) -> Tensor:
    scene, host = run.scene, run.host
    microbatch = scene.microbatches[done.microbatch]
    rng = scene.rng if scene.repeated and scene.rng is not None else microbatch.rng
    # New containers around the same tensors: a forward that takes a key out of its batch did so before, too.
    batch = map_tensors(lambda tensor: tensor, microbatch.batch)
    with ExitStack() as stack:
        if hasattr(host, "reduction"):
            stack.enter_context(host.reduction.set_to(done.reduction))
        rng.restore()
        with around():
            loss = call_forward(run, run.model, batch)
        if scene.graph is not None and scene.graph[0] == done.microbatch:
            nodes.append(loss.grad_fn)
        run_backward(host, loss, divisor=done.divisor, settings=done.settings)
    run.local.end_microbatch()
    return loss.detach()


def call_forward(run: Run, model: Any, batch: Any) -> Tensor:
    """Return the loss that the user's forward gives; raises RecomputeError if it is none."""
    if run.forward is None:
        raise RecomputeError(_NO_FORWARD)
    loss = run.forward(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise RecomputeError("forward= must return the loss, a tensor with one element")
    if not loss.requires_grad:
        raise RecomputeError("the loss that forward= returns needs no gradient: is it detached in there?")
    return loss


def _clear(run: Run, flags: Mapping[int, Any] | None = None) -> None:
    """Take back what the step has left behind, in the loop or here: the slate of a step that begins.

    With `flags` the scaler keeps what it has seen in the loop, as it does in any step that is dropped.
    """
    run.host.drop(run.host.optimizers)
    run.host.restored()  # the scaler's flags, and whole parameters that FSDP2 may have kept
    run.scene.buffers.restore()
    run.local.begin_step()
    if flags:
        run.host.scaler._per_optimizer_states.update(flags)  # type: ignore[attr-defined]


def _scaler_flags(run: Run) -> Mapping[int, Any]:
    """What the GradScaler has noted about the step, by optimizer."""
    states = getattr(getattr(run.host, "scaler", None), "_per_optimizer_states", {})
    return dict(states)


@contextmanager
def _counters_kept(run: Run) -> Iterator[None]:
    """Let whole numbers that modules count in their attributes count the step once, not twice."""
    modules = {id(module): module for _, root in run.host.modules() for module in root.modules()}
    kept = [
        (module.__dict__, {name: value for name, value in module.__dict__.items() if type(value) is int})
        for module in modules.values()
    ]
    try:
        yield
    finally:
        for attributes, counters in kept:
            attributes.update(counters)
