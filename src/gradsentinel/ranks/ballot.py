"""Collectives in which a rank that has failed, or is done already, is noticed before anybody waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradsentinel.ranks.consensus import Consensus

T = TypeVar("T")


class PeerLeft(RuntimeError):
    """Another rank does not come to this collective any more: it failed, or it has its answer."""


class GuardedConsensus:
    """A consensus for code that may raise on one rank and go on to a collective on the others.

    Before each collective of the whole job the ranks vote, all with ballots of one shape: "I go on", or
    the answer with which a rank is done. As soon as one is done while another goes on, all know, and who
    went on gets `PeerLeft`. Otherwise the collectives of the two would meet: gloo then ends the process, or
    waits for ever. Collectives within a group (`copy_from`, and `differ` with one) are not guarded: nobody
    outside of it would know of them, so the job has to agree just before.

    Args:
        consensus: the one that does the work.
        width: how many numbers an answer has.
    """

    def __init__(self, consensus: Consensus, *, width: int) -> None:
        self._consensus = consensus
        self._width = width
        self.rank = consensus.rank
        self.world_size = consensus.world_size
        self._votes: list[int] | None = None

    @property
    def left(self) -> bool:
        """True if a vote has shown that the ranks do not do the same."""
        return self._votes is not None

    def close_with(self, answer: Sequence[int]) -> tuple[list[int], bool]:
        """Return the element-wise largest answer of all ranks, and whether some rank still went on.

        Called on every rank when it is done; also on one that got `PeerLeft`, whose answer does not count.
        """
        votes = self._votes if self._votes is not None else self._vote([*answer, 0])
        return votes[:-1], bool(votes[-1])

    def agree(self, levels: Tensor) -> Tensor:
        """Return the element-wise maximum over all ranks."""
        self._go_on()
        return self._consensus.agree(levels)

    def differ(self, values: Tensor, group: Any) -> Tensor:
        """Return which elements the ranks of a group hold different values of."""
        if group is None:
            self._go_on()
        return self._consensus.differ(values, group)

    def total(self, values: Tensor) -> Tensor:
        """Return the element-wise sum over all ranks."""
        self._go_on()
        return self._consensus.total(values)

    def copy_from(self, source: int, tensors: Sequence[Tensor], group: Any) -> None:
        """Overwrite tensors with those of one rank of a group."""
        if group is None:
            self._go_on()
        self._consensus.copy_from(source, tensors, group)

    def all_of(self, fine: bool) -> bool:  # noqa: FBT001 - see Consensus
        """Return True if every rank says True."""
        self._go_on()
        return self._consensus.all_of(fine)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        self._go_on()
        return self._consensus.gather(value)

    def close(self) -> None:
        """Give the group back."""
        self._consensus.close()

    def _go_on(self) -> None:
        if self._votes is None and self.world_size > 1:
            least = torch.iinfo(torch.int32).min  # below every answer
            votes = self._vote([*([least] * self._width), 1])
            if any(vote != least for vote in votes[:-1]):
                self._votes = votes
        if self._votes is not None:
            raise PeerLeft("another rank failed here, or is done already")

    def _vote(self, ballot: Sequence[int]) -> list[int]:
        agreed: list[int] = self._consensus.agree(torch.tensor(ballot, dtype=torch.int32)).tolist()
        return agreed
