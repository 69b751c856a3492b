"""Where each of many numbers is expected, learnt on the device, all at once and without a wait."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradsentinel.measures.bounds import bounds
from gradsentinel.measures.windows import ABSENT, Look, locate, newest

_log = logging.getLogger(__name__)

_MARK_EVERY = 16
"""What was learnt is remembered at every so many steps, to go back to after a rollback."""
_REFRESH = 16
"""What is expected is computed anew after so many steps."""
_SOON = 128
"""In so many first steps it is computed in each."""
_USABLE = 87.0
"""The logarithm of what float32 holds in full is between minus and plus this."""
_FEW = 8.0
"""The deviation of n values is known to about 1 + 8/n: fewer values, a wider band."""
_YOUTH, _GROWN_UP = math.log(2.0), 256
"""The floor begins higher by this; half of it is left after so many values. Young runs take leaps."""
_LAST, _CLIMB = 5, math.log(1.5)
"""What is near the largest of so many last values climbs, and may go farther out by this."""
_GROWTH = math.log(1.5)
"""Values that are still so far above the mean of their streak grow, and are no new level."""
_BOUND = 4
"""After so many times the patience any level is accepted."""
_BACK = 3
"""So many values in a row at the level before: the new one was only a long burst."""
_OFTEN = 0.2
"""Values above the bound are part of the run if they are this share of a window: they come and go."""
_EASE, _EASIER, _HARDER = 4.0, 2.0, 0.9
"""The bound is widened then, at most so many times, step by step, and gets back slowly."""


class _State(NamedTuple):
    """What is known of each number; replaced as a whole, never written to, so that it can be kept."""

    number: Tensor
    """How many values it had that were learnt; they are the last ones of its ring."""
    start: Tensor
    """How many of them belong to earlier levels."""
    center: Tensor
    """The logarithm that is expected."""
    scale: Tensor
    """1 over the distance of the bound from it; 0 during the warm-up."""
    streak: Tensor
    """How many values in a row were outside; they wait in the ring behind those that were learnt."""
    total: Tensor
    """The sum of their distances from the centre."""
    former: Tensor
    """The centre of the level before, as long as the present one is young."""
    above: Tensor
    """How many values were above the bound since it was computed."""
    often: Tensor
    """Which share of the values that is, lately."""
    ease: Tensor
    """So many times the usual bound."""
    calls: int
    """How many steps were seen."""


_TENSORS = _State._fields[:-1]
_INTEGERS = frozenset({"number", "start", "streak", "above"})


class _Fixed(NamedTuple):
    """What never changes, on the device: asking for it in each step would be a launch."""

    none: Tensor
    nothing: Tensor
    settles: Tensor
    lasts: Tensor
    returns: Tensor
    look: Look


class _Last(NamedTuple):
    """The step that was judged last, as long as it may still be dropped."""

    step: int
    before: _State
    inside: Tensor


@dataclass(frozen=True, slots=True)
class Judged:
    """How the numbers of one step compare with what was expected; on the device."""

    score: Tensor
    """The largest of all, 0-dim: 1 at the bound."""
    scores: Tensor
    """Of each number; 0 of one that is not finite, which is others' business."""
    center: Tensor
    """The logarithm that was expected."""


