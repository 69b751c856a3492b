"""A look at pieces of the gradients: measured on the device at once, read by the host when it has arrived."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsentinel.devices import device_of
from gradsentinel.gradients import GradientView
from gradsentinel.measures.histogram import BINS, Histogram, count_exponents
from gradsentinel.measures.mailbox import Letter, Mailbox
from gradsentinel.measures.norms import is_distributed
from gradsentinel.measures.sampling import Piece, cut

_WIDTH = BINS + 2
"""Numbers of one piece: the counts, the checksum, the bits of its largest magnitude."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Measured:
    """What a piece looks like."""

    piece: Piece
    counts: list[int]
    bits: int
    """A checksum of its bits: another one as soon as a single bit is."""
    largest: float


@dataclass(slots=True)
class Look:
    """Pieces that were looked at in one step; the numbers are on their way."""

    iteration: int
    player: str
    pieces: Sequence[Piece]
    names: Sequence[str]
    """The gradients whose norms travel along."""
    sharded: frozenset[str]
    """Those of which this rank has a part only."""
    letter: Letter
    applied: bool | None = None
    """Whether the step was made; None while nobody knows."""

    @property
    def ready(self) -> bool:
        """True when it can be read without a wait, and the outcome of its step is known."""
        return self.applied is not None and self.letter.arrived()

    def read(self) -> tuple[list[Measured], dict[str, float]]:
        """Return what was measured, and the norms by name; waits if the numbers have not arrived."""
        numbers: list[Any] = self.letter.read()
        rows = len(numbers) - len(self.names)
        measured = []
        for index, piece in enumerate(self.pieces):
            row = numbers[index * _WIDTH : (index + 1) * _WIDTH]
            measured.append(Measured(piece, row[:BINS], row[BINS], _as_float(row[BINS + 1])))
        norms = {name: _as_float(bits) for name, bits in zip(self.names, numbers[rows:], strict=True)}
        return measured, norms


@torch.no_grad()
def look(
    view: GradientView,
    mailbox: Mailbox,
    sample: Sequence[Piece],
    *,
    iteration: int,
    player: str,
    norms: bool,
) -> Look:
    """Measure the pieces of a sample whose gradients are there, and send the numbers off; no wait.

    A few launches per piece, and memory of the largest one. `norms` sends the norm of every gradient too.
    """
    device = mailbox.device
    present = dict(zip(view.names, view.gradients, strict=True))
    cuts = [(piece, cut(present[piece.name], piece)) for piece in sample if piece.name in present]
    cuts = [(piece, values) for piece, values in cuts if values.numel()]
    names = view.names if norms else ()
    sent = [_measure([values for _, values in cuts], device)]
    if names:
        sent.append(_bits(view.norms.to(torch.float32)).to(device))
    return Look(
        iteration=iteration,
        player=player,
        pieces=[piece for piece, _ in cuts],
        names=names,
        sharded=frozenset(name for name, gradient in present.items() if is_distributed(gradient)),
        letter=mailbox.post(torch.cat(sent)),
    )


def _measure(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the numbers of all pieces, 1-dim int64, padded to a length that comes again."""
    padded = torch.zeros(2 ** len(pieces).bit_length(), _WIDTH, dtype=torch.int64, device=device)
    if not pieces:
        return padded.flatten()
    counts, sums, largest = [], [], []
    for values in pieces:
        low, high = torch.aminmax(values if values.element_size() > 1 else values.to(torch.float32))
        counts.append(count_exponents(values).to(device))
        sums.append(_checksum(values).to(device))
        largest.append(torch.maximum(high, -low).to(device=device, dtype=torch.float32))
    columns = [torch.stack(counts).to(torch.int64), torch.stack(sums).unsqueeze(1)]
    columns.append(_bits(torch.stack(largest)).unsqueeze(1))
    padded[: len(pieces)] = torch.cat(columns, 1)
    return padded.flatten()


def _checksum(values: Tensor) -> Tensor:
    """Return the sum of the bits as integers, each times an odd number of its own: 0-dim int64."""
    plain = device_of(values.device).in_plain_format(values)
    words = plain.contiguous().view(_WORDS[values.element_size()]).to(torch.int64)
    return (words * torch.arange(1, 2 * words.numel(), 2, device=words.device)).sum()


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).to(torch.int64)


def _as_float(bits: int) -> float:
    number: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    return number


@dataclass(slots=True)
class Summary:
    """What pieces of one gradient look like together; they may be of several steps."""

    name: str
    histogram: Histogram = field(default_factory=lambda: Histogram([0] * BINS))
    largest: float = 0.0
    """The largest magnitude; NaN if there is one."""
    starts: set[int] = field(default_factory=set)
    """The pieces that are in it."""
    seen: int = 0
    """Elements of those."""

    def add(self, one: Measured) -> None:
        """Take a piece in."""
        counts = zip(self.histogram.counts, one.counts, strict=True)
        self.histogram = Histogram([mine + its for mine, its in counts])
        if not one.largest <= self.largest and not math.isnan(self.largest):
            self.largest = one.largest
        self.starts.add(one.piece.start)
        self.seen += len(one.piece)


class Ledger:
    """Puts pieces together until a tensor is complete."""

    def __init__(self) -> None:
        self._open: dict[str, Summary] = {}

    def add(self, measured: Sequence[Measured]) -> list[Summary]:
        """Take pieces in and return the tensors that they complete."""
        complete = []
        for one in measured:
            name, start = one.piece.name, one.piece.start
            summary = self._open.get(name)
            if summary is None or start in summary.starts:  # perhaps an earlier round was left unfinished
                summary = self._open[name] = Summary(name)
            summary.add(one)
            if summary.seen >= one.piece.whole:
                complete.append(self._open.pop(name))
        return complete
