"""What the ranks of a model exchange in its forward pass, looked at before they do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradsentinel.integrations.megatron.compat import asked
from gradsentinel.integrations.megatron.names import ParameterNames
from gradsentinel.integrations.wraps import Wraps
from gradsentinel.testing import record_swallowed

if TYPE_CHECKING:
    from gradsentinel.integrations.megatron.gradients import BucketGradients

logger = logging.getLogger("gradsentinel")

Place = Callable[[], "tuple[int, int, int] | None"]
"""Tells micro-batch, chunk, and how many exchanges came before in this forward pass; None outside of one."""


_MULTIPLY = "_forward_impl"
"""The method of Megatron's own linear layers that multiplies, and exchanges nothing in a row-parallel one."""


class Exchange:
    """What one module hands to other ranks: its input before it adds up or gathers, or its output."""

    def __init__(
        self,
        module: nn.Module,
        what: str,
        pick: Callable[[Any, Any], tuple[Any, ...]],
        *,
        product: str = "",
    ) -> None:
        self.module = module
        self.what = what
        self._pick = pick
        self.made = pick is _output
        """True if it is what the module has made, not what it is given."""
        self.product = product if callable(getattr(module, _MULTIPLY, None)) else ""
        """What the module multiplies and is about to add up, in words, if that can be seen."""

    def tensors(self, given: Any, made: Any) -> Iterator[Tensor]:
        """Yield what this rank has computed of it, and nobody else has touched."""
        for value in self._pick(given, made):
            if isinstance(value, Tensor) and value.is_floating_point():
                yield value.detach()


def exchanges_in(root: nn.Module, names: ParameterNames, chunk: int) -> Iterator[Exchange]:
    """Yield the modules of a chunk whose values the ranks put together, as far as this job has such ranks.

    Row-parallel layers add up the products that each rank alone has computed; with sequence parallelism
    column-parallel layers gather their inputs; attention gathers keys and values over context-parallel ranks;
    a layer of experts sends tokens there and back.
    """
    tensor = (asked("get_tensor_model_parallel_world_size", 1) or 1) > 1
    context = (asked("get_context_parallel_world_size", 1) or 1) > 1
    expert = (asked("get_expert_model_parallel_world_size", 1) or 1) > 1
    for path, module in root.named_modules():
        kind = type(module).__name__
        if getattr(module, "is_expert", False):
            continue
        name = names.module(path, chunk) if path else "model"
        gathers = "ColumnParallelLinear" in kind and getattr(module, "sequence_parallel", False)
        if tensor and "RowParallelLinear" in kind:
            yield Exchange(module, f"what is given to {name}", _first, product=f"the product of {name}")
        elif tensor and gathers:
            yield Exchange(module, f"what is given to {name}", _first)
        elif context and path.endswith("core_attention"):
            yield Exchange(module, f"keys and values of {name}", _keys_and_values)
        elif expert and kind == "MoELayer":
            yield Exchange(module, f"what is given to {name}", _first)
        elif expert and path.endswith(".experts"):
            yield Exchange(module, f"what {name} has made", _output)
        if tensor and path == "output_layer":
            yield Exchange(module, f"what {name} has made", _output)


def watch(exchange: Exchange, local: BucketGradients, place: Place) -> None:
    """Have each of a module's exchanges looked at: one launch, no wait. An error of its own ends that."""
    given_up: list[Exchange] = []

    def look(given: Any, made: Any = None, *, what: str = exchange.what) -> None:
        if given_up:
            return
        try:
            found = place()
            if found is not None and not torch.compiler.is_compiling():
                for tensor in exchange.tensors(given, made):
                    local.record_exchange(what, tensor, *found)
        except Exception as error:
            given_up.append(exchange)
            logger.exception("%s cannot be looked at any more", exchange.what)
            record_swallowed(error)

    if exchange.product:
        _watch_product(exchange, look, local)
    elif exchange.made:
        local.keep_handle(exchange.module.register_forward_hook(lambda _m, given, made: look(given, made)))
    else:
        local.keep_handle(exchange.module.register_forward_pre_hook(lambda _m, given: look(given)))


def _watch_product(exchange: Exchange, look: Callable[..., None], local: BucketGradients) -> None:
    """Look at the product of a row-parallel layer before it is added up over the ranks, in place.

    It is bad where the layer's input is, so that is not looked at as well: one launch, as for any exchange.
    A forward pass that multiplies some other way (another release, another library's) is looked at by
    its input.
    """
    seen = [False]

    def multiplying(plain: Callable[..., Any]) -> Callable[..., Any]:
        def multiply(*args: Any, **kwargs: Any) -> Any:
            product = plain(*args, **kwargs)
            seen[0] = True
            look((product,), what=exchange.product)
            return product

        return multiply

    def after(_module: nn.Module, given: Any, _made: Any) -> None:
        if not seen[0]:
            look(given)
        seen[0] = False

    wraps = Wraps()
    wraps.wrap(exchange.module, _MULTIPLY, multiplying)
    local.keep_handle(_Undo(wraps))
    local.keep_handle(exchange.module.register_forward_hook(after))


class _Undo:
    """A wrap with the face of a hook's handle."""

    def __init__(self, wraps: Wraps) -> None:
        self._wraps = wraps

    def remove(self) -> None:
        """Put the plain method back."""
        self._wraps.undo()


def _first(given: Any, made: Any) -> tuple[Any, ...]:
    del made
    return tuple(given[:1])


def _keys_and_values(given: Any, made: Any) -> tuple[Any, ...]:
    del made
    return tuple(given[1:3])


def _output(given: Any, made: Any) -> tuple[Any, ...]:
    del given
    return (made[0],) if isinstance(made, tuple) and made else (made,)
