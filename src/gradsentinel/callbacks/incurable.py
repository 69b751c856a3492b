"""What tells that a state has gone bad though all of it is finite: no step made from it is worth saving."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradsentinel.decision import Action
from gradsentinel.gradients import GradientView
from gradsentinel.incident import Incident, Outcome
from gradsentinel.measures.inspection import local, parts_of, readable, values_of
from gradsentinel.measures.norms import norm_of
from gradsentinel.state.snapshot import Snapshot

_OUTGROWN = 1e4
"""No parameter gets by training to so many times its largest value of some steps ago, and of 1."""
_TRIED = "rescued_in_a_row"
"""In the details of an incident: the steps before it were rescued at this place."""


def outgrown(parameters: Iterable[tuple[str, Tensor]], before: Snapshot) -> str | None:
    """Say which parameter is finite and far beyond what it was in a known-good state; None if none is.

    Waits for the device, and looks at this rank's part. Of the state in host memory only the parameters that
    are large now are read.
    """
    with torch.no_grad():
        now = GradientView(
            (name, parts_of(values_of(parameter)))
            for name, parameter in parameters
            if readable(parameter) is None and local(parameter).numel()
        )
        sizes = dict(zip(now.names, now.magnitudes.tolist(), strict=True))
        large = {name: size for name, size in sizes.items() if _OUTGROWN < size < math.inf}
        for name in sorted(large, key=large.__getitem__, reverse=True):
            if name not in before.parameters:
                continue
            usual = float(norm_of(parts_of(values_of(before.parameters[name])), math.inf))
            if large[name] > _OUTGROWN * max(usual, 1.0):
                return (
                    f"{name} is up to {large[name]:.3g}, and in the known-good state of step {before.step} "
                    f"it is up to {usual:.3g}: that is no matter of precision, and dropping a step is no cure"
                )
    return None


def rescued_in_a_row(incident: Incident, earlier: Sequence[Incident], most: int, *, since: int) -> str | None:
    """Say where the steps before this one were rescued, so many in a row at one place; None if they were not.

    Notes the place in the incident. Where that has led to going back since an attempted step, and the place
    needs rescuing again, it is not the state: None, too.
    """
    places: list[str] = []
    step = incident.step
    for one in reversed(earlier):
        if one.action <= Action.WARN:
            continue
        place = one.details.get("rescue", {}).get("module")
        if one.step != step - 1 or one.outcome is not Outcome.RESCUED or place not in (places or [place]):
            break
        places.append(place)
        step -= 1
    if len(places) < most:
        return None
    if any(one.iteration >= since and one.details.get(_TRIED) == places[0] for one in earlier):
        return None
    incident.details[_TRIED] = places[0]
    return (
        f"{places[0] or 'the whole model'} had to be rescued in each of the last {len(places)} steps: "
        "the state may have gone bad, and no further step is saved with it"
    )
