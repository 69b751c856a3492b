"""What the tensors of a batch are: told by their names, types and shapes, and by the model that reads it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradsentinel.data.holdings import held_in
from gradsentinel.errors import ConfigurationError
from gradsentinel.measures.inspection import local, values_of
from gradsentinel.measures.norms import FLOAT8

logger = logging.getLogger("gradsentinel")

_LABELS = {"labels", "label", "targets", "target", "y", "lm_labels", "decoder_labels"}
_IDS = {"input_ids", "tokens", "token_ids", "decoder_input_ids", "src_tokens"}
_KEPT = {"attention_mask", "encoder_attention_mask", "decoder_attention_mask", "input_mask"}
"""Masks of (sample, position) that are not 0 where there is something."""
_PADDED = {
    *("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask"),
    *("padding_mask", "pad_mask"),
}
"""Masks of (sample, position) that are True, or -inf, where there is nothing."""
_SELECTS = {
    "loss_mask",
    "label_mask",
    "target_mask",
    "loss_weight",
    "loss_weights",
    "sample_weight",
    "weight",
}
"""What the loss is multiplied by."""
_MOST_FIELDS = 256
_OTHER_TABLES = ("pos", "wpe", "type", "segment")
"""Parts of names of embeddings that no token looks up."""


_is_wrapper: Callable[[Tensor], bool] = is_traceable_wrapper_subclass
_COMPARABLE = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
_UNSIGNED = tuple(getattr(torch, name) for name in ("uint16", "uint32", "uint64"))


@dataclass(frozen=True, slots=True)
class Bound:
    """The lawful values of an integer field: from `low` to below `high`."""

    low: int
    high: int
    source: str
    """Where this is known from, in words."""
    given: bool = False
    """True if the user said so; else it is read off the model, and may be about another field."""


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a batch, as far as it does not change from batch to batch."""

    path: str
    dtype: torch.dtype
    device: torch.device
    role: str
    """float, labels, ids, kept, padded, selects, or integer."""
    bound: Bound | None
    empty: bool
    sized: bool
    """True if it has a dimension."""
    large: bool
    """True for at least 2 records of at least 16 numbers together: enough for statistics."""
    numel: int
    records: int
    """Its size in the first dimension; 0 if it has none."""

    @property
    def is_float(self) -> bool:
        """True for floating-point and complex numbers."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def is_counted(self) -> bool:
        """True if the values may be labels, and all of them be left out."""
        return self.role in {"labels", "integer"} and self.dtype is not torch.bool and self.sized

    @property
    def is_given(self) -> bool:
        """True if the user said which values are lawful."""
        return self.bound is not None and self.bound.given

    @property
    def is_judged(self) -> bool:
        """True if values are compared with the bound: a look-up on a CPU or with CUDA fails by itself."""
        return self.is_given or (self.bound is not None and self.device.type not in {"cpu", "cuda"})

    @property
    def name(self) -> str:
        """The path in words."""
        return self.path or "the batch"


class Reader:
    """Tells what the fields of batches are.

    Args:
        ranges: lawful values by the path or the last name of a field.
        guessed: the model's own tables, see `tables_of`.
    """

    def __init__(self, ranges: Mapping[str, tuple[int, int]], guessed: Mapping[str, Bound]) -> None:
        self._ranges = {name: Bound(low, high, "ranges=", given=True) for name, (low, high) in ranges.items()}
        self._guessed = guessed
        self.unused = set(ranges)
        """Names in `ranges` that no batch had so far."""
        self._known: dict[object, Field] = {}

    def read(self, batch: Any) -> list[tuple[Field, Tensor]]:
        """Return the fields of a batch whose values can be looked at, with their plain values."""
        found = []
        named = (("", batch),) if type(batch) is Tensor else held_in(batch)
        for path, tensor in named:
            values = plain_values(tensor)
            if values is None:
                continue
            key = (path, values.dtype, values.device, values.shape, tensor.dim())
            if key not in self._known:
                if len(self._known) >= _MOST_FIELDS:
                    self._known.clear()
                self._known[key] = self._field(path, tensor, values)
            found.append((self._known[key], values))
        return found

    def tell_unused(self, fields: Sequence[tuple[Field, Tensor]]) -> None:
        """Say once which names in `ranges` the first batch, of these fields, has not."""
        if not self.unused:
            return
        logger.warning(
            "ranges= names %s, which the first batch does not have; its fields are %s",
            ", ".join(map(repr, sorted(self.unused))),
            ", ".join(repr(one.path) for one, _ in fields) or "none",
        )
        self.unused.clear()

    def _field(self, path: str, tensor: Tensor, values: Tensor) -> Field:
        name = path.rpartition(".")[2]
        key = next((key for key in (path, name) if key in self._ranges), None)
        role = _role(name, values)
        bound = None
        if not (values.is_floating_point() or values.is_complex() or values.dtype is torch.bool):
            bound = self._guessed.get(role) if key is None else self._ranges[key]
        if key is not None:
            self.unused.discard(key)
        whole = values.dim() == tensor.dim()
        return Field(
            path=path,
            dtype=values.dtype,
            device=values.device,
            role=role,
            bound=bound,
            empty=values.numel() == 0,
            sized=values.dim() > 0,
            large=whole and values.dim() > 0 and values.shape[0] > 1 and values.numel() >= 16,
            numel=values.numel(),
            records=values.shape[0] if values.dim() else 0,
        )


def _role(name: str, values: Tensor) -> str:
    if name in _KEPT | _PADDED and values.dim() == 2:
        return "kept" if name in _KEPT else "padded"
    if name in _SELECTS:
        return "selects"
    if values.is_floating_point() or values.is_complex():
        return "float"
    if values.dtype is torch.bool:
        return "integer"
    return "labels" if name in _LABELS else "ids" if name in _IDS else "integer"


def plain_values(tensor: Tensor) -> Tensor | None:
    """Return the values that this rank holds as a dense tensor; None where there are none to look at.

    Of a sparse or nested tensor the stored ones, as they are: adding up duplicates would wait.
    """
    if (
        type(tensor) is Tensor
        and tensor.dtype in _COMPARABLE
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested)
    ):
        return tensor.detach() if tensor.requires_grad else tensor
    if tensor.device.type == "meta" or tensor.is_quantized or torch.nn.parameter.is_lazy(tensor):
        return None
    values = local(tensor.detach())
    if values.layout is torch.sparse_coo:
        values = values._values()
    elif values.is_nested or values.layout is not torch.strided:
        values = values_of(values)
    if _is_wrapper(values):
        return None
    values = values.as_subclass(Tensor)  # an image or a box of a library: a tensor with a name
    if values.dtype in FLOAT8:
        values = values.to(torch.float32)
    elif values.dtype in _UNSIGNED:  # torch has no comparisons for these
        values = values.to(torch.int64)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values if values.dtype in _COMPARABLE else None


def tables_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Bound]:
    """Return what the model can look up, by role: tokens in its embedding, labels in its last layer.

    Only what is unambiguous: all embeddings of tokens have the same size.
    """
    sizes: dict[int, str] = {}
    last: tuple[int, str] | None = None
    for prefix, root in modules:
        for path, module in root.named_modules():
            name = ".".join(part for part in (prefix, path) if part) or type(module).__name__
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                if not any(part in name.lower() for part in _OTHER_TABLES):
                    sizes.setdefault(module.num_embeddings, name)
            elif isinstance(module, nn.Linear):
                last = module.out_features, name
    found: dict[str, Bound] = {}
    if len(sizes) == 1:
        ((size, name),) = sizes.items()
        found["ids"] = Bound(0, size, f"the {size} rows of {name}")
    if last is not None and last[0] > 1:
        found["labels"] = Bound(0, last[0], f"the {last[0]} outputs of {last[1]}")
    return found


def is_empty(batch: Any, fields: Iterable[tuple[Field, Tensor]]) -> bool:
    """Return True if there is nothing at all in a batch: no record, or tensors without an element only."""
    sized = [field.empty for field, values in fields if values.dim()]
    if sized:
        return all(sized)
    return isinstance(batch, (list, tuple, dict)) and not batch


def record_count(batch: Any) -> int | None:
    """Return the number of records, if the first dimensions of the tensors agree on one."""
    sizes = [tensor.shape[0] for _, tensor in held_in(batch) if tensor.dim()]
    most = max(set(sizes), key=sizes.count) if sizes else None
    return most if most is not None and 2 * sizes.count(most) >= len(sizes) else None


def checked_ranges(ranges: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return the ranges as a plain dict; raises ConfigurationError if one cannot be meant."""
    if not isinstance(ranges, Mapping):
        raise ConfigurationError("ranges is a mapping from field to (first, end): {'input_ids': (0, 50257)}")
    for name, pair in ranges.items():
        sound = isinstance(name, str) and isinstance(pair, (tuple, list)) and len(pair) == 2
        if not sound or not all(isinstance(number, int) for number in pair) or not pair[0] < pair[1]:
            raise ConfigurationError(
                f"ranges[{name!r}]={pair!r} must be two whole numbers, the first below the second, such as "
                "(0, 50257)"
            )
    return {name: (int(low), int(high)) for name, (low, high) in ranges.items()}
