"""Where each of many numbers is expected, learnt on the device, all at once and without a wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradsentinel.measures.bounds import bounds

_MARK_EVERY = 16
"""What was learnt is remembered at every so many steps, to go back to after a rollback."""


class _State(NamedTuple):
    """What is known of each number; replaced as a whole, never written to, so that it can be kept."""

    mean: Tensor
    """Of the logarithm."""
    variance: Tensor
    number: Tensor
    """How many values it was learnt from."""
    streak: Tensor
    """How many values in a row were outside."""


@dataclass(frozen=True, slots=True)
class Judged:
    """How the numbers of one step compare with what was expected; on the device."""

    score: Tensor
    """The largest of all, 0-dim: 1 at the bound."""
    scores: Tensor
    """Of each number; 0 of one that is not finite, which is others' business."""
    mean: Tensor
    """The logarithm that was expected."""


class Levels:
    """Keeps a running mean and variance of the logarithm of each number, from healthy values only.

    A number that is outside its bound, on either side, is not learnt, and neither are NaN, Inf and 0; after
    `patience` in a row the new level is accepted. Only values above the bound count as an alarm. Memory:
    four numbers for each number watched, and as much for each of the states kept for rollbacks
    (`bounds().marks`).

    Args:
        limit: the bound, in standard deviations of the logarithm.
        floor: the bound is never less than this, in logarithms.
        window: the average goes over about so many values.
        warmup: no alarm before so many values.
        patience: so many values in a row outside are a new level.
    """

    def __init__(
        self, *, limit: float, floor: float, window: int = 128, warmup: int = 20, patience: int = 8
    ) -> None:
        self._limit = limit
        self._floor = floor
        self._window = window
        self._warmup = warmup
        self._patience = patience
        self._state: _State | None = None
        self._marks: deque[tuple[int, _State]] = deque(maxlen=bounds().marks)

    @torch.no_grad()
    def judge(self, step: int, values: Tensor) -> Judged:
        """Compare 1-dim values of 0 or more with what was expected, and learn those that were; no wait."""
        logs = values.to(torch.float32).log()
        state = self._state
        if state is None or state.mean.shape != logs.shape or state.mean.device != logs.device:
            state = self._begin(logs)
        if step % _MARK_EVERY == 0:
            self._marks.append((step, state))
        distance = logs - state.mean
        scores = distance / (state.variance.sqrt() * self._limit).clamp_(min=self._floor)
        warm = state.number >= self._warmup
        finite = logs.abs() < float("inf")
        inside = torch.where(warm, scores.abs() <= 1, finite)
        streak = torch.where(inside, 0, state.streak + 1)
        settled = finite.logical_and(streak >= self._patience)
        learnt = inside.logical_or(settled)
        count = torch.where(settled, 0, state.number) + learnt
        share = learnt / count.clamp(1, self._window)
        moved = torch.where(learnt, distance, 0.0)
        spread = torch.where(count <= 1, 0.0, share)
        self._state = _State(
            mean=state.mean + share * moved,
            variance=state.variance + spread * (moved.square() * (1 - share) - state.variance),
            number=count,
            streak=torch.where(settled, 0, streak),
        )
        told = torch.where(warm.logical_and(finite), scores, 0.0)
        return Judged(told.amax() if told.numel() else told.new_zeros(()), told, state.mean)

    def forget_from(self, step: int) -> None:
        """Go back to what was known before this step, as far as it is remembered."""
        while self._marks and self._marks[-1][0] > step:
            self._marks.pop()
        self._state = self._marks[-1][1] if self._marks else None

    def state_dict(self) -> dict[str, Tensor]:
        """Return what is known, empty if nothing is; copies on the CPU."""
        if self._state is None:
            return {}
        return {name: value.cpu().clone() for name, value in self._state._asdict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._marks.clear()
        self._state = _State(**state) if state else None

    def _begin(self, logs: Tensor) -> _State:
        """Start anew, or move what was loaded to where the values are."""
        known = self._state
        if known is not None and known.mean.shape == logs.shape:
            return _State(*(part.to(logs.device) for part in known))
        self._marks.clear()
        nothing = torch.zeros_like(logs)
        none = torch.zeros(logs.shape, dtype=torch.int32, device=logs.device)
        return _State(nothing, nothing, none, none)
