"""Changes of tensors, element by element, that keep autograd right and lose no write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gradsentinel.devices import device_of
from gradsentinel.faults.dice import Dice
from gradsentinel.faults.fault import Index
from gradsentinel.faults.injection import Hit, Number

Change = Callable[[Tensor], Hit | None]
"""Changes a plain strided tensor in place and says what it did; None: there was nothing to change."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Damaged(torch.autograd.Function):
    """Values with a fault in them; the gradient passes as if there were none.

    That is what a fault in memory does: the operators before and after it know nothing of it. Nothing is
    saved for backward, so activation checkpointing finds the same saved tensors with the fault and without.
    """

    @staticmethod
    def forward(tensor: Tensor, strike: Callable[[Tensor], object]) -> Tensor:
        """Return a damaged copy."""
        return damaged_copy(tensor, strike)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        """Pass the gradient on."""
        return grads[0], None


class DamagedGradient(torch.autograd.Function):
    """The same values; the gradient that passes back gets a fault."""

    @staticmethod
    def forward(tensor: Tensor, strike: Callable[[Tensor], object]) -> Tensor:  # noqa: ARG004
        """Return a copy: autograd forbids changing a view of an input in place, and a module may do that."""
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        """Keep the change for backward."""
        ctx.strike = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Damage the gradient and pass it on."""
        return damage(grads[0], ctx.strike), None


def damage(tensor: Tensor, strike: Callable[[Tensor], object]) -> Tensor:
    """Return the tensor with a fault in it; the original and the flow of gradients stay as they are."""
    damaged: Tensor = Damaged.apply(tensor, strike)  # type: ignore[no-untyped-call]
    return damaged


def damage_gradient(tensor: Tensor, strike: Callable[[Tensor], object]) -> Tensor:
    """Return the same values; the gradient that passes back through them gets a fault."""
    same: Tensor = DamagedGradient.apply(tensor, strike)  # type: ignore[no-untyped-call]
    return same


def damaged_copy(tensor: Tensor, strike: Callable[[Tensor], object]) -> Tensor:
    """Return a copy with a fault in it, outside autograd."""
    copy = tensor.detach().resolve_conj().resolve_neg().clone()
    strike(storage(copy).data)  # no version counts what is written so, as none counts what a device does
    return copy


def damage_where_it_is(tensor: Tensor, strike: Callable[[Tensor], object]) -> None:
    """Write a fault into the memory of a tensor, as a device does: no node and no version tells of it."""
    strike(tensor.data)


def is_its_own(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Return whether the memory is that of one result of one operator, and so of nothing that stays.

    False for what may be a weight, a buffer, an input or a part of one: what is written there would not be
    gone with the step, or would be damage in more than one place.
    """
    made = tensor._base if tensor._is_view() else tensor
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_inference()
    if not plain or made is None or made.grad_fn is None or tensor.is_conj() or tensor.is_neg():
        return False
    memory = tensor.untyped_storage().data_ptr()
    spread = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not spread and all(_is_elsewhere(other, memory) for other in others)


def _is_elsewhere(tensor: Tensor, memory: int) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.untyped_storage().data_ptr() != memory


def storage(tensor: Tensor) -> Tensor:
    """Return the plain tensor with the elements: the values of a sparse, the local part of a sharded one."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.layout is torch.sparse_coo:
        return local._values()
    return local if local.layout is torch.strided else local.values()


def set_value(value: float, index: Index, dice: Dice) -> Change:
    """Return a change that writes a number into one element."""

    def change(tensor: Tensor) -> Hit | None:
        place = locate(tensor.shape, index, dice)
        if place is None:
            return None
        before = tensor[place].item()
        tensor[place] = value
        return Hit(place, before, tensor[place].item())

    return change


def flip_bit(bit: int | None, index: Index, dice: Dice) -> Change:
    """Return a change that flips one bit of one element."""

    def change(tensor: Tensor) -> Hit | None:
        place = locate(tensor.shape, index, dice)
        if place is None:
            return None
        number, word, width = bit_of(tensor, place, bit, dice)
        before = tensor[place].item()
        word.bitwise_xor_(_mask(number % width, width))
        return Hit(place, before, tensor[place].item(), bit=number)

    return change


def bit_of(tensor: Tensor, place: tuple[int, ...], bit: int | None, dice: Dice) -> tuple[int, Tensor, int]:
    """Return the number of the bit, an integer sharing memory with the word it is in, and its width."""
    width = bits_of(tensor.dtype)
    if device_of(tensor.device).in_plain_format(tensor) is not tensor:
        raise ValueError("the device keeps this tensor in a format of its own: cast it to ND before")
    if bit is None:
        bit = dice.below(width, "bit")
    if bit >= width:
        raise ValueError(f"bit={bit}: an element of dtype {tensor.dtype} has bits 0 to {width - 1}")
    element = tensor[place]
    if element.is_complex():  # the real part is the lower half
        width //= 2
        element = torch.view_as_real(element)[bit // width]
    return bit, element.view(_BITS[element.element_size()]), width


def bits_of(dtype: torch.dtype) -> int:
    """Return how many bits an element has."""
    return 8 * dtype.itemsize


def bit_is_set(word: Tensor, bit: int, width: int) -> bool:
    """Return a bit of a word."""
    return bool(int(word.item()) & _mask(bit % width, width))


def locate(shape: torch.Size, index: Index, dice: Dice, purpose: str = "index") -> tuple[int, ...] | None:
    """Return the place of an element; unset, the seed chooses it; None if there is no element at all.

    Raises:
        IndexError: the tensor is smaller than that.
    """
    numel = math.prod(shape)
    if numel == 0:
        return None
    if isinstance(index, tuple):
        if len(index) != len(shape) or any(i >= size for i, size in zip(index, shape, strict=True)):
            raise IndexError(f"index={index} is outside of a tensor of shape {tuple(shape)}")
        return index
    flat = dice.below(numel, purpose) if index is None else index
    if flat >= numel:
        raise IndexError(
            f"index={index} is outside of a tensor of shape {tuple(shape)} with {numel} elements"
        )
    place = []
    for size in reversed(shape):
        flat, i = divmod(flat, size)
        place.append(i)
    return tuple(reversed(place))


def first_change(before: Tensor, after: Tensor) -> Hit | None:
    """Return where two tensors differ, NaN being equal to NaN."""
    changed = (before != after) & ~((before != before) & (after != after))  # noqa: PLR0124
    count = int(changed.sum())
    if count == 0:
        return None
    flat = int(changed.reshape(-1).to(torch.uint8).argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), before.shape))
    return Hit(place, _item(before, place), _item(after, place), elements=count)


def _item(tensor: Tensor, place: tuple[int, ...]) -> Number:
    number: Number = tensor[place].item()
    return number


def _mask(bit: int, width: int) -> int:
    return -(1 << bit) if bit == width - 1 else 1 << bit  # the highest bit of a signed integer is its sign
