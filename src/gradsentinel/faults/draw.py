"""Faults at random, for campaigns that ask how many of them are caught."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from gradsentinel.faults.bit import FlipBit
from gradsentinel.faults.dice import Dice
from gradsentinel.faults.fault import Fault
from gradsentinel.faults.names import Names
from gradsentinel.faults.overflow import MatmulOverflow
from gradsentinel.faults.poison import PoisonActivation, PoisonGradient
from gradsentinel.faults.sample import PoisonSample
from gradsentinel.faults.wrong_operator import WrongOperator

ALL_KINDS: tuple[type[Fault], ...] = (
    PoisonSample,
    PoisonActivation,
    PoisonGradient,
    FlipBit,
    MatmulOverflow,
    WrongOperator,
)


def random_faults(
    model: nn.Module,
    n: int,
    *,
    seed: int = 0,
    steps: Sequence[int],
    kinds: Sequence[type[Fault]] = ALL_KINDS,
    ranks: Collection[int] | None = None,
    persistent: bool = False,
) -> list[Fault]:
    """Draw faults at random, each at one step and in a place that the model has.

    Every rank draws the same faults from the same model and seed; the model is only read.

    Args:
        model: the model whose names are used.
        n: how many.
        seed: the same seed draws the same faults.
        steps: steps to draw from, such as `range(10, 1000)`.
        kinds: families to draw from.
        ranks: each fault happens on one of these; None: on every rank.
        persistent: whether they are there again when their step is computed again.

    Raises:
        ValueError: there is nothing to draw from.
    """
    if n < 0:
        raise ValueError(f"n={n}: give how many faults to draw")
    for name, choices in (("steps", steps), ("kinds", kinds), ("ranks", (0,) if ranks is None else ranks)):
        if not choices:
            raise ValueError(f"{name} is empty: give what to draw from")
    names = Names(model)
    faults = []
    for number in range(n):
        dice = Dice(seed, number)
        when = {
            "steps": (dice.choice(steps, "step"),),
            "ranks": None if ranks is None else (dice.choice(sorted(ranks), "rank"),),
            "persistent": persistent,
        }
        faults.append(dice.choice(kinds, "kind").draw(names, dice, when))
    return faults
