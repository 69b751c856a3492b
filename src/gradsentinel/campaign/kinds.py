"""The kinds of faults that the campaign draws from, each with what a right diagnosis says of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gradsentinel.faults import (
    ChangeSetting,
    Fault,
    FlipBit,
    MatmulOverflow,
    PoisonActivation,
    PoisonGradient,
    PoisonSample,
    SpoilField,
    WrongOperator,
)
from gradsentinel.faults.dice import Dice

Family = Literal["data", "precision", "hardware"]
FAMILIES: dict[Family, int] = {"data": 60, "precision": 30, "hardware": 10}
"""How many of a hundred faults are of each family; `hardware` is that of frameworks and operators, too."""

Make = Callable[[dict[str, Any], Dice, "Site"], Fault]


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a fault may sit in, besides the model."""

    optimizer: Any
    scale: Any = None
    """An object whose attribute `scale` is the loss scale; None without a loss scaler."""
    linear: str = "*blocks.*.mlp.*"
    """Pattern of modules that multiply matrices."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault."""

    name: str
    family: Family
    cause: str
    """The cause that a right diagnosis names."""
    make: Make
    """Makes the fault of `when` (steps, persistent), dice and site."""
    persistence: tuple[bool, ...]
    """Whether it is there again when its step is computed again; drawn from these."""
    needs_scaler: bool = False


def _attention(when: dict[str, Any], _dice: Dice, _site: Site) -> Fault:
    # The third product of the module is query @ key^T: the attention logits.
    return MatmulOverflow(module="*blocks.*.attn", nth=2, dtype=torch.float16, **when)


def _infinite(when: dict[str, Any], dice: Dice, _site: Site) -> Fault:
    value = dice.choice((math.inf, -math.inf), "value")
    return PoisonSample(field=dice.choice(("weight", "mask"), "field"), value=value, **when)


def _outlier(when: dict[str, Any], dice: Dice, _site: Site) -> Fault:
    factor = dice.choice((1e3, 1e38), "factor")
    return SpoilField(field="weight", change="scale", factor=factor, position=0, **when)


def _operator(when: dict[str, Any], dice: Dice, site: Site) -> Fault:
    operator = dice.choice(("uninitialised_rows", "sign_flip", "zero"), "operator")
    return WrongOperator(operator=operator, module=site.linear, **when)


def _flip(target: Any) -> Make:
    def make(when: dict[str, Any], dice: Dice, _site: Site) -> Fault:
        return FlipBit(target=target, bit=dice.below(32, "which bit"), **when)

    return make


_ALWAYS, _ONCE, _EITHER = (True,), (False,), (False, False, True)

KINDS: tuple[Kind, ...] = (
    Kind(
        name="nan-sample",
        family="data",
        cause="data",
        persistence=_ALWAYS,
        make=lambda when, dice, _: PoisonSample(
            field=dice.choice(("weight", "mask"), "field"), value=math.nan, **when
        ),
    ),
    Kind(name="inf-sample", family="data", cause="data", persistence=_ALWAYS, make=_infinite),
    Kind(name="outlier-sample", family="data", cause="data", persistence=_ALWAYS, make=_outlier),
    Kind(
        name="wrong-labels",
        family="data",
        cause="data",
        persistence=_ALWAYS,
        make=lambda when, *_: SpoilField(field="targets", change="shuffle", **when),
    ),
    Kind(
        name="empty-mask",
        family="data",
        cause="data",
        persistence=_ALWAYS,
        make=lambda when, *_: SpoilField(field="mask", change="zero", **when),
    ),
    Kind(
        name="attention-overflow", family="precision", cause="precision", persistence=_ALWAYS, make=_attention
    ),
    Kind(
        name="linear-overflow",
        family="precision",
        cause="precision",
        persistence=_ALWAYS,
        make=lambda when, _, site: MatmulOverflow(module=site.linear, dtype=torch.float16, **when),
    ),
    Kind(
        name="adam-eps",
        family="precision",
        cause="optimizer",
        persistence=_ONCE,
        make=lambda when, _, site: ChangeSetting(owner=site.optimizer, name="eps", value=0.0, **when),
    ),
    Kind(
        name="loss-scale-collapse",
        family="precision",
        cause="precision",
        persistence=_ALWAYS,
        needs_scaler=True,
        # So small that scaled gradients vanish.
        make=lambda when, _, site: ChangeSetting(owner=site.scale, name="scale", value=2.0**-140, **when),
    ),
    Kind(
        name="flip-activation",
        family="hardware",
        cause="hardware",
        persistence=_ONCE,
        make=_flip("activation"),
    ),
    Kind(name="flip-weight", family="hardware", cause="hardware", persistence=_ONCE, make=_flip("parameter")),
    Kind(
        name="flip-gradient",
        family="hardware",
        cause="hardware",
        persistence=_EITHER,
        make=_flip("gradient"),
    ),
    Kind(
        name="nan-activation",
        family="hardware",
        cause="hardware",
        persistence=_ONCE,
        make=lambda when, dice, _: PoisonActivation(
            value=dice.choice((math.nan, math.inf, -math.inf), "value"), **when
        ),
    ),
    Kind(
        name="nan-gradient",
        family="hardware",
        cause="hardware",
        persistence=_ONCE,
        make=lambda when, dice, _: PoisonGradient(
            value=dice.choice((math.nan, math.inf, -math.inf), "value"), **when
        ),
    ),
    Kind(
        name="wrong-operator",
        family="hardware",
        cause="operator",
        persistence=_EITHER,
        make=_operator,
    ),
)
FOR_MEGATRON = tuple(
    kind
    for kind in KINDS
    if kind.name
    in {"nan-sample", "inf-sample", "empty-mask", "linear-overflow", "nan-gradient", "flip-gradient"}
)
"""Those that fit a model whose modules and optimizer are Megatron's."""
BY_NAME = {kind.name: kind for kind in KINDS}
