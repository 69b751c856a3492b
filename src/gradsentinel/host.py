"""The training program as the sentinel sees it, and the one for plain PyTorch loops."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsentinel import schedules
from gradsentinel.again.backward import Reduction
from gradsentinel.errors import ConfigurationError
from gradsentinel.gradients import GradientView
from gradsentinel.measures.named import GRADIENT, Named
from gradsentinel.measures.sorting import Sorted, sort_out
from gradsentinel.ranks.wrappers import ddp_ignores, find_ddp, fsdp_meshes, named_roots, unwrapped
from gradsentinel.state.optimizer_state import Keep, capture_optimizer, named_moments, prepare_optimizers
from gradsentinel.wording import plain_name

logger = logging.getLogger("gradsentinel")


class Host(Protocol):
    """What the sentinel needs from a training program; each framework's adapter provides one."""

    device: torch.device
    """Where the first trainable parameter lives."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers that step the parameters."""

    def modules(self) -> Sequence[tuple[str, nn.Module]]:
        """Return the root modules with their name prefixes."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter once, trainable or not, with its full name."""

    def stateful(self) -> Mapping[str, Any]:
        """Return the further objects with state_dict/load_state_dict that make up the training state."""

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the optimizers' state, as 'parameter:key'; master weights are among them."""

    def capture_optimizers(self, keep: Keep) -> list[Any]:
        """Return the optimizers' state, master weights included, each tensor as `keep` made it."""

    def prepare_optimizers(self, saved: Sequence[Any]) -> Callable[[], None]:
        """Return what writes a captured state back; raises SnapshotMismatch before anything is changed."""

    def drop(self, optimizers: Sequence[Optimizer]) -> None:
        """Forget the step's gradients so that the optimizers change nothing; exact, no wait."""

    def restored(self) -> None:
        """Hear that a snapshot was written back; forget what belonged to the step that is gone."""


