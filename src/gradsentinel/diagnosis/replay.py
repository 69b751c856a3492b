"""Runs a micro-batch of the step in flight again, and leaves no trace of it in the run."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel.again.model_calls import Record
from gradsentinel.again.scene import MicroBatch
from gradsentinel.diagnosis.graph import Graph, graph_of
from gradsentinel.diagnosis.memory import judge
from gradsentinel.diagnosis.shelter import sheltered
from gradsentinel.diagnosis.trace import Trace, names_of
from gradsentinel.ranks.wrappers import find_ddp
from gradsentinel.run import Run
from gradsentinel.state.rng import RngState
from gradsentinel.state.tree import map_tensors, tensors_in
from gradsentinel.testing import record_swallowed

logger = logging.getLogger("gradsentinel")


class ReplayError(RuntimeError):
    """A step cannot be run again; the message says why."""


@dataclass(slots=True)
class Computed:
    """What a micro-batch came to."""

    loss: Tensor
    """As the user's forward returned it, without its graph; 0-dim."""
    root: Tensor | None
    """The very tensor the backward pass started from."""
    gradients: dict[str, Tensor]
    """Of the micro-batch alone, divided and scaled as in the run; what has none is left out."""
    nodes: Mapping[int, tuple[str, bool]]
    """Autograd nodes by number: name, and whether it is a user's Function."""
    graph: Graph = ()
    """The autograd graph behind the loss as the user's forward returned it."""
    calls: Record | None = None
    """What the model was given and returned, if it was run as it is and the loop's own calls are known."""
    rng: RngState | None = None
    """The random state that it left behind, likewise."""
    writes: Mapping[str, int] = field(default_factory=dict)
    """How often it has written to which buffer, likewise."""
    spoilt: Mapping[str, Tensor] = field(default_factory=dict)
    """The buffers that it has made non-finite, if the replay looks at them."""


def reason_against(run: Run) -> str | None:
    """Return why the step in flight cannot be run again, or None if it can."""
    if run.forward is None:
        own: str | None = getattr(run.host, "why_no_replay", None)
        return own or "pass forward=lambda model, batch: loss to the Sentinel to have the step run again"
    unfit: str | None = getattr(run.forward, "why_not", lambda _: None)(run)
    if unfit is not None:  # an adapter's own
        return unfit
    if not run.scene.microbatches:
        return "no micro-batch of the step was seen: iterate over sentinel.steps(loader)"
    if any(hasattr(p, "to_local") for _, p in run.host.named_parameters()):
        return "the parameters are sharded or tensor-parallel: only all ranks together can run the step again"
    if any(torch.nn.parameter.is_lazy(p) for _, p in run.host.named_parameters()):
        return "the model is not initialised yet"
    return None


