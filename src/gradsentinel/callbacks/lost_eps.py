"""An `eps` that an optimizer has lost in the midst of a run: the next update divides 0 by 0."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsentinel.decision import Action, Kind
from gradsentinel.diagnosis.update import EPS_REMEDY, SQUARES
from gradsentinel.evidence import Diagnosis, Evidence, Finding, TensorEvidence
from gradsentinel.incident import OF_THIS_STEP, fold
from gradsentinel.measures.inspection import local
from gradsentinel.run import Run


class LostEps:
    """Tells the updates that an `eps` of 0 makes non-finite before they are made.

    An element whose gradient and whose running square are both 0, such as the row of an embedding whose
    token has not come yet, becomes 0 / 0. Nothing shows it before the update, and after it the weights are
    bad. A run that began with an eps of 0 has chosen it and is left alone. A step at which every eps is as at
    the start costs one comparison for each parameter group.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        # By optimizer and place: groups that are added later began with whatever they have then.
        self._began = {
            (id(optimizer), place): group.get("eps")
            for optimizer in run.host.optimizers
            for place, group in enumerate(optimizer.param_groups)
        }

    def suspected(self) -> bool:
        """Return True if an eps is 0 that was not; on the host alone."""
        for optimizer in self._run.optimizers or self._run.host.optimizers:
            for group in optimizer.param_groups:
                eps = group.get("eps")
                if type(eps) is float and eps:  # as in nearly every step of nearly every run
                    continue
                if eps is not None and any(True for _ in self._groups()):
                    return True
        return False

    def finding(self) -> Finding | None:
        """Look, on the device, whether this step's update would divide 0 by 0; None where no eps is lost."""
        marks: list[tuple[str, Tensor, Tensor]] = []
        names = None
        for optimizer, group in self._groups():
            names = names or {id(p): name for name, p in self._run.host.named_parameters()}
            for parameter in group["params"]:
                lost = _divides(optimizer, group, parameter)
                if lost is not None:
                    marks.append((names.get(id(parameter), "a parameter"), parameter, lost))
        if not marks:
            return None
        value = torch.stack([lost.any().to(marks[0][1].device) for _, _, lost in marks]).any()
        # The moments and gradients are those of another step when the host asks late: the marks are kept.
        return Finding(
            kind=Kind.NONFINITE_STATE, value=value, action=Action.SKIP, confirm=lambda: _evidence(marks)
        )

    def _groups(self) -> Iterator[tuple[Optimizer, Mapping[str, Any]]]:
        for optimizer in self._run.optimizers or self._run.host.optimizers:
            for place, group in enumerate(optimizer.param_groups):
                eps = group.get("eps")
                # A tensor is not asked: it may be on a device, which nobody waits for here.
                if isinstance(eps, (int, float)) and eps == 0 and self._began.get((id(optimizer), place)):
                    yield optimizer, group


def _divides(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Tensor | None:
    """Return which elements the optimizer makes 0 / 0; None if it does not divide, or makes no update."""
    if parameter.grad is None or parameter.grad.layout is not torch.strided:
        return None
    # Each rank looks at its own part of a sharded parameter: nothing is sent.
    gradient, state = local(parameter.grad), optimizer.state.get(parameter, {})
    decay, decoupled = group.get("weight_decay", 0), group.get("decoupled_weight_decay", False)
    if decay and not (decoupled or isinstance(optimizer, torch.optim.AdamW)):
        gradient = gradient + decay * local(parameter.detach()).to(gradient.dtype)
    squares = next((local(state[key]) for key in SQUARES if isinstance(state.get(key), Tensor)), None)
    if squares is None:
        # The first update of this parameter: what is no Adam, Adagrad or RMSprop need not divide at all.
        known = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop)
        return gradient == 0 if not state and isinstance(optimizer, known) else None
    if squares.shape != gradient.shape:  # a factored square, or a shard of another layout
        return None
    return (gradient == 0) & (squares == 0)


def _evidence(marks: Sequence[tuple[str, Tensor, Tensor]]) -> Evidence | None:
    tensors = []
    for name, parameter, lost in marks:
        count = int(lost.sum())
        if count:
            first = tuple(int(place) for place in lost.nonzero()[0])
            tensors.append(
                TensorEvidence(
                    name=name, numel=parameter.numel(), nonfinite=count, norm=math.nan, first_index=first
                )
            )
    if not tensors:
        return None
    most = max(tensors, key=lambda entry: entry.nonfinite)
    fact = (
        f"eps is 0 now and was not at the start; {most.nonfinite} elements of {most.name} have "
        "a gradient and a running square of 0, so that the update would be 0 / 0"
    )
    return Evidence(
        kind=Kind.NONFINITE_STATE,
        action=Action.SKIP,
        message=f"the update would be NaN in {fold([one.name for one in tensors])}: the optimizer's eps is 0",
        tensors=tuple(tensors),
        diagnosis=Diagnosis(
            cause="optimizer",
            confidence=0.95,
            phase="optimizer",
            module=most.name.rpartition(".")[0],
            op="aten.div",
            evidence=(fact,),
            remedy=(EPS_REMEDY,),
        ),
        details={OF_THIS_STEP: True},
    )