class TorchHost:
    """A plain PyTorch loop: modules, optimizers, LR schedulers and, perhaps, a GradScaler.

    Args:
        model: one module, a sequence of modules, or a mapping from name prefix to module.
        optimizer: one optimizer or several.
        scheduler: LR scheduler(s), stepped after each applied step.
        scaler: a torch.amp.GradScaler.
        extra: further objects with state_dict and load_state_dict, by name.

    Raises:
        ConfigurationError: if one of them cannot be driven, saying why.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scheduler: Any = None,
        scaler: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self._given = named_roots(model)
        self._modules = [(prefix, unwrapped(module)) for prefix, module in self._given]
        self.reduction = Reduction(module for _, module in self._given)
        self.optimizers: tuple[Optimizer, ...] = _sequence(optimizer)
        """The optimizers that step the parameters."""
        self.schedulers: tuple[Any, ...] = () if scheduler is None else _sequence(scheduler)
        self.scaler = scaler if scaler is not None and _enabled(scaler) else None
        self.extra = dict(extra or {})
        self._check()
        self.generation = 0
        """Grows whenever the parameters are not those of before: modules may have come with them."""
        self._names: dict[int, str] = {}
        self._order: list[tuple[str, Tensor]] = []
        self._everything = Named(())
        """What `_order` holds, so that a step need not fetch a pair of each."""
        self._some: dict[tuple[Optimizer, ...], Named] = {}
        """Likewise, by optimizers that take turns."""
        self._signature: list[Tensor] = []
        self._refresh()
        if not self._order:
            raise ConfigurationError("neither the model nor the optimizer has a parameter: nothing to watch")
        real = [p for _, p in self._order if p.device.type != "meta"]
        places = [p.device for p in real if p.requires_grad] or [p.device for p in real]
        self.device = places[0] if places else torch.device("cpu")

    def modules(self) -> Sequence[tuple[str, nn.Module]]:
        """Return the root modules with their name prefixes."""
        return self._modules

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter once: the model's in its order, then those only an optimizer knows."""
        if not self._is_current():
            self._refresh()
        return iter(self._order)

    def name_of(self, parameter: Tensor) -> str:
        """Return a parameter's full name; raises KeyError for a stranger."""
        return self._names[id(parameter)]

    def gradients(
        self, optimizers: Sequence[Optimizer] | None = None, *, norm_type: float = 2.0
    ) -> GradientView:
        """Return the view of the present gradients, of all parameters or of some optimizers' only."""
        if optimizers is None or len(optimizers) == len(self.optimizers):
            return GradientView(self._present, norm_type=norm_type)
        return GradientView(partial(self._present, optimizers), norm_type=norm_type)

    def _present(self, optimizers: Sequence[Optimizer] | None = None) -> Sorted:
        """Return the gradients that there are now, of all parameters or of some optimizers', with names."""
        if not self._is_current():
            self._refresh()
        named = self._everything if optimizers is None else self._named_of(optimizers)
        gradients: list[Any] = list(map(GRADIENT, named.parameters))
        try:
            return sort_out(named.names, gradients)
        except AttributeError:  # there is none for some parameter, and None has no dtype
            return sort_out(*named.having(gradients))

    def _named_of(self, optimizers: Sequence[Optimizer]) -> Named:
        """Return the parameters of some optimizers, in the order of all; found once for each set of them."""
        key = tuple(optimizers)
        found = self._some.get(key)
        if found is None:
            mine = {
                id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
            }
            found = self._some[key] = Named((name, p) for name, p in self._order if id(p) in mine)
        return found

    def data_parallel_group(self, name: str) -> Any:
        """Return the process group over which DDP keeps a parameter alike, or None if DDP does not."""
        for prefix, module in self._given:
            parallel = find_ddp(module)
            if parallel is not None and name.startswith(f"{prefix}." if prefix else ""):
                alone = any(n == name and ddp_ignores(parallel, p) for n, p in self._order)
                return None if alone else parallel.process_group
        return None

    def data_parallel_meshes(self) -> list[Any]:
        """Return the device meshes along which FSDP2 shards and replicates: there, ranks see other data."""
        return [mesh for _, module in self.sharded_modules() for mesh in fsdp_meshes(module)]

    @property
    def reduces(self) -> bool:
        """False while DDP or FSDP leaves the gradients local, as under no_sync()."""
        return all(self.reduction.state())

    def sharded_modules(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that FSDP2 (fully_shard) manages, with their names."""
        return [
            (plain_name(".".join(part for part in (prefix, name) if part)), module)
            for prefix, root in self._modules
            for name, module in root.named_modules()
            if any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
        ]

    def stateful(self) -> Mapping[str, Any]:
        """Return schedulers, scaler and extra objects by name."""
        found = {f"scheduler.{index}": scheduler for index, scheduler in enumerate(self.schedulers)}
        if self.scaler is not None:
            found["scaler"] = self.scaler
        found.update({f"extra.{name}": entry for name, entry in self.extra.items()})
        return found

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the optimizers' state, as 'parameter:key'."""
        return named_moments(self.optimizers, self.named_parameters())

    def capture_optimizers(self, keep: Keep) -> list[Any]:
        """Return the state of the optimizers by parameter name, the tensors as `keep` made them."""
        named = list(self.named_parameters())
        return [capture_optimizer(optimizer, named, keep) for optimizer in self.optimizers]

    def prepare_optimizers(self, saved: Sequence[Any]) -> Callable[[], None]:
        """Return what writes a captured state back; raises SnapshotMismatch before anything is changed."""
        return prepare_optimizers(self.optimizers, saved, self.named_parameters())

    def drop(self, optimizers: Sequence[Optimizer]) -> None:
        """Set the gradients of the optimizers' parameters to None: a step then changes nothing at all.

        Dropping for all optimizers takes in the parameters that none of them has: nobody clears those,
        so one NaN in their gradients would condemn every later step.
        """
        dropped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        if len(optimizers) == len(self.optimizers):
            dropped += [parameter for _, parameter in self.named_parameters()]
        for parameter in dropped:
            parameter.grad = None
            main_grad = getattr(parameter, "main_grad", None)
            if isinstance(main_grad, Tensor):
                main_grad.zero_()

    def restored(self) -> None:
        """Forget which optimizers the scaler had unscaled, and whole parameters that FSDP2 may have kept."""
        if self.scaler is not None:
            self.scaler._per_optimizer_states.clear()
        self._reshard()

    def learning_rates(self) -> tuple[float, ...]:
        """Return the learning rate of each parameter group; a tensor learning rate on a device waits."""
        rates = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rate = group.get("lr")
                rates.append(0.0 if rate is None else float(rate))  # some find their own
        return tuple(rates)

    # -- the pieces of a step ----------------------------------------------------------------------

    def unscale(self, optimizers: Sequence[Optimizer]) -> tuple[Tensor | None, Tensor | None]:
        """Unscale the gradients; return the loss scale and the overflow flag, or None without a scaler."""
        if self.scaler is None:
            return None, None
        found: list[Tensor] = []
        for optimizer in optimizers:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                state = self.scaler._per_optimizer_states[id(optimizer)]
                if state["stage"].name == "READY":
                    self.scaler.unscale_(optimizer)
                found.extend(state["found_inf_per_device"].values())
        if not found:
            return None, None
        scale = self.scaler._scale
        overflow = found[0] if len(found) == 1 else torch.stack([f.to(found[0].device) for f in found]).sum(0)
        return scale, overflow

    def apply(self, optimizers: Sequence[Optimizer], *, overflow: bool = False) -> None:
        """Run the optimizers with the present gradients; with `overflow` the scaler drops the step."""
        if overflow and self.scaler is not None:  # perhaps only another rank has seen it
            for optimizer in optimizers:
                state = self.scaler._per_optimizer_states[id(optimizer)]
                for found in state["found_inf_per_device"].values():
                    found.fill_(1.0)
        for optimizer in optimizers:
            if self.scaler is None:
                optimizer.step()
            elif any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                self.scaler.step(optimizer)

    def finish(self, optimizers: Sequence[Optimizer], *, advance: bool) -> None:
        """Close the step: update the scaler if it took part, step the schedulers, clear the gradients."""
        if self.scaler is not None and any(
            self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            for optimizer in optimizers
        ):
            self.scaler.update()
        if advance and self.schedulers:
            schedules.advance(self.schedulers, optimizers)
        for optimizer in optimizers:
            optimizer.zero_grad()

    # -- checks ------------------------------------------------------------------------------------

    def _check(self) -> None:
        self._check_optimizers()
        self._check_schedulers()
        if self.scaler is not None and not hasattr(self.scaler, "unscale_"):
            raise ConfigurationError(f"scaler is a {type(self.scaler).__name__}, not a torch.amp.GradScaler")
        for name, entry in self.extra.items():
            if not (hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")):
                raise ConfigurationError(
                    f"extra {name!r} ({type(entry).__name__}) needs state_dict and load_state_dict methods"
                )

    def _check_optimizers(self) -> None:
        if not self.optimizers:
            raise ConfigurationError("give at least one optimizer")
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Optimizer):
                raise ConfigurationError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer")
            if self._needs_closure(optimizer):
                raise ConfigurationError(
                    f"{type(optimizer).__name__}.step needs a closure and runs the model itself, so a step "
                    "cannot be judged before it is made; use an optimizer without a closure"
                )
        if len(set(map(id, self.optimizers))) < len(self.optimizers):
            raise ConfigurationError("the same optimizer is given twice: it would step twice")
        members = {id(p) for _, module in self._modules for p in module.parameters()}
        for optimizer in self.optimizers:
            if members and all(
                id(p) not in members for group in optimizer.param_groups for p in group["params"]
            ):
                logger.warning(
                    "the %s holds no parameter of the model: is it another model's?", type(optimizer).__name__
                )

    def _check_schedulers(self) -> None:
        for scheduler in self.schedulers:
            if not hasattr(scheduler, "step"):
                raise ConfigurationError(f"scheduler is a {type(scheduler).__name__} and has no step method")
            if "metrics" in inspect.signature(scheduler.step).parameters:
                raise ConfigurationError(
                    f"{type(scheduler).__name__} steps on a metric, not on an optimizer step: call its "
                    "step(metric) yourself, and give it as extra={'plateau': scheduler} to have it restored"
                )
            owner = getattr(scheduler, "optimizer", None)
            if owner is not None and all(owner is not optimizer for optimizer in self.optimizers):
                raise ConfigurationError(
                    f"the {type(scheduler).__name__} belongs to an optimizer that was not given; "
                    "give that optimizer too"
                )

    @staticmethod
    def _needs_closure(optimizer: Optimizer) -> bool:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        return closure is not None and closure.default is inspect.Parameter.empty

    def _is_current(self) -> bool:
        """Return True if the optimizers have the parameters that they had when the names were read."""
        known, count = iter(self._signature), 0
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                now = group["params"]
                count += len(now)
                if not all(map(is_, now, known)):
                    return False
        return count == len(self._signature)

    def _refresh(self) -> None:
        """Read the names again: at start, and when an optimizer got a parameter it did not have."""
        self._reshard()
        self._names.clear()
        self._order.clear()
        for prefix, module in self._modules:
            for name, parameter in module.named_parameters():
                self._remember(plain_name(f"{prefix}.{name}" if prefix else name), parameter)
        for index, optimizer in enumerate(self.optimizers):
            for number, group in enumerate(optimizer.param_groups):
                for position, parameter in enumerate(group["params"]):
                    self._remember(f"optimizer{index}.group{number}.{position}", parameter)
        self._everything = Named(self._order)
        self._some.clear()
        self._signature = [
            p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
        ]
        self.generation += 1

    def _reshard(self) -> None:
        """Have FSDP2 drop the whole parameters that a forward pass without a backward pass left in place."""
        for _, module in self.sharded_modules():
            module.reshard()  # type: ignore[operator]

    def _remember(self, name: str, parameter: Tensor) -> None:
        if id(parameter) not in self._names:
            self._names[id(parameter)] = name
            self._order.append((name, parameter))


def _enabled(scaler: Any) -> bool:
    is_enabled = getattr(scaler, "is_enabled", None)
    return is_enabled is None or bool(is_enabled())


def _sequence(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


Forward = Callable[[nn.Module, Any], Tensor]
"""How the loop computes the loss of a micro-batch: forward(model, batch) -> loss."""
