"""Random choices that depend on the seed alone: no generator whose state could be disturbed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Dice:
    """Draws for one fault of one plan; the same question always gets the same answer, on every rank."""

    seed: int
    """Seed of the plan."""
    number: int
    """Position of the fault in the plan."""

    def below(self, bound: int, purpose: str) -> int:
        """Return a number in [0, bound); `purpose` tells the draws of one fault apart."""
        digest = hashlib.blake2b(f"{self.seed}/{self.number}/{purpose}".encode(), digest_size=16).digest()
        return int.from_bytes(digest, "big") % bound

    def choice(self, items: Sequence[T], purpose: str) -> T:
        """Return one of the items."""
        return items[self.below(len(items), purpose)]
