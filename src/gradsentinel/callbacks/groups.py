"""The gradient norms of single parameters or layers against their own past, on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsentinel import events
from gradsentinel.callbacks.outliers import evidence_of_groups
from gradsentinel.decision import Action, Kind
from gradsentinel.evidence import Evidence, Finding
from gradsentinel.gradients import GradientView
from gradsentinel.measures.levels import Judged, Levels

GROUPINGS = ("parameter", "layer")
_FLOOR = 5.0
"""Less than so many times its usual norm is no spike of a group, however steady it is."""
_MOST_SETS = 8
"""So many sets of parameters that get gradients together are told apart."""


class GroupNorms:
    """Watches a norm for each parameter or layer; parameters that get no gradient are no part of a step."""

    def __init__(self, *, by: str, limit: float, window: int, warmup: int, patience: int) -> None:
        self._by = by
        self._make = partial(
            Levels,
            limit=limit,
            floor=math.log(_FLOOR),
            window=window,
            warmup=warmup,
            patience=patience,
        )
        self._sets: dict[tuple[str, ...], _Set] = {}

    def judge(self, event: events.BeforeClip, action: Action) -> Finding:
        """Compare the norms with what is expected, and learn from those that are; no wait."""
        view = event.gradients
        found = self._set_of(view.names)
        norms = found.norms(view.norms)
        judged = found.levels.judge(event.step, norms, event.overflow)
        return Finding(
            kind=Kind.SPIKE,
            value=judged.score,
            limit=1.0,
            action=action,
            confirm=partial(_confirm, found, judged, norms, view, action),
        )

    def withdraw(self, step: int) -> None:
        """Let what a step that was dropped has taught leave again, if no other was judged since."""
        for one in self._sets.values():
            one.levels.withdraw(step)

    def forget_from(self, step: int) -> None:
        """Forget the steps that were undone."""
        for one in self._sets.values():
            one.levels.forget_from(step)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt."""
        return {
            "sets": [
                {"names": list(names), "levels": one.levels.state_dict()} for names, one in self._sets.items()
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what was learnt."""
        self._sets.clear()
        for entry in state["sets"]:
            self._set_of(tuple(entry["names"])).levels.load_state_dict(entry["levels"])

    def _set_of(self, names: tuple[str, ...]) -> _Set:
        found = self._sets.get(names)
        if found is None:
            if len(self._sets) >= _MOST_SETS:
                del self._sets[next(iter(self._sets))]
            found = self._sets[names] = _Set(names, self._by, self._make())
        return found


class _Set:
    """Parameters that get gradients together."""

    def __init__(self, names: tuple[str, ...], by: str, levels: Levels) -> None:
        self.levels = levels
        self.members = {name: name if by == "parameter" else layer_of(name) for name in names}
        self.labels = list(dict.fromkeys(self.members.values()))
        places = {label: place for place, label in enumerate(self.labels)}
        self._index = [places[self.members[name]] for name in names]
        self._placed: Tensor | None = None

    def norms(self, norms: Tensor) -> Tensor:
        """Return the norm of each group, 1-dim."""
        norms = norms.to(torch.float32)
        if len(self.labels) == len(self.members):
            return norms
        if self._placed is None or self._placed.device != norms.device:
            self._placed = torch.tensor(self._index, device=norms.device)
        squares = torch.zeros(len(self.labels), device=norms.device)
        return squares.index_add_(0, self._placed, norms.square()).sqrt_()


def layer_of(name: str) -> str:
    """Return the module that a parameter belongs to."""
    return name.rpartition(".")[0] or name


def _confirm(
    found: _Set, judged: Judged, norms: Tensor, view: GradientView, action: Action
) -> Evidence | None:
    """Name the groups; what is not finite is others' business."""
    usual, scores = judged.center.exp().tolist(), judged.scores.tolist()
    rows = zip(found.labels, norms.tolist(), usual, scores, strict=True)
    outside = {
        label: (norm, center, score)
        for label, norm, center, score in rows
        if score > 1 and math.isfinite(norm)
    }
    if not outside:
        return None
    return evidence_of_groups(outside, action=action, view=view, members=found.members)
