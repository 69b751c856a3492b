"""The batches that are left out: remembered over rollbacks and restarts, in `skipped-batches.json`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gradsentinel.data.records import Content
from gradsentinel.errors import StoreError
from gradsentinel.incident import jsonable
from gradsentinel.ranks.consensus import Consensus
from gradsentinel.state.disk import Disk
from gradsentinel.store import RunDirectory, check_schema, write_json

if TYPE_CHECKING:
    from gradsentinel.data.sampler import SkipBatches
    from gradsentinel.run import Run

logger = logging.getLogger("gradsentinel")

SCHEMA = 1
FILE = "skipped-batches.json"
_MOST_PASSING = 1000
"""So many batches that are only left out for an epoch are remembered; the oldest are forgotten."""
_MOST_IN_A_ROW = 100
"""So many batches are left out in a row; the next one is given, for the ladder to stop what leads nowhere."""

B = TypeVar("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank drew at the position of a skipped batch."""

    rank: int
    guilty: bool
    """True if the fault began there; the parts of the other ranks are left out only to keep in step."""
    fingerprint: str
    """Of its micro-batch; empty if its content cannot be told from another's."""
    ids: tuple[Any, ...] = ()
    """The user's own ids of all its records, if it carries some."""
    samples: tuple[Mapping[str, Any], ...] = ()
    """The bad records, if they are known: position in the micro-batch, and id."""
    indices: tuple[int, ...] = ()
    """Indices of its records in the data set, if a `SkipBatches` sampler drew it."""

    def is_in(self, content: Content, *, in_place: bool) -> bool:
        """Say whether a micro-batch is this one, by its content, or by its ids where content is random.

        Ids alone tell nothing: some programs number the records of each batch anew. So they count only at
        the same place in the epoch.
        """
        return content.has(self.fingerprint) or (in_place and content.has_ids(self.ids))

    def bad_indices(self) -> tuple[int, ...]:
        """Return where the bad records are in the data set, as far as that is known."""
        positions = [sample["position"] for sample in self.samples]
        return tuple(self.indices[p] for p in positions if 0 <= p < len(self.indices))

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "rank": self.rank,
            "guilty": self.guilty,
            "fingerprint": self.fingerprint,
            "ids": jsonable(list(self.ids)),
            "samples": jsonable(list(self.samples)),
            "indices": list(self.indices),
        }


@dataclass(slots=True, kw_only=True)
class SkippedBatch:
    """A batch that led to an incident: one micro-batch of each rank, at the same position."""

    epoch: int
    batch: int
    """Number of the micro-batch in its epoch, on every rank; -1 if the ranks were not in step."""
    step: int
    incident: str
    """Id of the incident."""
    cause: str = "unknown"
    for_good: bool = False
    """True if the data is to blame; else it is tried again in the next epoch."""
    failures: int = 1
    """In so many epochs it has failed."""
    left_out: int = 0
    """So often it has been left out since."""
    parts: tuple[Part, ...] = ()

    @property
    def guilty(self) -> tuple[Part, ...]:
        """The parts that the fault began in; all of them if that is not known."""
        return tuple(part for part in self.parts if part.guilty) or self.parts

    def concerns(self, epoch: int, number: int) -> bool:
        """Say whether it may be left out here: bad data anywhere, anything else where it was drawn before.

        Not merely because another batch has the same content: the loader may give one batch for ever.
        """
        return self.for_good or (epoch, number) == (self.epoch, self.batch)

    def is_in(self, content: Content, number: int) -> bool:
        """Say whether a micro-batch, by its number in the epoch, is the one that the fault began in."""
        return any(part.is_in(content, in_place=number == self.batch) for part in self.guilty)

    def is_same_as(self, other: SkippedBatch) -> bool:
        """Say whether two entries are about the same data."""
        mine = {part.fingerprint for part in self.guilty if part.fingerprint}
        return any(part.fingerprint in mine for part in other.guilty)

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "step": self.step,
            "incident": self.incident,
            "cause": self.cause,
            "for_good": self.for_good,
            "failures": self.failures,
            "left_out": self.left_out,
            "ranks": [part.as_dict() for part in self.parts],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SkippedBatch:
        """Rebuild an entry from its JSON form."""
        return cls(
            epoch=int(data["epoch"]),
            batch=int(data["batch"]),
            step=int(data["step"]),
            incident=str(data["incident"]),
            cause=str(data["cause"]),
            for_good=bool(data["for_good"]),
            failures=int(data["failures"]),
            left_out=int(data["left_out"]),
            parts=tuple(
                Part(
                    rank=int(part["rank"]),
                    guilty=bool(part["guilty"]),
                    fingerprint=str(part["fingerprint"]),
                    ids=tuple(part["ids"]),
                    samples=tuple(part["samples"]),
                    indices=tuple(int(index) for index in part["indices"]),
                )
                for part in data["ranks"]
            ),
        )


