"""Numbers on their way from the device to the host, without anybody waiting for them."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class Letter:
    """A few numbers that were sent; they may be read once they have arrived."""

    def __init__(self, paper: Tensor, event: torch.Event | None) -> None:
        self.paper = paper
        self._event = event

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
        numbers: list[float] = self.paper.tolist()
        return numbers


class Mailbox:
    """Sends small tensors to the host through pinned memory that is used again and again.

    Copies go out on the current stream, in order with the work that made the numbers; an event says
    when one has arrived. On the CPU there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """Where the numbers are made."""
        self._paper: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)

    def post(self, numbers: Tensor) -> Letter:
        """Send a 1-dim tensor of the device; no wait."""
        if self.device.type == "cpu":
            return Letter(numbers.detach().clone(), None)
        spare = self._paper[numbers.numel(), numbers.dtype]
        paper = spare.pop() if spare else torch.empty(numbers.numel(), dtype=numbers.dtype).pin_memory()
        paper.copy_(numbers, non_blocking=True)
        event = torch.Event(device=self.device)
        event.record()
        return Letter(paper, event)

    def take_back(self, letter: Letter) -> None:
        """Use a letter's memory again; only after it was read."""
        if self.device.type != "cpu":
            self._paper[letter.paper.numel(), letter.paper.dtype].append(letter.paper)
