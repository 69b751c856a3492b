"""The random number generators of a process: captured, restored, stored."""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class RngState:
    """The state of the random number generators at one moment; what it holds is never changed.

    Generators that the program made itself (``torch.Generator``, ``numpy.random.Generator``) are not in it.
    """

    torch_cpu: Tensor
    """PyTorch's CPU generator, a uint8 tensor."""

    python: tuple[Any, ...]
    """As of ``random.getstate()``."""

    numpy: Mapping[str, Any] | None = None
    """NumPy's global generator; None if ``numpy.random`` was not imported then."""

    devices: tuple[tuple[str, Tensor], ...] = ()
    """Each accelerator's name, such as ``cuda:0``, and the state of its generator, a uint8 tensor."""

    @classmethod
    def capture(cls, devices: Iterable[torch.device | str] = ()) -> "RngState":
        """Read the state of the generators; takes some ten microseconds and waits for no device.

        Args:
            devices: accelerators to include, ``"cuda"`` for all of a type, ``"cuda:1"`` for one. A type that
                is not there, or not yet initialised by the program, is left out and stays untouched.
        """
        numpy = sys.modules.get("numpy.random")
        accelerators = {str(device): module.get_rng_state(device) for device, module in _initialised(devices)}
        return cls(
            torch_cpu=torch.get_rng_state(),
            python=random.getstate(),
            numpy=None if numpy is None else numpy.get_state(legacy=False),
            devices=tuple(accelerators.items()),
        )

    def restore(self) -> tuple[str, ...]:
        """Put the generators back, and return the names of the devices that are not there to be put back.

        A device that is not initialised yet gets its state when it is. NumPy's generator is left alone
        if ``numpy.random`` is not imported.
        """
        torch.set_rng_state(self.torch_cpu)
        random.setstate(self.python)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None and self.numpy is not None:
            numpy.set_state(self.numpy)
        missing = []
        for name, state in self.devices:
            found = _found(name)
            if found is None or (found[0].index or 0) >= found[1].device_count():
                missing.append(name)
            else:
                device, module = found
                module.set_rng_state(state, device)
        return tuple(missing)

    def to_tree(self) -> dict[str, Any]:
        """Return the state as a nest that `gradsentinel.tree.flatten` can store."""
        return {
            "torch_cpu": self.torch_cpu,
            "python": self.python,
            "numpy": self.numpy,
            "devices": dict(self.devices),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> "RngState":
        """Rebuild what `to_tree` returned, from tensors on any device.

        Raises:
            ValueError: the nest is not one of a random number state.
        """
        try:
            version, numbers, gauss = tree["python"]
            return cls(
                torch_cpu=tree["torch_cpu"].cpu(),
                python=(version, tuple(numbers), gauss),
                numpy=tree["numpy"],
                devices=tuple((name, state.cpu()) for name, state in tree["devices"].items()),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"this is not the state of random number generators: {error!r}") from error


@contextmanager
def preserved_rng(devices: Iterable[torch.device | str] = ()) -> Iterator[RngState]:
    """Restore the generators on leaving the block, however it is left; yields their state on entering."""
    state = RngState.capture(devices)
    try:
        yield state
    finally:
        state.restore()


def _found(given: torch.device | str) -> tuple[torch.device, Any] | None:
    """Return the device and its module (``torch.cuda``, ``torch.npu``, ...) if this process has one."""
    try:
        device = torch.device(given)
    except RuntimeError:  # a type whose backend has not been imported and that torch does not know
        return None
    module = getattr(torch, device.type, None)
    has_generators = hasattr(module, "set_rng_state") and hasattr(module, "is_initialized")
    return (device, module) if has_generators else None


def _initialised(devices: Iterable[torch.device | str]) -> Iterator[tuple[torch.device, Any]]:
    for device, module in filter(None, map(_found, devices)):
        if not module.is_initialized():
            continue
        if ":" in str(device):
            yield device, module
        else:
            for index in range(module.device_count()):
                yield torch.device(device.type, index), module
