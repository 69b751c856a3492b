"""The epoch in flight: how a restarted run gets to the same place in the data again."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from gradsentinel.data.sampler import sampler_of
from gradsentinel.state.rng import RngState

logger = logging.getLogger("gradsentinel")

B = TypeVar("B")


class EpochStart:
    """What decides in which order a loader is going to give its batches.

    These are the global random states when its iteration begins (a shuffling DataLoader draws its seed
    from them), those of the loader's own generators, and what a loader with a state_dict (torchdata's
    StatefulDataLoader) says itself. A sampler that shuffles by epoch number needs its `set_epoch`.
    """

    def __init__(self, loader: Iterable[Any], device_types: Iterable[str] = ()) -> None:
        self._loader = loader
        self._rng = RngState.capture(device_types)
        self._generators = [generator.get_state() for generator in _generators(loader)]

    @classmethod
    def of(cls, loader: Iterable[Any], saved: Mapping[str, Any]) -> EpochStart:
        """Return the start of an epoch that an earlier process began."""
        start = cls(loader)
        if "rng" in saved:
            start._rng = RngState.from_tree(saved["rng"])
            start._generators = list(saved.get("generators", ()))
        return start

    def state(self) -> dict[str, Any]:
        """Return what `go_on` needs, for an archive."""
        state: dict[str, Any] = {"rng": self._rng.to_tree(), "generators": list(self._generators)}
        if _has_state(self._loader):
            state["loader"] = self._loader.state_dict()  # type: ignore[attr-defined]
        return state


def go_on(
    loader: Iterable[B], saved: Mapping[str, Any], done: int, device_types: Iterable[str] = ()
) -> Iterator[B]:
    """Return an iterator over the loader's batches after the first `done` of an epoch that was begun before.

    A loader that has a state takes its own back. Any other is made to begin as it did then. Through a
    `SkipBatches` sampler nothing is read; else the batches are, and left out. The random states are
    afterwards what they are now.
    """
    if _has_state(loader) and "loader" in saved:
        loader.load_state_dict(saved["loader"])  # type: ignore[attr-defined]
        return iter(loader)
    before = RngState.capture(device_types)
    if "rng" in saved:
        RngState.from_tree(saved["rng"]).restore()
        for generator, state in zip(_generators(loader), saved.get("generators", ()), strict=False):
            generator.set_state(state)
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


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators of a DataLoader and of its samplers, each once."""
    found: dict[int, torch.Generator] = {}
    owner = loader
    for _ in range(4):  # DataLoader, batch sampler, sampler, and one that wraps it
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        inner = [getattr(owner, name, None) for name in ("batch_sampler", "sampler")]
        owner = next((one for one in inner if one is not None), None)  # one may have no length, nor a truth
    return list(found.values())


def _has_state(loader: Any) -> bool:
    able = getattr(loader, "use_stateful_dataloader", True)  # Accelerate's loaders always have the methods
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and bool(able)
