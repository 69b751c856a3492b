"""What the ranks of a model exchange in its backward pass, looked at before they do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gradsentinel.integrations.megatron.exchanges import Place, Spread, looking
from gradsentinel.integrations.megatron.names import ParameterNames
from gradsentinel.testing import record_swallowed

if TYPE_CHECKING:
    from gradsentinel.integrations.megatron.gradients import BucketGradients

logger = logging.getLogger("gradsentinel")

Look = Callable[[Iterable[Tensor]], None]

_LINEAR = "LinearWith"
"""So begin the names of Megatron's own autograd functions in which a column-parallel layer multiplies."""
_NEAR = 3
"""So many steps after it a layer's output may come, which is gathered if the layer is asked to."""
_ARRIVED = "input_tensor"
"""Where Megatron's blocks of layers keep what the stage before has sent."""
_PRODUCTS = frozenset({Tensor.matmul, Tensor.__matmul__, Tensor.mm, torch.matmul, torch.mm, linear})
_RESHAPES = frozenset(
    {Tensor.contiguous, Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten}
)


def watch_returns(
    root: nn.Module, names: ParameterNames, chunk: int, local: BucketGradients, place: Place
) -> None:
    """Have what the ranks put together in a backward pass looked at, as far as this job has such ranks.

    Column-parallel layers add up the gradients of their inputs; with sequence parallelism row-parallel ones
    and the embedding gather those of their outputs; attention brings gradients to the keys and values of
    context-parallel ranks; a layer of experts sends the gradients of tokens there and back.
    """
    spread = Spread.here()
    for path, module in root.named_modules():
        kind = type(module).__name__
        if getattr(module, "is_expert", False):
            continue
        name = names.module(path, chunk) if path else "model"
        given = looking(f"the gradient of the input of {name}", local.record_return, place)
        made = looking(f"the gradient of the output of {name}", local.record_return, place)
        if spread.tensor and "ColumnParallelLinear" in kind:
            local.keep_handle(module.register_forward_hook(partial(_after_column, look=given)))
        elif _hands_back_output(spread, kind, path, module):
            local.keep_handle(module.register_forward_hook(partial(_after, look=made)))
        elif spread.expert and path.endswith(".experts"):
            local.keep_handle(module.register_forward_pre_hook(partial(_before, look=given)))


def watch_stage(root: nn.Module, where: str, local: BucketGradients, place: Place) -> None:
    """Have the gradient looked at that a pipeline stage sends to the one before it.

    The schedule leaves what has arrived with the module that goes on with it.
    """
    look = looking(f"the gradient that {where} hands back", local.record_return, place)
    for module in root.modules():
        if _ARRIVED in vars(module):
            local.keep_handle(module.register_forward_pre_hook(partial(_before_stage, look=look)))


def _hands_back_output(spread: Spread, kind: str, path: str, module: nn.Module) -> bool:
    """True if the gradient of a module's output is put together with that of other ranks inside of it."""
    if spread.tensor and ("RowParallelLinear" in kind or kind == "LanguageModelEmbedding"):
        return bool(getattr(getattr(module, "config", None), "sequence_parallel", False))
    return (spread.context and path.endswith("core_attention")) or (spread.expert and kind == "MoELayer")


def _after(_module: nn.Module, _given: Any, made: Any, *, look: Look) -> None:
    _look_back(made[0] if isinstance(made, tuple) and made else made, look)


def _before(_module: nn.Module, given: Any, *, look: Look) -> None:
    _look_back(given[0] if given else None, look)


def _before_stage(module: nn.Module, _given: Any, *, look: Look) -> None:
    _look_back(getattr(module, _ARRIVED, None), look)


def _look_back(tensor: Any, look: Look) -> None:
    """Have a tensor's gradient looked at, once it is all there."""
    if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.is_floating_point():

        def seen(gradient: Tensor) -> None:
            look((gradient.detach(),))

        tensor.register_hook(seen)  # type: ignore[no-untyped-call]


def _after_column(_module: nn.Module, _given: Any, made: Any, *, look: Look) -> None:
    output = made[0] if isinstance(made, tuple) and made else made
    for node in _back_from(getattr(output, "grad_fn", None)):
        if type(node).__name__.startswith(_LINEAR):
            node.register_prehook(partial(_told, look=look))
            node.register_hook(_plain)
            return


def _back_from(node: Any) -> Iterator[Any]:
    for _ in range(_NEAR):
        if node is None:
            return
        yield node
        following = node.next_functions
        node = following[0][0] if following else None


def _told(gradients: tuple[Any, ...], *, look: Look) -> tuple[Any, ...] | None:
    """Have the function multiply with a gradient that tells what comes of it."""
    if type(gradients[0]) is not Tensor or torch.compiler.is_compiling():
        return None
    try:
        return (_telling(gradients[0], look), *gradients[1:])
    except Exception as error:  # raised here it would end the backward pass: the look is given up instead
        logger.exception("the gradient of a layer's input cannot be looked at")
        record_swallowed(error)
        return None


def _plain(made: tuple[Any, ...], _given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Let nobody else have the gradient that tells, where the function hands on what it was given."""
    if not any(isinstance(one, TellingGradient) for one in made):
        return None
    return tuple(one.as_subclass(Tensor) if isinstance(one, TellingGradient) else one for one in made)


def _telling(gradient: Tensor, look: Look) -> TellingGradient:
    told = gradient.as_subclass(TellingGradient)
    told.look = look
    return told


class TellingGradient(Tensor):
    """The gradient of a layer's output; what it is multiplied to is looked at, once.

    Megatron multiplies it with the weight and adds the product up over the ranks within one autograd
    function. What is computed of it is a plain tensor, the same to the last bit.
    """

    look: Look | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function on what this is, and look at a product."""
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
            told = args[0] if args else None
            if not isinstance(told, cls) or told.look is None or type(made) is not Tensor:
                return made
            if func in _PRODUCTS:
                told.look((made.detach(),))
                told.look = None
            elif func in _RESHAPES:
                made = _telling(made, told.look)
        return made
