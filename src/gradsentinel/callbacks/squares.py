"""Finite gradients whose squares an optimizer cannot hold: its running average would be Inf for ever."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsentinel.decision import Action, Kind
from gradsentinel.diagnosis.update import SQUARES
from gradsentinel.evidence import Diagnosis, Evidence, TensorEvidence
from gradsentinel.gradients import GradientView
from gradsentinel.incident import fold
from gradsentinel.measures.inspection import inspect_tensor
from gradsentinel.run import Run

_FIRST_STEP = {
    torch.optim.Adam: "exp_avg_sq",
    torch.optim.NAdam: "exp_avg_sq",
    torch.optim.RAdam: "exp_avg_sq",
    torch.optim.RMSprop: "square_avg",
    torch.optim.Adagrad: "sum",
}
"""Where torch's optimizers will keep squares once they have made their state; AdamW is an Adam, too."""


def overflowing_squares(run: Run, view: GradientView, action: Action) -> Evidence | None:
    """Return the gradients that are finite and whose squares are not, where the optimizer adds these up.

    Only of a step that nobody clips: clipped gradients are small. Waits, and reads every gradient; each rank
    looks at its own part.
    """
    if not view.final or view.retired:
        return None
    largest = dict(zip(view.names, view.magnitudes.tolist(), strict=True))
    gradients = dict(zip(view.names, view.gradients, strict=True))
    owners = {
        id(parameter): (optimizer, group)
        for optimizer in run.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    found: list[TensorEvidence] = []
    kept: dict[str, str] = {}
    for name, parameter in run.host.named_parameters():
        if name in largest and id(parameter) in owners:
            key, most = _most(*owners[id(parameter)], parameter)
            if most < largest[name]:
                found.append(inspect_tensor(name, gradients[name]))
                kept[name] = key
    if not found:
        return None
    worst = max(kept, key=lambda name: largest[name])
    fact = (
        f"{worst}:{kept[worst]} would be Inf: the gradient is finite, up to {largest[worst]:.4g}, "
        "and its square is not; the weight would stand still for ever"
    )
    return Evidence(
        kind=Kind.MAGNITUDE,
        action=action,
        message=f"the update would make the optimizer's running square Inf in {fold(list(kept))}",
        tensors=tuple(found),
        diagnosis=Diagnosis(
            cause="optimizer",
            confidence=0.45,  # what made the gradient so large may be found out
            phase="optimizer",
            module=worst.rpartition(".")[0],
            op="aten.addcmul_.default",
            evidence=(fact,),
            remedy=("clip gradients by norm: what is clipped before the step does no such harm",),
        ),
    )


def _most(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> tuple[str, float]:
    """Return where squares are kept, and the largest gradient whose share there is finite."""
    state = optimizer.state.get(parameter, {})
    for key in SQUARES:
        if isinstance(state.get(key), Tensor):
            return key, _root(state[key].dtype, _share(group, key))
    for kind, key in _FIRST_STEP.items():
        if not state and isinstance(optimizer, kind):
            return key, _root(parameter.dtype, _share(group, key))
    return "", math.inf


def _share(group: Mapping[str, Any], key: str) -> float:
    """Return what a square is multiplied with before it is added."""
    if key == "sum":
        return 1.0
    decay = group.get("alpha") if key == "square_avg" else (group.get("betas") or (0.0, 0.0))[1]
    return 1.0 - float(decay) if isinstance(decay, (int, float)) else 1.0


def _root(dtype: torch.dtype, share: float) -> float:
    largest = torch.finfo(dtype).max if dtype.is_floating_point else float("inf")
    return math.sqrt(largest / max(share, 1e-12))
