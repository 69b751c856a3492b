"""Which archives are the parts of one state: one of each rank that saved it.

A run's own states are archives side by side, which their ranks name by themselves. What
torch.distributed.checkpoint has saved is a directory of them, which gets its name when all are there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradsentinel.state.archive import ArchiveError, list_archives, read_manifest

SNAPSHOT_KIND = "snapshot"
CHECKPOINT_KIND = "checkpoint"
_CHECKPOINT = re.compile(r"step-\d+")


@dataclass(frozen=True, slots=True)
class SavedState:
    """The archives of one state."""

    step: int
    iteration: int
    paths: tuple[Path, ...]
    """By rank."""
    kind: str = SNAPSHOT_KIND


def complete_states(snapshots: Path) -> list[SavedState]:
    """Return the states in a directory of which all parts are there, oldest first."""
    found: dict[tuple[int, int, int], dict[int, Path]] = {}
    for rank, mark, size, path in _archives(snapshots):
        found.setdefault((*mark, size), {})[rank] = path
    return [
        SavedState(step, iteration, tuple(paths[rank] for rank in range(size)))
        for (iteration, step, size), paths in sorted(found.items())
        if set(paths) >= set(range(size))
    ]


def checkpoint_name(step: int) -> str:
    """Return the name of the directory of a state that torch.distributed.checkpoint has saved."""
    return f"step-{step:09d}"


def part_name(rank: int) -> str:
    """Return the name of a rank's archive in it."""
    return f"rank{rank}"


def checkpoints(snapshots: Path) -> list[SavedState]:
    """Return the whole states that torch.distributed.checkpoint has saved in a directory, oldest first."""
    found = []
    for path in sorted(snapshots.glob("step-*")):
        if not _CHECKPOINT.fullmatch(path.name) or not path.is_dir():
            continue
        parts = {one.name: one for one in list_archives(path, CHECKPOINT_KIND)}
        with suppress(ArchiveError):  # what somebody has taken away
            meta = read_manifest(path / part_name(0), kind=CHECKPOINT_KIND, schema=None).meta
            names = [part_name(rank) for rank in range(int(meta["world_size"]))]
            if set(names) <= set(parts):
                ordered = tuple(parts[name] for name in names)
                found.append(SavedState(int(meta["step"]), int(meta["iteration"]), ordered, CHECKPOINT_KIND))
    return sorted(found, key=lambda one: one.step)


def orphans(snapshots: Path, ranks: int) -> Iterator[tuple[tuple[int, int], Path]]:
    """Yield the archives of ranks that there are no more, with the steps attempted and done until then."""
    yield from ((mark, path) for rank, mark, _, path in _archives(snapshots) if rank >= ranks)


def _archives(snapshots: Path) -> Iterator[tuple[int, tuple[int, int], int, Path]]:
    for path in list_archives(snapshots, SNAPSHOT_KIND):
        try:
            meta = read_manifest(path, kind=SNAPSHOT_KIND).meta
        except ArchiveError:
            if path.exists():
                raise
            continue  # its rank has taken it away meanwhile
        _, _, rank = path.name.partition("-rank")
        number = rank.partition("-")[0]
        if path.name.startswith("step-") and number.isdigit() and isinstance(meta, Mapping):
            yield int(number), (int(meta["iteration"]), int(meta["step"])), int(meta["world_size"]), path
