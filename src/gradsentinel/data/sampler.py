"""A batch sampler that does not even draw what is to be left out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

from gradsentinel.data.skipped import FILE, SkippedBatch, read_entries
from gradsentinel.state.rng import RngState

if TYPE_CHECKING:
    from gradsentinel.run import Run

_REMEMBERED = 4096
"""Of so many batches the indices are remembered: more than any loader draws ahead."""


class SkipBatches(Sampler[list[int]]):
    """Wraps a batch sampler and leaves out the batches and records that a run has put on its list.

        loader = DataLoader(data, batch_sampler=SkipBatches(BatchSampler(sampler, 32, drop_last=True)))
        for batch in sentinel.steps(loader): ...

    Left out are, for good, the records that are known to be bad, wherever a shuffle puts them; and batches
    of exactly the records that a batch on the list had, as after a restart in the middle of an epoch. Batches
    keep their sizes and their number: in a bad record's place comes a good one of the same batch once more,
    for a sampler may have put those together that fit together. A batch of nothing but bad records is left
    out. `Sentinel.steps` tells it of the run's list, and counts what it leaves out as drawn. On several
    ranks a batch is left out on all of them or on none, and one that would be empty repeats the one
    before (the same number of its records), so that all ranks draw the same number.

    Args:
        batch_sampler: yields the indices of each batch; may have a state_dict, as those of torchdata.
        run_dir: whose list to use without a Sentinel, from `skipped-batches.json`; only what is left out
            for good counts then.
    """

    def __init__(
        self, batch_sampler: Iterable[Sequence[int]], *, run_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self.batch_sampler = batch_sampler
        self._file = None if run_dir is None else Path(run_dir) / FILE
        self._run: Run | None = None
        self._start = 0
        self._given = 0
        self._drawing: _Drawing | None = None

    @property
    def sampler(self) -> Any:
        """The sampler inside, which decides the order of the records."""
        return getattr(self.batch_sampler, "sampler", None)

    def __iter__(self) -> Iterator[list[int]]:
        self._drawing = _Drawing(self)
        return self._drawing

    def __len__(self) -> int:
        """Return the number of batches before anything is left out."""
        return len(self.batch_sampler)  # type: ignore[arg-type] # the DataLoader asks only if it has one

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the first sampler inside that counts them."""
        inner: Any = self.batch_sampler
        while inner is not None and not hasattr(inner, "set_epoch"):
            inner = getattr(inner, "batch_sampler", getattr(inner, "sampler", None))
        if inner is not None:
            inner.set_epoch(epoch)

    def attend(self, run: Run) -> None:
        """Use the list of a run, from the next iteration on."""
        self._run = run

    def start_at(self, number: int, *, given: int = 0) -> None:
        """Let the next iteration begin with this batch of the epoch, without drawing those before.

        Args:
            number: of the batch, whether those before were left out or not.
            given: so many of those before were given, and whoever draws is going to pass over as many, as
                Accelerate's `skip_first_batches` does; in their places come empty ones.
        """
        self._start, self._given = number, given

    def begin(self) -> None:
        """Have the iteration at its start now, and not when the first batch is drawn from it.

        A DataLoader draws random numbers of its own between the two, so their order would be another one.
        """
        if self._drawing is not None:
            self._drawing.begin()

    @property
    def drawn(self) -> int:
        """How many batches of this epoch were drawn or left out."""
        return self._drawing.number if self._drawing is not None else 0

    @property
    def left_out(self) -> int:
        """How many batches of this epoch were left out so far."""
        return self._drawing.left_out if self._drawing is not None else 0

    def number_of(self, count: int) -> int:
        """Return the number in the epoch of the batch that the loader has given as its `count`-th."""
        return self._drawing.number_of(count) if self._drawing is not None else count

    def drawn_by(self, number: int) -> tuple[Any, ...]:
        """Return what the records of a batch were drawn by, whatever that is, if it was drawn lately."""
        return self._drawing.drawn_by(number) if self._drawing is not None else ()

    def take_start(self) -> tuple[int, int]:
        """Return where the iteration that draws now is to begin, and `given`, which counts only once."""
        start = self._start, self._given
        self._start = self._given = 0
        return start

    def entries(self) -> tuple[list[SkippedBatch], int | None, int, int]:
        """Return what is to be left out, the epoch if it is known, this rank, and the number of ranks."""
        if self._run is not None:
            run = self._run
            return run.skipped.entries, run.data["epoch"], run.rank.rank, run.consensus.world_size
        found = read_entries(self._file) if self._file is not None else []
        return [entry for entry in found if entry.for_good], None, 0, 1