class SkippedBatches:
    """The list of batches to leave out, the same on every rank; rank 0 keeps it on disk.

    One process leaves out whatever it recognises. Several ranks have to stay in step, so they leave out
    the same position on all of them or on none: where one is on the list, they ask each other whether the
    batch that the fault began in is there again. Elsewhere they do not talk.
    """

    def __init__(self, directory: RunDirectory, consensus: Consensus, disk: Disk | None = None) -> None:
        self._disk = disk or Disk()
        self.entries: list[SkippedBatch] = []
        self._from_before: list[SkippedBatch] = []
        """What an earlier process left out in its epoch, until it is clear that this one goes on there."""
        self._sampler: SkipBatches | None = None
        """What the batches are drawn through, if it can leave some out by itself."""
        self._path = directory.path / FILE
        self._consensus = consensus

    def __bool__(self) -> bool:
        return bool(self.entries)

    def load(self) -> None:
        """Take up the list that an earlier process left; called on every rank.

        Raises:
            StoreError: if a newer version wrote it; on every rank.
        """
        found: list[SkippedBatch] = []
        refusal: str | None = None
        if self._consensus.rank == 0:
            try:
                found = read_entries(self._path)
            except StoreError as error:
                refusal = str(error)
        refusal, found = self._consensus.gather((refusal, found))[0]
        if refusal is not None:
            raise StoreError(refusal)
        self.entries = [entry for entry in found if entry.for_good]
        self._from_before = [entry for entry in found if not entry.for_good]

    def take_up(self) -> None:
        """Hear that the run goes on from where the earlier process was, on the same epoch's data."""
        self.entries += self._from_before
        self._from_before = []

    def add(self, entry: SkippedBatch, *, give_up_after: int) -> SkippedBatch:
        """Put a batch on the list, or count one more failure of one that is on it; called on every rank.

        One that failed in `give_up_after` epochs is left out for good: it is not the state any more.
        """
        known = next((one for one in self.entries if one.is_same_as(entry)), None)
        if known is not None:
            self.entries.remove(known)
            entry.failures = known.failures + (entry.epoch != known.epoch)
            entry.left_out = known.left_out
            entry.for_good = entry.for_good or known.for_good
        entry.for_good = entry.for_good or entry.failures >= give_up_after
        self.entries.append(entry)
        passing = [one for one in self.entries if not one.for_good]
        for one in passing[:-_MOST_PASSING]:
            self.entries.remove(one)
        return entry

    def save(self) -> None:
        """Write the list to disk, whole or not at all; rank 0 does, and only reports it if that fails."""
        if self._consensus.rank:
            return
        try:
            self._disk.attempt("the list of batches to leave out", self._write)
        except (TypeError, ValueError) as error:
            logger.error(  # noqa: TRY400 - the reason is in the message
                "the list of batches to leave out could not be written, it is in memory only: %s", error
            )

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"schema": SCHEMA, "batches": [one.as_dict() for one in self.entries]})

    def without(
        self, drawn: Iterable[tuple[int, B]], run: Run, sampler: SkipBatches | None = None
    ) -> Iterator[tuple[int, B]]:
        """Yield numbered batches without those on the list, which count as drawn all the same.

        Args:
            drawn: the loader's batches, with their number in the epoch.
            run: the run, whose position in the data is kept right.
            sampler: what they are drawn through, if it leaves out some by itself.
        """
        self.draw_through(sampler, run)
        in_a_row = 0
        for count, (position, batch) in enumerate(drawn):
            number = position if sampler is None else sampler.number_of(count)
            run.data["batches"] += number - run.data["batch"]  # what the sampler has left out
            run.data["batch"] = number
            entry = (
                self.find(run.data["epoch"], number, batch, in_place=run.decides_late)
                if self.entries
                else None
            )
            if entry is None or in_a_row >= _MOST_IN_A_ROW:
                in_a_row = 0
                yield number, batch
                continue
            in_a_row += 1
            entry.left_out += 1
            run.data["batch"] = number + 1
            run.data["batches"] += 1
            if self._consensus.rank == 0:
                how_long = "for good" if entry.for_good else "in this epoch"
                logger.warning(
                    "batch %d of epoch %d is left out %s: it led to %s",
                    number,
                    run.data["epoch"],
                    how_long,
                    entry.incident,
                )
            self.save()
        if sampler is not None:  # what was left out at the very end
            run.data["batches"] += sampler.drawn - run.data["batch"]

    def draw_through(self, sampler: SkipBatches | None, run: Run) -> None:
        """Hear what the batches of this epoch are drawn through, if it can leave some out by itself."""
        self._sampler = sampler
        if sampler is not None:
            sampler.attend(run)

    def drawn_by(self, position: tuple[int, int]) -> tuple[Any, ...]:
        """Return what the records of a batch of this epoch were drawn by; nothing if that is not known."""
        return () if self._sampler is None else self._sampler.drawn_by(position[1])

    def expects(self, epoch: int, number: int) -> bool:
        """Say whether a batch that was left out for this epoch only was drawn here before."""
        return any((one.epoch, one.batch) == (epoch, number) and not one.for_good for one in self.entries)

    def was_drawn_at(self, epoch: int, number: int) -> bool:
        """Say whether one on the list was drawn at this place, so that it is going to be left out there."""
        return any((one.epoch, one.batch) == (epoch, number) for one in self.entries)

    def find(
        self,
        epoch: int,
        number: int,
        batch: Any,
        *,
        in_place: bool = False,
    ) -> SkippedBatch | None:
        """Return the entry for which a micro-batch is to be left out; called on every rank, in step.

        `in_place` has a batch that lies on a device compared only where one of the list was drawn, in
        whichever epoch: each comparison waits for the device, which a loop that never waits must not.
        """
        content = Content(batch)
        concerned = [entry for entry in self.entries if entry.concerns(epoch, number)]
        if in_place and concerned and content.waits:
            concerned = [entry for entry in concerned if entry.batch == number]
        if self._consensus.world_size == 1:
            return next((entry for entry in concerned if entry.is_in(content, number)), None)
        here = [entry for entry in concerned if entry.batch == number]
        if not here:
            return None
        told = torch.tensor([int(entry.is_in(content, number)) for entry in here], dtype=torch.int32)
        agreed = self._consensus.agree(told).tolist()
        return next((entry for entry, found in zip(here, agreed, strict=True) if found), None)


def read_entries(path: Path) -> list[SkippedBatch]:
    """Return the entries of a list on disk; none if there is no list, or none that can be read (logged).

    Raises:
        StoreError: if a newer version wrote it.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        check_schema(data, path)
        return [SkippedBatch.from_dict(entry) for entry in data["batches"]]
    except FileNotFoundError:
        return []
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.error("%s cannot be read, so nothing is left out: %s", path, error)  # noqa: TRY400 - in the text
        return []
