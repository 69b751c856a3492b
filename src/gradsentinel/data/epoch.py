"""An epoch that was begun: how a run gets to the same place in the data again, or begins it anew."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from gradsentinel.data.sampler import generators_of, parts_of, sampler_of
from gradsentinel.state.rng import RngState
from gradsentinel.testing import record_swallowed

logger = logging.getLogger("gradsentinel")

B = TypeVar("B")


class EpochStart:
    """What decides in which order a loader is going to give its batches.

    These are the global random states when its iteration begins (a shuffling DataLoader draws its seed
    from them), those of the loader's own generators, the epoch that its sampler was told, and what a loader
    with a state_dict (torchdata's StatefulDataLoader) says itself.

    Args:
        loader: before it is iterated over.
        device_types: accelerators whose random states belong to it.
        whole: ask a loader with a state_dict now, so that it can be made to begin like this again. Without
            it the start is only good for going on from a later place.
    """

    def __init__(
        self, loader: Iterable[Any], device_types: Iterable[str] = (), *, whole: bool = False
    ) -> None:
        self._loader = loader
        self._rng = RngState.capture(device_types)
        self._generators = [generator.get_state() for generator in generators_of(loader)]
        self._epoch = told_epoch(loader)
        self._workers_wait = _workers_wait(loader)
        self._at_start: Any = None
        if whole and _has_state(loader):
            try:
                self._at_start = loader.state_dict()  # type: ignore[attr-defined]
            except Exception as error:  # somebody else's loader must not end a sound run
                logger.exception("%s does not say where it is at its start", type(loader).__name__)
                record_swallowed(error)

    @classmethod
    def of(cls, loader: Iterable[Any], saved: Mapping[str, Any]) -> EpochStart:
        """Return the start of an epoch that an earlier process began."""
        start = cls(loader)
        if "rng" in saved:
            start._rng = RngState.from_tree(saved["rng"])
            start._generators = list(saved.get("generators", ()))
            start._epoch = saved.get("epoch")
            start._workers_wait = bool(saved.get("workers_wait", False))
        start._at_start = saved.get("loader")
        return start

    def state(self, *, at_start: bool = False) -> dict[str, Any]:
        """Return what `go_on` needs, for an archive: to go on from where the loader is, or from its start."""
        state: dict[str, Any] = {"rng": self._rng.to_tree(), "generators": list(self._generators)}
        if self._epoch is not None:
            state["epoch"] = self._epoch
        if self._workers_wait:
            state["workers_wait"] = True
        if at_start and self._at_start is not None:
            state["loader"] = self._at_start
        elif _has_state(self._loader) and not at_start:
            state["loader"] = self._loader.state_dict()  # type: ignore[attr-defined]
        return state

    def is_now(self, now: RngState) -> bool:
        """Say whether the global generators are where they were when it began."""
        return _alike(self._rng.to_tree(), now.to_tree())


def go_on(
    loader: Iterable[B], saved: Mapping[str, Any], done: int, device_types: Iterable[str] = ()
) -> Iterator[B]:
    """Return an iterator over the loader's batches after the first `done` of an epoch that was begun before.

    A loader that has a state takes its own back. Any other is made to begin as it did then. Through a
    `SkipBatches` sampler nothing is read; else the batches are, and left out. The random states are
    afterwards what they are now; at the start of an epoch, what they were then.
    """
    before = RngState.capture(device_types)
    with_state = _has_state(loader) and "loader" in saved
    if "rng" in saved:
        if not with_state:
            _ready_workers(loader, wait=bool(saved.get("workers_wait", False)))
        RngState.from_tree(saved["rng"]).restore()
        for generator, state in zip(generators_of(loader), saved.get("generators", ()), strict=False):
            generator.set_state(state)
    tell_epoch(loader, saved.get("epoch"))
    if with_state:
        _warn_of_order(loader, done)
        loader.load_state_dict(saved["loader"])  # type: ignore[attr-defined]
        iterator = iter(loader)
        if done:
            before.restore()
        return iterator
    sampler = sampler_of(loader)
    if sampler is not None:  # it need not read them, and leaves out some
        sampler.start_at(done)
    iterator = iter(loader)
    if not done:
        return iterator  # the order is drawn with the first batch: so it was then
    if sampler is not None:
        sampler.begin()
    else:
        logger.info("reading past the %d batches that the run has seen in this epoch", done)
        for _ in itertools.islice(iterator, done):  # the data may have become shorter
            pass
    before.restore()
    return iterator


def begin_again(
    loader: Iterable[B], start: EpochStart, first: int, device_types: Iterable[str] = ()
) -> Iterator[B]:
    """Return an iterator over an epoch that this process has begun before, in the same order.

    The random states are afterwards what beginning it makes of those there are now, as long as these are
    the same as then. If they are others (a batch in between was left out, and so were its draws) the order
    is still that of then, and they stay what they are.
    """
    now = RngState.capture(device_types)
    iterator = go_on(loader, start.state(at_start=True), first, device_types)
    if first or start.is_now(now):
        return iterator
    begun = list(itertools.islice(iterator, 1))  # only then the order is drawn
    now.restore()
    return itertools.chain(begun, iterator)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


def told_epoch(loader: Any) -> int | None:
    """Return the epoch that a sampler which shuffles by its number was told last (a DistributedSampler)."""
    for part in parts_of(loader):
        epoch = getattr(part, "epoch", None)
        if hasattr(part, "set_epoch") and isinstance(epoch, int):
            return epoch
    return None


def tell_epoch(loader: Any, epoch: int | None) -> None:
    """Tell that sampler an epoch, if it has another one; None: there was nothing to be told."""
    for part in parts_of(loader):
        told = getattr(part, "epoch", None)
        if epoch is not None and hasattr(part, "set_epoch") and isinstance(told, int):
            if told != epoch:
                part.set_epoch(epoch)
            return


def _warn_of_order(loader: Any, done: int) -> None:
    """Say so if the loader's state does not hold the order: torch's samplers in its own BatchSampler."""
    parts = list(parts_of(loader))
    shuffles = any(
        type(part) in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler) for part in parts
    )
    if done and shuffles and any(type(part) is BatchSampler for part in parts) and sampler_of(loader) is None:
        logger.warning(
            "the rest of this epoch comes in another order than before the restart, so some records come "
            "twice and others not at all: a %s does not save the order of torch's own samplers; wrap its "
            "batch sampler in gradsentinel.SkipBatches, or use torchdata.stateful_dataloader.sampler",
            type(loader).__name__,
        )


def _workers_wait(loader: Any) -> bool:
    """Say whether persistent workers are there already: a DataLoader draws the seed for them only once."""
    return (
        bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is not None
    )


def _ready_workers(loader: Any, *, wait: bool) -> None:
    """Have persistent workers wait, or be still to be started, as when the epoch was begun."""
    if _workers_wait(loader) == wait or not getattr(loader, "persistent_workers", False):
        return
    if wait:
        iter(loader)  # starts them; what they fetch now is left aside
    else:
        loader._iterator = None


def _has_state(loader: Any) -> bool:
    able = getattr(loader, "use_stateful_dataloader", True)  # Accelerate's loaders always have the methods
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and bool(able)
