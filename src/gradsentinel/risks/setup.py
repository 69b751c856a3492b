"""What can be told before anything is computed: parameters, buffers and the optimizer's settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradsentinel.diagnosis.update import suspect_setting
from gradsentinel.host import Host
from gradsentinel.incident import fold
from gradsentinel.measures.inspection import parts_of, readable, values_of, without_infinities
from gradsentinel.risks.report import Risk

_ABSURD = 1e8
"""No initialisation makes a number like this."""


def unusable(host: Host) -> Risk | None:
    """Return why there is nothing to run yet, None if there is."""
    lazy = [name for name, p in host.named_parameters() if is_lazy(p)]
    if lazy:
        return Risk(
            kind="not_initialised",
            certain=True,
            message=f"{fold(lazy)} get their shapes in the first forward pass",
            remedy=("run the model once on a batch, then look again",),
            names=tuple(lazy),
        )
    absent = [name for name, p in host.named_parameters() if p.device.type == "meta"]
    if absent:
        return Risk(
            kind="not_initialised",
            certain=True,
            message=f"{fold(absent)} are on the meta device and hold nothing",
            remedy=("model.to_empty(device=...) and initialise, or load a checkpoint",),
            names=tuple(absent),
        )
    return None


def state_risks(host: Host) -> Iterator[Risk]:
    """Yield parameters and buffers that hold what no training should start with; waits for the device."""
    for name, parameter in host.named_parameters():
        yield from _judge_parameter(name, parameter)
    for prefix, root in host.modules():
        for path, buffer in root.named_buffers():
            name = ".".join(part for part in (prefix, path) if part)
            if readable(buffer) is None and _count(without_infinities(buffer)):
                yield Risk(
                    kind="nonfinite_buffer",
                    certain=True,
                    message=f"buffer {name} holds NaN",
                    remedy=(f"initialise {name}, or load a checkpoint that holds it",),
                    module=name.rpartition(".")[0],
                )


def _judge_parameter(name: str, parameter: Tensor) -> Iterator[Risk]:
    if readable(parameter) is not None:
        return
    module = name.rpartition(".")[0]
    count = _count(parameter)
    if count:
        yield Risk(
            kind="nonfinite_parameter",
            certain=True,
            message=f"parameter {name} holds {count} non-finite of {parameter.numel()} values",
            remedy=(f"initialise {name} (torch.empty holds old memory), or load a checkpoint that holds it",),
            module=module,
        )
        return
    largest = _largest(parameter)
    if largest > _ABSURD:
        yield Risk(
            kind="uninitialised_parameter",
            certain=False,
            message=f"parameter {name} holds values up to {largest:.3g}: old memory, by the look of it",
            remedy=(f"initialise {name}: torch.empty does not",),
            module=module,
        )


def optimizer_risks(host: Host, optimizers: Sequence[Optimizer]) -> Iterator[Risk]:
    """Yield settings with which the optimizer makes NaN of finite gradients, and what it never steps."""
    names = {id(p): name for name, p in host.named_parameters()}
    stepped: set[int] = set()
    told: set[str] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            stepped |= {id(p) for p in group["params"]}
            for parameter in group["params"]:
                found = suspect_setting(group, parameter)
                if found is None or found[0] in told:
                    continue
                told.add(found[0])
                yield Risk(
                    kind="optimizer_setting",
                    certain=True,
                    message=f"{type(optimizer).__name__}: {found[0]}",
                    remedy=(found[1],),
                    names=(names.get(id(parameter), "?"),),
                )
    left = [name for name, p in host.named_parameters() if p.requires_grad and id(p) not in stepped]
    if left:
        yield Risk(
            kind="not_stepped",
            certain=False,
            message=f"no optimizer steps {fold(left)}, which can be trained",
            remedy=("give them to an optimizer, or requires_grad_(False)",),
            names=tuple(left),
        )


def _count(tensor: Tensor) -> int:
    return int((~torch.isfinite(parts_of(values_of(tensor)))).sum())


def _largest(tensor: Tensor) -> float:
    values = parts_of(values_of(tensor))
    return float(values.abs().amax()) if values.numel() else 0.0
