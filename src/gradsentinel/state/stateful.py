"""Objects with state_dict and load_state_dict: all of them take their saved states, or none does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradsentinel.errors import SnapshotMismatch
from gradsentinel.state.optimizer_state import as_shard
from gradsentinel.state.tree import clone_tree, map_tensors, tensors_in


def load_stateful(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Load saved states into the objects of the same names; objects and states without partner are left out.

    Tensors come as copies on the device, and in the distribution, of those that are there.

    Raises:
        SnapshotMismatch: if one refuses its state; all have what they had before then.
    """
    done: list[tuple[Any, Any]] = []
    for name, state in saved.items():
        if name not in present:
            continue
        entry = present[name]
        before = entry.state_dict()
        done.append((entry, clone_tree(before, "cpu")))
        try:
            entry.load_state_dict(_like(state, before))
        except Exception as error:
            for other, old in reversed(done):
                other.load_state_dict(_like(old, other.state_dict()))
            raise SnapshotMismatch(
                f"{name} ({type(entry).__name__}) does not take its saved state: {error}"
            ) from error


def _like(saved: Any, present: Any) -> Any:
    """Return a deep copy whose tensors are where those of the present state are."""
    copied = clone_tree(saved, keep=lambda tensor: tensor)
    there = dict(tensors_in(present))
    models = {id(tensor): there.get(path) for path, tensor in tensors_in(copied)}
    return map_tensors(lambda tensor: _placed(tensor, models.get(id(tensor))), copied)


def _placed(values: Tensor, model: Tensor | None) -> Tensor:
    return as_shard(values.to(values.device if model is None else model.device, copy=True), model)