class Levels:
    """Keeps the newest healthy logarithms of each number, and where the next is expected by their median.

    The rule is that of `bands.Robust`. A number that is outside its bound, on either side, does not enter,
    and neither do NaN, Inf and 0. A new level is accepted when `patience` values in a row are above the bound
    and do not grow any more, and when four times as many are outside whatever they do; three in a row at the
    level before end a long burst. If values above come and go, a fifth of them, the bound is widened until
    they are inside and are learnt. Only values above the bound count as an alarm. What is expected is
    computed anew in each of the first 128 steps, then in every 16th. Memory: for each number `2 * window +
    4 * patience` numbers, and ten for each of the states kept for rollbacks (`bounds().marks`).

    Args:
        limit: the bound, in standard deviations of the logarithm.
        floor: the bound is never less than this, in logarithms; it begins higher, at twice the factor.
        window: so many healthy values are looked at.
        warmup: no alarm before so many values.
        patience: so many values in a row above may be a new level.
    """

    def __init__(
        self, *, limit: float, floor: float, window: int = 128, warmup: int = 20, patience: int = 8
    ) -> None:
        self._limit = limit
        self._floor = floor
        self._window = window
        self._warmup = warmup
        self._patience = patience
        self._slots = 2 * window + _BOUND * patience
        self._state: _State | None = None
        self._ring = torch.zeros(0, self._slots)
        """The logarithms of each number, the oldest overwritten; the one part that is written to."""
        self._marks: deque[tuple[int, _State]] = deque(maxlen=bounds().marks)
        self._last: _Last | None = None
        self._fixed: _Fixed | None = None

    @torch.no_grad()
    def judge(self, step: int, values: Tensor, overflow: Tensor | None = None) -> Judged:
        """Compare 1-dim values of 0 or more with what was expected, and learn those that were; no wait.

        Of a step with an `overflow` above 0 (0-dim) nothing is told and nothing learnt.
        """
        if not values.numel():
            return Judged(values.new_zeros((), dtype=torch.float32), values, values)
        logs = values.to(torch.float32).log()
        state, fixed = self._state, self._fixed
        if (
            state is None
            or fixed is None
            or state.center.shape != logs.shape
            or state.center.device != logs.device
        ):
            state, fixed = self._begin(logs)
        if step % _MARK_EVERY == 0:
            self._marks.append((step, state))
        if state.calls < _SOON or state.calls % _REFRESH == 0:
            state = self._refresh(state, fixed.look)
        usable = logs.abs() < _USABLE
        if overflow is not None:
            usable = usable.logical_and(overflow.to(logs.device).reshape(()) <= 0)
        logs = torch.where(usable, logs, state.center)  # what cannot be used is at no distance
        distance = logs - state.center
        scores = distance * state.scale
        above = scores > 1
        outside = scores.abs() > 1
        inside = usable.logical_xor(outside)
        # Behind what was learnt, or behind the streak: part of the ring only once the number counts it.
        place = (state.number + state.streak * outside).remainder(self._slots)
        self._ring.scatter_(1, place.unsqueeze(1), logs.unsqueeze(1))
        streak, total = state.streak + outside, state.total + distance
        steady = ((distance - _GROWTH) * streak <= total).logical_and(above)
        back = (logs - state.former).abs() * state.scale < 1
        needed = torch.where(back, fixed.returns, torch.where(steady, fixed.settles, fixed.lasts))
        settled = (streak >= needed).logical_and(outside)
        ended = inside.logical_or(settled)
        self._last = _Last(step, state, inside)
        self._state = state._replace(
            number=state.number + torch.where(settled, streak, inside),
            start=torch.where(settled, state.number, state.start),
            center=torch.where(settled, state.center + total / streak.clamp(min=1), state.center),
            streak=torch.where(ended, fixed.none, streak),
            total=torch.where(ended, fixed.nothing, total),
            former=torch.where(settled, state.center, state.former),
            above=state.above + above,
            calls=state.calls + 1,
        )
        return Judged(scores.amax(), scores, state.center)

    @torch.no_grad()
    def withdraw(self, step: int) -> None:
        """Let what was learnt from the step that was judged last leave again: it was dropped.

        What was outside still counts towards a new level.
        """
        last, state = self._last, self._state
        if last is None or state is None or last.step != step:
            return
        self._last = None
        self._state = state._replace(number=torch.where(last.inside, last.before.number, state.number))

    @torch.no_grad()
    def forget_from(self, step: int) -> None:
        """Go back to what was known before this step, as far as it is remembered.

        Values that had left the window are in it again, unless they were overwritten since.
        """
        now, self._last = self._state, None
        while self._marks and self._marks[-1][0] > step:
            self._marks.pop()
        if now is None or not self._marks:
            self._state = None
            return
        mark = self._marks[-1][1]
        written = now.number + _BOUND * self._patience  # at most: the streak's, too
        kept = torch.minimum((written - self._slots).clamp(min=0), mark.number)
        self._state = mark._replace(
            start=torch.maximum(mark.start, kept),
            streak=torch.zeros_like(mark.streak),
            total=torch.zeros_like(mark.total),
        )

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """Return what is known, empty if nothing is; copies on the CPU. Waits for the device."""
        if self._state is None:
            return {}
        found = {name: torch.as_tensor(part).cpu().clone() for name, part in self._state._asdict().items()}
        ages, end = torch.arange(self._slots - 1, -1, -1), found["number"] + found["streak"]
        # The oldest slots may hold what waited once and was not learnt.
        sound = found["number"] - self._slots + _BOUND * self._patience
        found["start"] = torch.maximum(found["start"], sound)
        known = ages < (end - found["start"]).unsqueeze(1)
        return {**found, "values": torch.where(known, newest(self._ring.cpu(), end, ages), 0.0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, also of another window; begin anew with what is none."""
        self._marks.clear()
        self._state = self._last = None
        if not state:
            return
        why = _unfit(state)
        if why:
            _log.warning("what was learnt of the groups' norms is not taken over and learnt anew: %s", why)
            return
        parts = {
            name: state[name].to("cpu", torch.int64 if name in _INTEGERS else torch.float32)
            for name in _TENSORS
        }
        values = state["values"].to("cpu", torch.float32)[:, -self._slots :]
        end = parts["number"] + parts["streak"]
        ages = torch.arange(values.shape[1] - 1, -1, -1)
        slots = (end.unsqueeze(1) - 1 - ages).remainder(self._slots)
        self._ring = torch.zeros(len(values), self._slots).scatter_(1, slots, values)
        oldest = torch.minimum((end - values.shape[1]).clamp(min=0), parts["number"])
        parts["start"] = torch.maximum(parts["start"], oldest)
        self._state = _State(**parts, calls=int(state["calls"]))

    def _begin(self, logs: Tensor) -> tuple[_State, _Fixed]:
        """Start anew, or move what was loaded to where the values are."""
        device, known = logs.device, self._state
        self._last = None
        self._marks.clear()
        self._fixed = fixed = _Fixed(
            none=torch.zeros((), dtype=torch.int64, device=device),
            nothing=torch.zeros((), device=device),
            settles=torch.full((), self._patience, device=device),
            lasts=torch.full((), _BOUND * self._patience, device=device),
            returns=torch.full((), min(_BACK, self._patience), device=device),
            look=Look(self._window, device),
        )
        if known is not None and known.center.shape == logs.shape:
            self._ring = self._ring.to(device)
            return known._replace(**{name: getattr(known, name).to(device) for name in _TENSORS}), fixed
        self._ring = torch.zeros(len(logs), self._slots, device=device)
        nothing = torch.zeros_like(logs)
        none = torch.zeros(logs.shape, dtype=torch.int64, device=device)
        state = _State(
            number=none,
            start=none,
            center=nothing,
            scale=nothing,
            streak=none,
            total=nothing,
            former=nothing + ABSENT,
            above=none,
            often=nothing,
            ease=nothing + 1,
            calls=0,
        )
        return state, fixed

    def _refresh(self, state: _State, look: Look) -> _State:
        """Compute what is expected from the values in the ring."""
        steps = 1 if state.calls <= _SOON else _REFRESH
        count = (state.number - state.start).clamp(max=self._window)
        values = newest(self._ring, state.number, look.ages)
        found = locate(values, count, look)
        came = (state.above - state.streak).clamp(min=0)  # one long streak is another matter
        often = torch.lerp(state.often, came / steps, min(1.0, steps / self._window))
        eased = torch.where(often > _OFTEN, state.ease * _EASIER, state.ease * _HARDER).clamp(1.0, _EASE)
        floor = self._floor + _YOUTH / (1 + state.number / _GROWN_UP)
        usual = torch.maximum(self._limit * found.spread * (1 + _FEW / count.clamp(min=1)), floor)
        sudden = values[:, -_LAST:].amax(1) - found.center + self._floor
        width = torch.maximum(usual, torch.minimum(usual + _CLIMB, sudden)) * eased
        return state._replace(
            center=torch.where(count >= min(self._warmup, self._patience), found.center, state.center),
            scale=torch.where(count >= self._warmup, width.reciprocal(), state.scale),
            former=torch.where(count >= self._window, look.absent, state.former),
            above=torch.zeros_like(state.above),
            often=often,
            ease=eased,
        )


def _unfit(state: Mapping[str, Any]) -> str:
    """Say why a state is none of ours; empty if it is."""
    names = (*_State._fields, "values")
    missing = [name for name in names if not isinstance(state.get(name), Tensor)]
    if missing:
        return f"it lacks {', '.join(missing)}, as states of earlier versions do"
    shapes = {name: state[name].shape for name in names}
    size, rows = shapes.pop("center"), shapes.pop("values")
    if shapes.pop("calls") or len(rows) != 2 or set(shapes.values()) | {rows[:1]} != {size}:
        return "its parts do not belong together"
    if not all(bool(state[name].isfinite().all()) for name in names):
        return "it holds numbers that are not finite"
    return ""
