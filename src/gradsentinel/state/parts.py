"""Which archives are the parts of one state: one of each rank that saved it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gradsentinel.state.archive import list_archives, read_manifest

SNAPSHOT_KIND = "snapshot"


@dataclass(frozen=True, slots=True)
class SavedState:
    """The archives of one state."""

    step: int
    iteration: int
    paths: tuple[Path, ...]
    """By rank."""


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


def orphans(snapshots: Path, ranks: int) -> Iterator[tuple[tuple[int, int], Path]]:
    """Yield the archives of ranks that there are no more, with the steps attempted and done until then."""
    yield from ((mark, path) for rank, mark, _, path in _archives(snapshots) if rank >= ranks)


def _archives(snapshots: Path) -> Iterator[tuple[int, tuple[int, int], int, Path]]:
    for path in list_archives(snapshots, SNAPSHOT_KIND):
        meta = read_manifest(path, kind=SNAPSHOT_KIND).meta
        _, _, rank = path.name.partition("-rank")
        number = rank.partition("-")[0]
        if path.name.startswith("step-") and number.isdigit() and isinstance(meta, Mapping):
            yield int(number), (int(meta["iteration"]), int(meta["step"])), int(meta["world_size"]), path