class Replay:
    """Computes micro-batches again, each from its own random state and from the step's buffers.

    The weights are still those of the step. Compiled code runs eagerly, DDP neither reduces nor
    broadcasts, and hooks on accumulated gradients do not fire.

    Args:
        run: the run.
        buffers: look at what becomes of the buffers, too.
    """

    def __init__(self, run: Run, *, buffers: bool = False) -> None:
        self.run = run
        self._good = (
            {name for name, kept in run.scene.buffers.kept() if not judge(kept)} if buffers else set()
        )
        self.microbatches: Sequence[MicroBatch] = run.scene.microbatches
        self._instead: dict[int, Tensor] = {}
        self.count = 0
        """How often a micro-batch was computed."""
        self.slowest = 0.0
        """Seconds that the slowest of them took."""

    @contextmanager
    def sheltered(self) -> Iterator[None]:
        """Everything in the block leaves the run as it is."""
        with sheltered(self.run):
            yield

    def compute(
        self,
        microbatch: MicroBatch,
        *,
        mode: AbstractContextManager[Any] | None = None,
        batch: Any = None,
        backward: bool = True,
        eager: bool = True,
        instead: Record | None = None,
    ) -> Computed:
        """Run forward and backward of one micro-batch; call it inside `sheltered`.

        Args:
            microbatch: gives the random state, and the batch unless another is given.
            mode: a dispatch mode that is active meanwhile.
            batch: to be computed instead, already a copy.
            backward: False stops at the loss.
            eager: False lets compiled code be compiled code.
            instead: has the model given what it was given in those calls.

        Raises:
            ReplayError: if it cannot be done.
            Exception: whatever the user's own code raises.
        """
        run = self.run
        run.scene.buffers.restore()
        given = _copied(microbatch.batch) if batch is None else batch
        trace = mode if isinstance(mode, Trace) else None
        if trace is not None:
            for path, tensor in tensors_in(given):
                trace.declare_field(tensor, path)
        writes = run.scene.buffers.moved()
        microbatch.rng.restore()
        self.count += 1
        calls = None if mode is not None or batch is not None else run.scene.calls
        record: Record | None = None
        started = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_eager() if eager else nullcontext())
            if trace is not None:
                stack.enter_context(trace.module_stack())
            if run.consensus.world_size > 1:
                stack.enter_context(_NoCollectives())  # type: ignore[no-untyped-call]
            stack.enter_context(mode or nullcontext())
            if calls is None:
                loss = run_forward(run, given)
            else:
                with calls.replayed(instead) as record:
                    loss = run_forward(run, given)
            root = self._scaled(loss)
            nodes, graph = names_of(root), graph_of(loss.grad_fn)
            gradients: dict[str, Tensor] = {}
            if backward and root.requires_grad:
                if trace is not None:
                    trace.begin_backward(root)
                gradients = run_backward(self, root, given, microbatch, trace)
        self.slowest = max(self.slowest, time.monotonic() - started)
        names = [name for name, _ in microbatch.rng.devices]
        rng = RngState.capture(names) if record is not None else None
        now = run.scene.buffers.moved() if record is not None else {}
        moved = {name: count - writes.get(name, 0) for name, count in now.items()}
        named = run.scene.buffers.named() if self._good else ()
        spoilt = {name: buffer for name, buffer in named if name in self._good and judge(buffer)}
        return Computed(loss.detach(), root.detach(), gradients, nodes, graph, record, rng, moved, spoilt)

    def _scaled(self, loss: Tensor) -> Tensor:
        passes = self.run.scene.passes  # a window that the loader's end cut short is divided like the others
        count = passes[0].divisor if passes else len(self.microbatches)
        root = loss / count if count > 1 else loss
        scaler = getattr(self.run.host, "scaler", None)
        scale = getattr(scaler, "_scale", None)
        return root if scale is None else root * scale.to(root.device)

    def leaves(self) -> dict[str, Tensor]:
        """Return the trainable parameters by name."""
        named = self.run.host.named_parameters()
        return {name: self._instead.get(id(p), p) for name, p in named if p.requires_grad}

    @contextmanager
    def with_parameters(self, instead: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
        """Let the modules hold what `instead(name, parameter)` returns; None leaves a parameter as it is."""
        for name, parameter in self.run.host.named_parameters():
            other = instead(name, parameter)
            if other is not None:
                self._instead[id(parameter)] = nn.Parameter(other, requires_grad=parameter.requires_grad)
        owners = [
            (module, name, parameter)
            for _, root in self.run.host.modules()
            for module in root.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in self._instead
        ]
        try:
            for module, name, parameter in owners:
                module._parameters[name] = self._instead[id(parameter)]  # type: ignore[assignment]
            yield
        finally:
            for module, name, parameter in owners:
                module._parameters[name] = parameter
            self._instead.clear()

    def again_with_hooks_off(
        self, given: Any, microbatch: MicroBatch, trace: Trace | None
    ) -> dict[str, Tensor]:
        """Use `.backward()`, which reentrant checkpointing insists on, with nobody listening."""
        leaves = self.leaves()
        listening = [getattr(p, "_post_accumulate_grad_hooks", None) or {} for p in leaves.values()]
        kept = [dict(hooks) for hooks in listening]
        self.run.scene.buffers.restore()
        microbatch.rng.restore()
        try:
            for parameter, hooks in zip(leaves.values(), listening, strict=True):
                hooks.clear()  # the very dictionary that autograd looks into
                parameter.grad = None
            if trace is not None:
                trace.in_backward = False
            root = self._scaled(run_forward(self.run, given))
            if trace is not None:
                trace.begin_backward(root)
            root.backward()  # type: ignore[no-untyped-call]
            return {name: p.grad for name, p in leaves.items() if p.grad is not None}
        finally:
            for parameter, hooks, before in zip(leaves.values(), listening, kept, strict=True):
                hooks.update(before)
                parameter.grad = None


def run_forward(run: Run, batch: Any) -> Tensor:
    """Call the user's forward; its name ends the search for the user's line."""
    if run.forward is None:
        raise ReplayError("there is no forward= to run")
    loss: Any = run.forward(_bare(run.model), batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ReplayError(
            f"forward= must return the loss, a tensor with one element, and returns {_described(loss)}"
        )
    found: Tensor = loss
    return found


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: return the one of them that is the loss"
    return "None" if value is None else f"a {type(value).__name__}"


def run_backward(
    replay: Replay, root: Tensor, given: Any, microbatch: MicroBatch, trace: Trace | None
) -> dict[str, Tensor]:
    """Compute the gradients without writing them anywhere."""
    leaves = replay.leaves()
    if any(name.startswith("CheckpointFunction") for name, _ in names_of(root).values()):
        # Reentrant checkpointing hides its parameters from autograd.grad, which then says they have none.
        return replay.again_with_hooks_off(given, microbatch, trace)
    try:
        found = torch.autograd.grad(root, list(leaves.values()), allow_unused=True)
    except RuntimeError as error:
        if "checkpoint" not in str(error):
            raise
        return replay.again_with_hooks_off(given, microbatch, trace)
    return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}


def rehearse(run: Run, *, tentative: bool = False) -> str | None:
    """Run each rank's micro-batches alone before all ranks do so together; return why they had better not.

    An exception on one rank in the middle of a collective keeps the others waiting; here it does no harm.
    A model that cannot run alone (sharded, or with collectives of its own) is not rehearsed. Called on:
    every rank.

    Args:
        run: the run.
        tentative: it is no surprise if it fails, and nothing to be logged with a traceback.
    """
    if run.consensus.world_size == 1:
        return None
    failure: Exception | None = None
    try:
        replay = Replay(run)
        if reason_against(run) is None:
            with replay.sheltered():
                for microbatch in replay.microbatches:
                    replay.compute(microbatch)
    except ReplayError:
        pass  # it talks to other ranks, or fails on all of them alike
    except Exception as error:
        if not tentative:
            logger.exception("step %d could not be computed again", run.step)
            record_swallowed(error)
        failure = error.with_traceback(None)  # its frames hold the activations
    if run.consensus.all_of(failure is None):
        return None
    told = run.consensus.gather("" if failure is None else f"{type(failure).__name__}: {failure}")
    return f"computing the step again failed: {next(filter(None, told))}"


def is_compiled(run: Run) -> bool:
    """Return True if the loop runs code through torch.compile, as far as modules and forward= show it."""
    if hasattr(run.forward, "_torchdynamo_orig_callable"):
        return True
    roots = [*_each(run.model), *(root for _, root in run.host.modules())]
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for root in roots
        for module in root.modules()
    )


def _each(model: Any) -> list[nn.Module]:
    values = model.values() if isinstance(model, Mapping) else model
    values = values if isinstance(values, (list, tuple)) or isinstance(model, Mapping) else [model]
    return [module for module in values if isinstance(module, nn.Module)]


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to talk to other ranks: they need not take part, and would never answer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise ReplayError(f"the step talks to other ranks ({func}), so one rank cannot run it alone")
        return func(*args, **(kwargs or {}))


def _eager() -> AbstractContextManager[Any]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _copied(batch: Any) -> Any:
    """Return the batch as copies: a forward pass may write into its input."""
    return map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), batch)


def _bare(model: Any) -> Any:
    """Look through DDP, also under torch.compile; anything else is handed over as the loop has it."""
    if isinstance(model, nn.Module):
        ddp = find_ddp(model)
        return model if ddp is None else ddp.module
    return model
