"""Parameters that have grown between two looks at the state as no training makes them grow."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import takewhile

import torch
from torch import Tensor

from gradsentinel.decision import Action, Kind
from gradsentinel.evidence import Diagnosis, Evidence, Finding, TensorEvidence
from gradsentinel.gradients import GradientView
from gradsentinel.incident import fold
from gradsentinel.measures.inspection import inspect_tensor

GROWN = 1e10
"""So many times its norm at the last look, and 1, is what a flipped exponent bit makes of a parameter."""
_MOST = torch.finfo(torch.float32).max


class Growth:
    """Compares the norms that a look at the state makes anyway with those of the look before.

    Three launches on one number per parameter, and no wait.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[list[str], Tensor]] = {}
        """Of each part of the state, as of its last look: names, and norms of at least 1."""

    def findings(
        self,
        state: GradientView,
        parameters: set[str],
        place: tuple[int, int],
        again: Callable[[], GradientView],
    ) -> list[Finding]:
        """Judge the parameters, which come first in a view of the state, unless it is the first look at them.

        `again` makes that view anew, should somebody have to look closer.
        """
        names = list(takewhile(parameters.__contains__, state.names))
        if not names:
            return []
        norms = state.norms[: len(names)].detach().to(torch.float32).clamp(1.0, _MOST)  # NaN stays what it is
        known, before = self._before.get(place, ([], norms))
        self._before[place] = names, norms
        if known != names or before.device != norms.device:
            return []
        return [
            Finding(
                kind=Kind.MAGNITUDE,
                value=(norms / before).amax(),
                limit=GROWN,
                action=Action.WARN,
                confirm=lambda: _confirm(again(), dict(zip(names, before.tolist(), strict=True))),
            )
        ]


def _confirm(state: GradientView, before: dict[str, float]) -> Evidence | None:
    """Measure, without any overflow, what is finite; waits for the device."""
    found: list[TensorEvidence] = []
    for name, tensor, size in zip(state.names, state.gradients, state.magnitudes.tolist(), strict=True):
        if name not in before or not size * math.sqrt(tensor.numel()) > GROWN * before[name]:
            continue
        entry = inspect_tensor(name, tensor)
        if not entry.nonfinite and entry.norm > GROWN * before[name]:
            found.append(entry)
    if not found:
        return None
    worst = max(found, key=lambda entry: entry.norm / before[entry.name])
    return Evidence(
        kind=Kind.MAGNITUDE,
        action=Action.WARN,
        message=f"{fold([entry.name for entry in found])} has grown to a norm of {worst.norm:.4g}, "
        f"{worst.norm / before[worst.name]:.3g} times what the last look at the state found",
        tensors=tuple(found),
        diagnosis=Diagnosis(
            cause="unknown",
            confidence=0.0,
            phase="optimizer",
            module=worst.name.rpartition(".")[0] or None,
            remedy=("go back to a state from before it: no training makes a parameter grow so",),
        ),
    )
