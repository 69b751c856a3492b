"""What the ranks of a model exchange in its forward pass, looked at before they do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradsentinel.integrations.megatron.collectives import watch_collectives, watch_collectives_of
from gradsentinel.integrations.megatron.compat import asked
from gradsentinel.integrations.megatron.names import ParameterNames
from gradsentinel.integrations.wraps import Wraps
from gradsentinel.testing import record_swallowed

if TYPE_CHECKING:
    from gradsentinel.integrations.megatron.gradients import BucketGradients

logger = logging.getLogger("gradsentinel")

Place = Callable[[], "tuple[int, int, int] | None"]
"""Tells micro-batch, chunk, and how many exchanges came before in this pass; None outside of one."""

Record = Callable[[str, Tensor, int, int, int], None]
"""Takes note of a value, in words, and of the place where it was about to be exchanged."""


_MULTIPLY = "_forward_impl"
"""The method of Megatron's own linear layers that multiplies, and exchanges nothing in a row-parallel one."""
_LOSS = "compute_language_model_loss"
"""The method of Megatron's language models that makes each token's loss of the logits."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Over which kinds of ranks this job spreads its layers."""

    tensor: bool
    context: bool
    expert: bool

    @classmethod
    def here(cls) -> Spread:
        """Ask Megatron."""
        kinds = ("tensor_model", "context", "expert_model")
        sizes = [asked(f"get_{kind}_parallel_world_size", 1) or 1 for kind in kinds]
        return cls(*(size > 1 for size in sizes))


class Exchange:
    """What one module hands to other ranks: its input before it adds up or gathers, or its output."""

    def __init__(
        self,
        module: nn.Module,
        what: str,
        pick: Callable[[Any, Any], tuple[Any, ...]],
        *,
        product: str = "",
        alone: bool = False,
        inside: str = "",
    ) -> None:
        self.module = module
        self.what = what
        self._pick = pick
        self.made = pick is _output
        """True if it is what the module has made, not what it is given."""
        self.product = product
        """What the module multiplies and is about to add up, in words."""
        self.alone = alone
        """True if the module's forward pass both computes it and exchanges it."""
        self.inside = inside
        """Another method of the module that does."""

    def tensors(self, given: Any, made: Any) -> Iterator[Tensor]:
        """Yield what this rank has computed of it, and nobody else has touched."""
        for value in self._pick(given, made):
            if isinstance(value, Tensor) and value.is_floating_point():
                yield value.detach()


def exchanges_in(root: nn.Module, names: ParameterNames, chunk: int) -> Iterator[Exchange]:
    """Yield the modules of a chunk whose values the ranks put together, as far as this job has such ranks.

    Row-parallel layers add up the products that each rank alone has computed, the word embedding what each
    finds in its part of the vocabulary, the loss its sums over that part; with sequence parallelism
    column-parallel layers gather their inputs; attention gathers keys and values over context-parallel
    ranks; a layer of experts sends tokens there and back.
    """
    spread = Spread.here()
    for path, module in root.named_modules():
        if not getattr(module, "is_expert", False):
            name = names.module(path, chunk) if path else "model"
            yield from _of_module(spread, path, module, name)
    if spread.tensor and callable(getattr(root, _LOSS, None)):
        yield Exchange(root, "what the loss adds up over its part of the vocabulary", _first, inside=_LOSS)


def _of_module(spread: Spread, path: str, module: nn.Module, name: str) -> Iterator[Exchange]:
    kind = type(module).__name__
    if spread.tensor and "RowParallelLinear" in kind:
        yield Exchange(module, f"what is given to {name}", _first, product=f"the product of {name}")
    elif spread.tensor and kind == "VocabParallelEmbedding":
        yield Exchange(module, f"what {name} has looked up", _first, alone=True)
    elif spread.tensor and "ColumnParallelLinear" in kind and getattr(module, "sequence_parallel", False):
        yield Exchange(module, f"what is given to {name}", _first)
    elif spread.context and path.endswith("core_attention"):
        yield Exchange(module, f"keys and values of {name}", _keys_and_values)
    elif spread.expert and kind == "MoELayer":
        yield Exchange(module, f"what is given to {name}", _first)
    elif spread.expert and path.endswith(".experts"):
        yield Exchange(module, f"what {name} has made", _output)
    if spread.tensor and path == "output_layer":
        yield Exchange(module, f"what {name} has made", _output)


def looking(what: str, record: Record, place: Place) -> Callable[..., None]:
    """Return what looks at values that are about to be exchanged: one launch each, no wait.

    An error of its own ends that, and nothing else.
    """
    given_up: list[bool] = []

    def look(values: Iterable[Tensor], *, what: str = what) -> None:
        if given_up:
            return
        try:
            found = place()
            if found is not None and not torch.compiler.is_compiling():
                for value in values:
                    record(what, value, *found)
        except Exception as error:
            given_up.append(True)
            logger.exception("%s cannot be looked at any more", what)
            record_swallowed(error)

    return look


def watch(exchange: Exchange, local: BucketGradients, place: Place) -> None:
    """Have each of a module's exchanges looked at."""
    see = looking(exchange.what, local.record_exchange, place)

    def look(given: Any, made: Any = None) -> None:
        see(exchange.tensors(given, made))

    if exchange.product:
        _watch_product(exchange, see, look, local)
    elif exchange.inside:
        wraps = watch_collectives(exchange.module, exchange.inside, lambda value: look((value,)))
        local.keep_handle(Undo(wraps))
    elif exchange.alone:
        for handle in watch_collectives_of(exchange.module, lambda value: look((value,))):
            local.keep_handle(handle)
    elif exchange.made:
        local.keep_handle(exchange.module.register_forward_hook(lambda _m, given, made: look(given, made)))
    else:
        local.keep_handle(exchange.module.register_forward_pre_hook(lambda _m, given: look(given)))


def _watch_product(
    exchange: Exchange, see: Callable[..., None], look: Callable[..., None], local: BucketGradients
) -> None:
    """Look at the product of a row-parallel layer before it is added up over the ranks, in place.

    It is bad where the layer's input is, so that is not looked at as well: one launch, as for any exchange.
    Where the layer chooses anew in each pass how it multiplies (releases up to 0.13), or has no such method
    (another library's), it is what the layer hands to a collective. One that does neither is looked at by
    its input.
    """
    seen = [False]

    def product(value: Any) -> None:
        seen[0] = True
        see(exchange.tensors((value,), None), what=exchange.product)

    def multiplying(plain: Callable[..., Any]) -> Callable[..., Any]:
        def multiply(*args: Any, **kwargs: Any) -> Any:
            made = plain(*args, **kwargs)
            product(made)
            return made

        return multiply

    def after(_module: nn.Module, given: Any, _made: Any) -> None:
        if not seen[0]:
            look(given)
        seen[0] = False

    module = exchange.module
    if callable(getattr(type(module), _MULTIPLY, None)):
        wraps = Wraps()
        wraps.wrap(module, _MULTIPLY, multiplying)
        local.keep_handle(Undo(wraps))
    else:
        for handle in watch_collectives_of(module, product):
            local.keep_handle(handle)
    local.keep_handle(module.register_forward_hook(after))


class Undo:
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
