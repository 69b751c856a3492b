"""The faults of a drill: by name, for any model and any batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradsentinel.faults import (
    Fault,
    FlipBit,
    MatmulOverflow,
    PoisonActivation,
    PoisonGradient,
    PoisonSample,
    WrongOperator,
)


@dataclass(frozen=True, kw_only=True)
class DrillFault:
    """One fault by its name."""

    name: str
    what: str
    """What it is, in one line."""
    make: Callable[[dict[str, Any], str | None], Fault]
    """Makes it of `when` (steps, ranks, persistent) and a place, or None for one that the seed chooses."""
    persistent: bool = False
    """Whether it is there again when its step is computed again, if nobody says otherwise."""


def _value(kind: Any, place: str, value: float) -> Callable[[dict[str, Any], str | None], Fault]:
    def make(when: dict[str, Any], where: str | None) -> Fault:
        fault: Fault = kind(**{place: where}, value=value, **when)
        return fault

    return make


DRILLS: dict[str, DrillFault] = {
    one.name: one
    for one in (
        DrillFault(
            name="nan-gradient",
            what="a NaN in one gradient, once",
            make=_value(PoisonGradient, "parameter", math.nan),
        ),
        DrillFault(
            name="inf-gradient",
            what="an Inf in one gradient, once",
            make=_value(PoisonGradient, "parameter", math.inf),
        ),
        DrillFault(
            name="nan-activation",
            what="a NaN in what a module returns, once",
            make=_value(PoisonActivation, "module", math.nan),
        ),
        DrillFault(
            name="nan-sample",
            what="a NaN in one record of a batch with a floating field",
            make=_value(PoisonSample, "field", math.nan),
            persistent=True,
        ),
        DrillFault(
            name="inf-sample",
            what="an Inf in one record of a batch with a floating field",
            make=_value(PoisonSample, "field", math.inf),
            persistent=True,
        ),
        DrillFault(
            name="overflow",
            what="a matrix product that overflows float16, whenever its step is computed",
            make=lambda when, where: MatmulOverflow(module=where, **when),
            persistent=True,
        ),
        DrillFault(
            name="flip-gradient",
            what="the highest exponent bit of a gradient flips: finite and huge, or tiny",
            make=lambda when, where: FlipBit(target="gradient", name=where, bit=30, **when),
        ),
        DrillFault(
            name="flip-weight",
            what="the highest exponent bit of a weight flips, and stays",
            make=lambda when, where: FlipBit(target="parameter", name=where, bit=30, **when),
        ),
        DrillFault(
            name="flip-activation",
            what="the highest exponent bit of an activation flips, once",
            make=lambda when, where: FlipBit(target="activation", name=where, bit=30, **when),
        ),
        DrillFault(
            name="wrong-operator",
            what="a module returns uninitialised memory in a quarter of its rows, whenever it is computed",
            make=lambda when, where: WrongOperator(operator="uninitialised_rows", module=where, **when),
            persistent=True,
        ),
    )
}
