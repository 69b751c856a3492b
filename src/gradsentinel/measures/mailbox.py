"""Numbers on their way from the device to the host, without anybody waiting for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradsentinel.devices import device_of
from gradsentinel.measures.bounds import bounds


class Letter:
    """A few numbers that were sent; they may be read once they have arrived."""

    def __init__(self, paper: Tensor, event: Any) -> None:
        self.paper = paper
        self._event = event
        self._numbers: list[float] | None = None

    def arrived(self) -> bool:
        """Return True if the numbers are on the host; does not wait."""
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def read(self) -> list[float]:
        """Return the numbers; waits for the device only if they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        if self._numbers is None:  # several may want to know, and the paper is used again afterwards
            self._numbers = self.paper.tolist()
        return self._numbers


class Mailbox:
    """Sends small tensors to the host through pinned memory that is used again and again.

    Copies go out on the current stream, in order with the work that made the numbers; an event says
    when one has arrived. On the CPU there is nothing to wait for; a device without streams is waited for.

    Args:
        device: where the numbers are made.
        most_spare: bytes of pinned memory that are kept for later letters; what has not been used for the
            longest time goes first. Letters that are under way come on top. None: `bounds().pinned`.
    """

    def __init__(self, device: torch.device, *, most_spare: int | None = None) -> None:
        self.device = device
        """Where the numbers are made."""
        self._kind = device_of(device)
        self._most_spare = bounds().pinned if most_spare is None else most_spare
        self._spare: list[Tensor] = []
        """What has come back last is at the end."""

    @property
    def spare(self) -> int:
        """Bytes of pinned memory that wait for the next letter."""
        return sum(paper.nbytes for paper in self._spare)

    def post(self, numbers: Tensor) -> Letter:
        """Send a 1-dim tensor of the device; no wait."""
        if self.device.type == "cpu":
            return Letter(numbers.detach().clone(), None)
        paper = self._paper(numbers)
        if not self._kind.has_streams:
            paper.copy_(numbers)
            return Letter(paper, None)
        paper.copy_(numbers, non_blocking=True)
        return Letter(paper, self._kind.event())

    def take_back(self, letter: Letter) -> None:
        """Use a letter's memory again; only after it was read."""
        if self.device.type == "cpu":
            return
        self._spare.append(letter.paper)
        while self._spare and self.spare > self._most_spare:
            del self._spare[0]

    def _paper(self, numbers: Tensor) -> Tensor:
        for index, paper in enumerate(self._spare):
            if paper.numel() == numbers.numel() and paper.dtype == numbers.dtype:
                return self._spare.pop(index)
        return self._kind.host_memory(numbers.detach())
