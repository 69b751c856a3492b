"""A Megatron-Core training program as the sentinel sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsentinel.again.recompute import RecomputeError
from gradsentinel.errors import ConfigurationError, SnapshotMismatch
from gradsentinel.gradients import GradientView
from gradsentinel.integrations.megatron.compat import asked, unvalidated
from gradsentinel.integrations.megatron.exchanges import exchanges_in, watch
from gradsentinel.integrations.megatron.gradients import BucketGradients, FinalGradients
from gradsentinel.integrations.megatron.names import (
    Inner,
    ParameterNames,
    final_gradient,
    inner_parameters,
    is_sharded,
)
from gradsentinel.integrations.megatron.returns import watch_returns, watch_stage
from gradsentinel.integrations.megatron.schedule import Look, ScheduledStep
from gradsentinel.integrations.megatron.state import (
    MAIN,
    ScalerState,
    TrackedRandomStates,
    checked_mains,
    stateful_schedule,
    without_mains,
)
from gradsentinel.run import Run
from gradsentinel.state.optimizer_state import Keep, capture_optimizer, prepare_optimizers


class MegatronHost:
    """Model chunks, the optimizers in Megatron's outermost one, its scaler, schedule and random states.

    Args:
        chunks: the model's chunks, under Megatron's DDP.
        optimizer: the outermost optimizer.
        parts: the optimizers in it.
        scheduler: Megatron's OptimizerParamScheduler, or another with state_dict and load_state_dict.
        extra: further objects with state_dict and load_state_dict, by name.
    """

    why_no_replay = (
        "the model is spread over ranks, and one of them cannot run a step of it alone; "
        "Retry() has all of them compute it again"
    )

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        parts: Sequence[Any],
        *,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.parts = parts
        self.names = ParameterNames(chunks)
        self.generation = 1
        self.random = TrackedRandomStates()
        self.stages: int = asked("get_pipeline_model_parallel_world_size", 1) or 1
        self.stage: int = asked("get_pipeline_model_parallel_rank", 0) or 0
        self.local = BucketGradients(stage=self.stage, stages=self.stages)
        self._modules = _roots(chunks)
        if not self.names.order:
            raise ConfigurationError("the model has no parameter on this rank: nothing to watch")
        trained = [p for _, p in self.names.order if p.requires_grad]
        self.device = (trained or [p for _, p in self.names.order])[0].device
        self._inner = [list(inner_parameters(part)) for part in parts]
        self.names.refuse_strangers(one for inner in self._inner for one in inner)
        shards = (inner for part, inner in zip(parts, self._inner, strict=True) if is_sharded(part))
        self._sharded = frozenset(self.names.of(one.model) for inner in shards for one in inner)
        self._optimizers = tuple(
            part.optimizer for part in parts if getattr(part, "optimizer", None) is not None
        )
        scalers = [getattr(part, "grad_scaler", None) for part in parts]
        self._scalers = [s for s in dict.fromkeys(scalers) if s is not None and s.state_dict()]
        self.scaler = self._scalers[0] if self._scalers else None
        self._scaler_states = [ScalerState(scaler) for scaler in self._scalers]
        self._stateful = {"rng_tracker": self.random}
        if scheduler is not None:
            self._stateful["scheduler.0"] = stateful_schedule(scheduler)
        for number, scaler in enumerate(self._scalers):
            self._stateful[f"scaler.{number}" if number else "scaler"] = scaler
        self._stateful.update({f"extra.{name}": entry for name, entry in (extra or {}).items()})
        self._shares: dict[tuple[int, ...], Tensor] = {}
        self._scale: Tensor | None = None
        self.prepare: Callable[[], bool] = optimizer.prepare_grads
        """Megatron's own way from reduced to final gradients; says whether the scaler found an overflow."""
        self.found = False
        """What it said last."""
        self.total: Callable[[Tensor], Tensor] = torch.Tensor.clone
        """Adds up over all ranks."""
        self.step: ScheduledStep | None = None
        """The forward and backward passes of the step in flight, if they were seen."""

    # -- Host --------------------------------------------------------------------------------------

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers of torch inside of Megatron's; none on a rank that trains nothing."""
        return self._optimizers

    def modules(self) -> Sequence[tuple[str, nn.Module]]:
        """Return the model chunks without their wrappers; of several, with their numbers."""
        return self._modules

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's model parameters with their names in the whole model."""
        return iter(self.names.order)

    def name_of(self, parameter: Tensor) -> str:
        """Return a model parameter's name; raises KeyError for a stranger."""
        return self.names.of(parameter)

    def model_parameter(self, tensor: Tensor) -> Tensor:
        """Return the model parameter that belongs to what an optimizer steps."""
        found = (one.model for inner in self._inner for one in inner if one.tensor is tensor)
        return next(found, tensor)

    def describe(self, parameter: Tensor) -> Mapping[str, Any]:
        """Return where a parameter lies: chunk, flat buffer, and which part of it is stepped here."""
        shard = next(
            (
                [one.start, one.start + one.tensor.numel()]
                for inner in self._inner
                for one in inner
                if one.model is parameter
            ),
            None,
        )
        return {"flat": self.names.describe(parameter), "stepped_here": shard}

    def stateful(self) -> Mapping[str, Any]:
        """Return schedule, scalers, random states and extra objects by name."""
        return self._stateful

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the optimizers' state, float32 copies and shards included."""
        for optimizer, inner in self._pairs():
            for name, one in _named(inner, self.names):
                if one.tensor is not one.model:
                    yield f"{name}:{MAIN}", one.tensor
                for key, value in optimizer.state.get(one.tensor, {}).items():
                    if isinstance(value, Tensor):
                        yield f"{name}:{key}", value

    def capture_optimizers(self, keep: Keep) -> list[Any]:
        """Return the state of each torch optimizer by parameter name, float32 copies and shards included."""
        captured = []
        for optimizer, inner in self._pairs():
            named = list(_named(inner, self.names))
            state = capture_optimizer(optimizer, [(name, one.tensor) for name, one in named], keep)
            for name, one in named:
                if one.tensor is not one.model:
                    state["state"].setdefault(name, {})[MAIN] = keep(one.tensor.detach())
            captured.append(state)
        return captured

    def prepare_optimizers(self, saved: Sequence[Any]) -> Callable[[], None]:
        """Return what writes captured states back; raises SnapshotMismatch before anything is changed."""
        pairs = self._pairs()
        if len(saved) != len(pairs):
            raise SnapshotMismatch(f"the snapshot holds {len(saved)} optimizers, the run has {len(pairs)}")
        writes: list[Callable[[], None]] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for (optimizer, inner), state in zip(pairs, saved, strict=True):
            named = dict(_named(inner, self.names))
            plain, mains = without_mains(state)
            copies += checked_mains(mains, named)
            tensors = [(name, one.tensor) for name, one in named.items()]
            writes.append(prepare_optimizers([optimizer], [plain], tensors))

        def write() -> None:
            for target, value in copies:
                target.detach().copy_(value)
            for part in writes:
                part()

        return write

    def drop(self, optimizers: Sequence[Optimizer]) -> None:
        """Forget all gradients as Megatron does before a step: flat buffers and the optimizer's own."""
        del optimizers  # a step is one of all of them
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def restored(self) -> None:
        """Do nothing: the next forward pass gathers what is sharded."""

    # -- for assembly ------------------------------------------------------------------------------

    def data_parallel_group(self, name: str) -> Any:
        """Return the group over which a parameter is alike, None where its parts arrive only when needed."""
        for (known, parameter), chunk in zip(self.names.order, self._chunk_of_each(), strict=True):
            if known == name:
                if getattr(chunk.ddp_config, "overlap_param_gather", False):
                    return None
                if getattr(parameter, "allreduce", True):
                    return asked("get_data_parallel_group", with_context_parallel=True)
                return asked("get_expert_data_parallel_group")
        return None

    def data_parallel_meshes(self) -> list[Any]:
        """Return none: Megatron has process groups."""
        return []

    def sharded_modules(self) -> list[tuple[str, nn.Module]]:
        """Return none: nothing is under FSDP2."""
        return []

    def watch_exchanges(self) -> None:
        """Look at what this rank hands to those that share its layers or its pipeline, before it does."""
        for chunk, (_, root) in enumerate(self._modules):
            for exchange in exchanges_in(root, self.names, chunk):
                watch(exchange, self.local, self._exchanging)
            watch_returns(root, self.names, chunk, self.local, self._returning)
            if self.stages > 1:
                watch_stage(root, self.local.stage(chunk), self.local, self._returning)

    def _exchanging(self) -> tuple[int, int, int] | None:
        step = self.step
        if step is None or step.exchanges is None:
            return None
        step.exchanges += 1
        return step.microbatch, step.chunk, step.exchanges

    def _returning(self) -> tuple[int, int, int] | None:
        return None if self.step is None else self.step.next_return()

    # -- the pieces of a step ----------------------------------------------------------------------

    def gradients(self, optimizers: Sequence[Optimizer] | None = None) -> GradientView:
        """Return the view of the final gradients; its total norm is added up over all ranks."""
        del optimizers
        found: list[tuple[str, Tensor]] = []
        starts: list[tuple[int, torch.Size]] = []
        places: list[int] = []
        number = 0
        for inner in self._inner:
            for one in inner:
                gradient = final_gradient(one.tensor)
                if gradient is not None:
                    found.append((self.names.of(one.model), gradient))
                    starts.append((one.start, one.model.shape))
                    places.append(number)
                number += 1
        return FinalGradients(
            found,
            shares=self._shares_of(tuple(places)),
            local=self.local.peaks(),
            total=self.total,
            starts=starts,
            sharded=self._sharded,
        )

    def unscale(self, optimizers: Sequence[Optimizer]) -> tuple[Tensor | None, Tensor | None]:
        """Make final gradients of reduced ones; return loss scale and overflow flag, None without one."""
        del optimizers
        for state in self._scaler_states:
            state.put_back()
        with torch.no_grad():
            self.found = bool(self.prepare())
        return self.overflow()

    def begin_update(self) -> None:
        """Remember the scaler as it is before Megatron updates it."""
        self._scale = None if self.scaler is None else self.scaler.scale.detach().clone()
        for state in self._scaler_states:
            state.keep()

    def overflow(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the loss scale that the step was made with, and whether the scaler found an overflow."""
        if self._scale is None:
            return None, None
        return self._scale.reshape(()), torch.tensor(float(self.found), device=self._scale.device)

    def settle_scaler(self, *, overflow: bool, dropped: bool) -> None:
        """Make the scaler what all ranks agreed on: as after an overflow, or as before a dropped step."""
        for state in self._scaler_states:
            if dropped:
                state.put_back()
            elif overflow != self.found:
                state.update(overflow=overflow)

    def learning_rates(self) -> tuple[float, ...]:
        """Return the learning rate of each parameter group."""
        return tuple(float(group["lr"]) for o in self._optimizers for group in o.param_groups)

    # -- computing a step again --------------------------------------------------------------------

    def why_no_recompute(self, run: Run) -> str | None:
        """Return why this rank cannot compute the step in flight again, or None if it can."""
        del run
        if self.step is None:
            return (
                "how the step's forward and backward passes are run was not seen: call what "
                "sentinel.schedule(get_forward_backward_func()) returns, or use the launcher"
            )
        return None

    def compute_again(
        self, run: Run, around: Callable[[], AbstractContextManager[Any]] | None
    ) -> list[Tensor]:
        """Run the step's micro-batches through the schedule again, with all ranks; return the losses."""
        if around is not None:
            raise RecomputeError("every operator in a wider type: what ranks send each other would be, too")
        step, rng = self.step, run.scene.rng
        assert step is not None  # `why_no_recompute` has looked
        assert rng is not None  # kept since the step began
        after = self.random.now()
        for state in self._scaler_states:  # the loss is scaled with it
            state.put_back()
        rng.restore()
        self.random.put(self.random.state_dict())
        try:
            with unvalidated():
                return step.again()
        finally:
            self.random.put(after)

    @contextmanager
    def looked_at_by(self, look: Look) -> Iterator[None]:
        """Have somebody look at the step in flight while it is computed again, in the block."""
        step = self.step
        assert step is not None  # `why_no_recompute` has looked
        step.look = look
        try:
            yield
        finally:
            step.look = None

    # -- small things ------------------------------------------------------------------------------

    def _pairs(self) -> list[tuple[Optimizer, list[Inner]]]:
        return [
            (part.optimizer, inner)
            for part, inner in zip(self.parts, self._inner, strict=True)
            if getattr(part, "optimizer", None) is not None
        ]

    def _chunk_of_each(self) -> list[Any]:
        return [self.chunks[self.names.describe(p)["chunk"]] for _, p in self.names.order]

    def _shares_of(self, places: tuple[int, ...]) -> Tensor:
        """How much the square of each gradient's norm counts in the sum over all ranks, as in Megatron."""
        known = self._shares.get(places)
        if known is None:
            shares: list[float] = []
            world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
            for part, inner in zip(self.parts, self._inner, strict=True):
                counted = {id(g) for g in _counted(part)} if inner else set()
                group = part.get_grad_stats_parallel_group() if inner and world > 1 else None
                size = world if group is None else group.size()
                for one in inner:
                    gradient = final_gradient(one.tensor)
                    shares.append(size / world if gradient is not None and id(gradient) in counted else 0.0)
            kept = [shares[place] for place in places]
            known = self._shares[places] = torch.tensor(kept, dtype=torch.float32, device=self.device)
        return known


def _counted(part: Any) -> Sequence[Tensor]:
    """The gradients that Megatron counts on this rank; the method got another name in 0.20."""
    ask = getattr(part, "get_main_grads_for_grad_norm", None) or part.get_grads_for_grad_norm
    found: Sequence[Tensor] = ask()
    return found


def _roots(chunks: Sequence[Any]) -> list[tuple[str, nn.Module]]:
    roots = []
    for number, chunk in enumerate(chunks):
        inner = chunk.module
        while type(inner).__name__ == "Float16Module":
            inner = inner.module
        roots.append((f"chunk{number}" if len(chunks) > 1 else "", inner))
    return roots


def _named(inner: Sequence[Inner], names: ParameterNames) -> Iterator[tuple[str, Inner]]:
    for one in inner:
        yield names.of(one.model), one
