"""Counts what a variant adds to a step: operators, waits for the device, and bytes that are read.

A dispatch mode sees every operator of the whole step, forward and backward pass included; what the plain
loop does is subtracted. On a CPU nothing waits, so a wait is what would wait on a device: an operator whose
result the host needs, or a tensor that Python reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from overhead import PLAIN, SETTINGS, field
from race import Variant, warm_up
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workload import batches

from gradsentinel.measures.mailbox import Letter

WARM_UP = 14
"""The first steps look at the training state, too."""
STEPS = 3
_NO_LAUNCH = {
    *(
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "detach",
        "lift_fresh",
        "alias",
    ),
    *("_local_scalar_dense", "resize_", "set_", "is_same_size", "sym_size", "sym_numel"),
}
_WAITS = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero"),
    *("bincount", "allclose"),
}
_READS = ("tolist", "numpy", "cpu")
"""What Python calls on a tensor and no dispatch mode sees on a CPU."""


class Counting(TorchDispatchMode):
    """Counts while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.waits = 0
        self.bytes = 0
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.waits += name in _WAITS
        if name not in _NO_LAUNCH and not func.is_view:
            self.launches += 1
            self.by_name[name] += 1
            tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Counting]:
    """Count the operators and reads in the block.

    A letter that was posted two steps before has arrived, so reading it is no wait.
    """
    mode = Counting()
    originals = {name: getattr(Tensor, name) for name in _READS}
    read = Letter.read
    quiet = False

    def counted(name: str) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            mode.waits += not quiet
            return originals[name](tensor, *args, **kwargs)

        return call

    def arrived(letter: Letter) -> Any:
        nonlocal quiet
        quiet = True
        try:
            return read(letter)
        finally:
            quiet = False

    try:
        for name in _READS:
            setattr(Tensor, name, counted(name))
        Letter.read = arrived
        with mode:
            yield mode
    finally:
        Letter.read = read
        for name, original in originals.items():
            setattr(Tensor, name, original)


def count(variant: Variant) -> dict[str, float]:
    """Return launches, waits and bytes of one step in the middle of a run."""
    inputs = batches(64)
    warm_up([variant], inputs, WARM_UP)
    with counting() as counts:
        for number in range(STEPS):
            variant.step(inputs[number], inputs[number])
    return {
        "launches": counts.launches / STEPS,
        "waits": counts.waits / STEPS,
        "bytes": counts.bytes / STEPS,
    }


def measure() -> dict[str, dict[str, dict[str, float]]]:
    """Return what each variant adds to the step of its baseline, by how the loop clips."""
    found = {}
    for setting in ("clip", "no clip"):
        variants: Sequence[Variant] = field(SETTINGS[setting])
        counts = {variant.name: count(variant) for variant in variants}
        for variant in variants:
            variant.finish()
        found[setting] = {
            variant.name: {
                key: counts[variant.name][key] - counts[variant.baseline][key] for key in counts[variant.name]
            }
            for variant in variants
            if variant.name != variant.baseline
        }
        found[setting][PLAIN] = counts[PLAIN]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for label, variants in measure().items():
        for name, numbers in variants.items():
            print(f"{label:8} {name:50} {numbers}")
