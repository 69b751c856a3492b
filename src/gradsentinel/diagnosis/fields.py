"""Which fields of the batch the operand was computed from that made an operator fail."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsentinel.diagnosis.findings import Findings
from gradsentinel.diagnosis.operands import tensors_of
from gradsentinel.diagnosis.swap import tensors_by_path
from gradsentinel.incident import fold

_TARGETS_FIRST = 1
"""Losses take what they judge first; targets, lengths and weights follow."""


def fields_behind(found: Findings) -> list[str]:
    """Return the fields that the guilty operand was computed from, by path; the likeliest alone if one is.

    Empty if it was computed from no field, or from parameters too and there is no telling.
    """
    names = found.trace.fields_in(_guilty_bits(found))
    return _blank(found, names) or names if len(names) > 1 else names


def in_words(fields: Sequence[str]) -> str:
    """Say where to look; empty if the batch is one tensor without a name."""
    named = [field for field in fields if field]
    return f": look at {fold(named)}" if named else ""


def _guilty_bits(found: Findings) -> int:
    origin, tensors = found.origin, tensors_of(found.origin)
    given = list(zip(tensors, origin.argument_origins, strict=False))
    empty = [bits for tensor, bits in given if tensor.numel() == 0]
    if empty:
        return _together(empty)
    if found.choice is not None:
        chosen = zip(tensors_of(found.choice), found.choice.argument_origins, strict=False)
        return _together(bits for tensor, bits in chosen if not tensor.is_floating_point())
    if found.name.startswith("nll_loss"):
        return _together(bits for _, bits in given[_TARGETS_FIRST : _TARGETS_FIRST + 1])
    if "ctc_loss" in found.name or found.name.startswith("segment_reduce"):
        return _together(bits for tensor, bits in given if not tensor.is_floating_point())
    return found.singular_origin()


def _together(origins: object) -> int:
    bits = 0
    for origin in origins:  # type: ignore[attr-defined]
        bits |= origin
    return bits


def _blank(found: Findings, names: Sequence[str]) -> list[str]:
    """Keep the fields that hold nothing but one value: a mask that selects nothing, labels all ignored."""
    tensors = tensors_by_path(found.microbatch.batch)
    return [name for name in names if name in tensors and _is_constant(tensors[name])]


@torch.no_grad()
def _is_constant(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.numel() < 2 or tensor.is_complex():
        return False
    flat = tensor.flatten()
    return bool((flat == flat[0]).all())