class _Drawing(Iterator[list[int]]):
    """One iteration; has a state: the number of batches drawn, that of the sampler inside, its random origin.

    A DataLoader with workers makes two of them and draws from the second only, so nothing is settled before
    one is drawn from.
    """

    def __init__(self, owner: SkipBatches) -> None:
        self._owner = owner
        self._inner = iter(owner.batch_sampler)
        self._origin: dict[str, Any] | None = None
        """The random states at its first draw, from which samplers without a state take their seed."""
        self.number = 0
        self.left_out = 0
        self._numbers: list[int] = []
        self._indices: dict[int, tuple[int, ...]] = {}
        self._before: list[int] = []
        self._passed_over = 0
        """So many empty batches are due, for somebody who is going to pass over them."""

    def __next__(self) -> list[int]:
        self.begin()
        if self._passed_over:
            self._passed_over -= 1
            return []
        while True:
            drawn = list(next(self._inner))
            number = self.number
            self.number += 1
            kept = self._kept(number, drawn)
            if kept:
                break
            self.left_out += 1
        self._numbers.append(number)
        self._indices[number] = tuple(kept)
        self._indices.pop(number - _REMEMBERED, None)
        self._before = kept
        return kept

    def begin(self) -> None:
        if self._origin is None:
            self._origin = {
                "rng": RngState.capture().to_tree(),
                "generators": [generator.get_state() for generator in generators_of(self._owner)],
            }
            start, given = self._owner.take_start()
            self.pass_over(start)
            self._numbers = [0] * given
            self._passed_over = given

    def number_of(self, count: int) -> int:
        return self._numbers[count] if count < len(self._numbers) else self.number

    def drawn_by(self, number: int) -> tuple[Any, ...]:
        return self._indices.get(number, ())

    def pass_over(self, count: int) -> None:
        """Go on behind so many batches, whether they would have been left out or not."""
        for _ in itertools.islice(self._inner, count):
            self.number += 1

    def state_dict(self) -> dict[str, Any]:
        inner = getattr(self._inner, "state_dict", None)
        state = {"number": self.number, "inner": None if inner is None else inner()}
        return state if self._origin is None else {**state, "origin": self._origin}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._origin = state.get("origin")
        before = RngState.capture()
        if self._origin is not None:  # the order is to be drawn as it was then
            RngState.from_tree(self._origin["rng"]).restore()
            for generator, then in zip(generators_of(self._owner), self._origin["generators"], strict=False):
                generator.set_state(then)
        try:
            load = getattr(self._inner, "load_state_dict", None)
            if load is not None and state["inner"] is not None:
                load(state["inner"])
                self.number = state["number"]
            else:
                self.pass_over(state["number"])
        finally:
            before.restore()

    def _kept(self, number: int, drawn: list[int]) -> list[int]:
        """Return what is left of a batch; nothing if it is to be left out."""
        entries, epoch, rank, ranks = self._owner.entries()
        if not entries:
            return drawn
        bad = {i for one in entries if one.for_good for part in one.parts for i in part.bad_indices()}
        for entry in entries:
            if epoch is not None and not entry.concerns(epoch, number):
                continue
            alone = [part.indices for part in entry.guilty if not part.bad_indices()]
            mine = [part.indices for part in entry.parts if part.rank == rank]
            # On several ranks the same position: in another order it is another batch, on all of them.
            if tuple(drawn) in (alone if ranks == 1 else mine if alone and entry.batch == number else []):
                entry.left_out += 1
                return []
        good = [index for index in drawn if index not in bad]
        if not good and ranks > 1:
            good = self._before or drawn
        return _in_place(drawn, good, bad)


def parts_of(loader: Any) -> Iterator[Any]:
    """Yield a loader, its batch sampler, the sampler in it, and those that may be wrapped around them."""
    owner = loader
    for _ in range(6):
        if owner is None:
            return
        yield owner
        inner = [getattr(owner, name, None) for name in ("batch_sampler", "sampler")]
        owner = next((one for one in inner if one is not None), None)  # one may have no length, nor a truth


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators of a DataLoader, or a sampler, and of the samplers inside, each once."""
    found = {
        id(part.generator): part.generator
        for part in parts_of(loader)
        if isinstance(getattr(part, "generator", None), torch.Generator)
    }
    return list(found.values())


def _in_place(drawn: list[int], good: list[int], bad: Collection[int]) -> list[int]:
    """Return the batch with a good record in the place of each bad one; nothing if there are none."""
    spare = itertools.cycle(good)
    return [next(spare) if index in bad else index for index in drawn] if good else []


def sampler_of(loader: object) -> SkipBatches | None:
    """Return the SkipBatches that a DataLoader draws through, if it has one."""
    found = getattr(loader, "batch_sampler", None)
    return found if isinstance(found, SkipBatches) else None
