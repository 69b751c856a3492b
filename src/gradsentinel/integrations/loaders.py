"""A framework's DataLoader, drawn through a sampler that leaves out what is on the run's list."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from gradsentinel.data.sampler import SkipBatches, sampler_of
from gradsentinel.integrations.wraps import Wraps


class Between(SkipBatches):
    """A `SkipBatches` that nobody asked for: in everything else it is the batch sampler it stands before."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


def draw_through(loader: Any, wraps: Wraps) -> SkipBatches | None:
    """Return the SkipBatches that a loader draws through, put there if need be until the wraps are undone.

    To be called before the loader is iterated over: workers draw ahead. None for loaders that choose no
    batches by index (iterable data sets), that have a state of their own (torchdata), or whose batch sampler
    is none of torch's kind. The order of the batches stays as it is.
    """
    own = sampler_of(loader)
    inside = _drawn_from(loader)
    if own is not None or not isinstance(inside, DataLoader) or _has_state(loader):
        return own
    sampler = vars(inside).get("batch_sampler")
    if not isinstance(sampler, BatchSampler):
        return None
    between = Between(sampler)
    wraps.set(inside, "batch_sampler", between)
    if inside is not loader and "batch_sampler" in vars(loader):  # Fabric's has copies of the attributes
        wraps.set(loader, "batch_sampler", between)
    return between


def _drawn_from(loader: Any) -> Any:
    """Return the loader inside a tool's own; None if that gives parts of its batches to other ranks."""
    if any(kind.__name__ == "DataLoaderDispatcher" for kind in type(loader).__mro__):
        return None
    if any(kind.__name__ == "_FabricDataLoader" for kind in type(loader).__mro__):
        return loader._dataloader
    return getattr(loader, "base_dataloader", loader)  # Accelerate's


def _has_state(loader: Any) -> bool:
    able = getattr(loader, "use_stateful_dataloader", True)  # Accelerate's loaders always have the methods
    return hasattr(loader, "load_state_dict") and bool(able)
