"""The random number generators of a process: captured, restored, stored."""

import _random
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import string_at
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
            python=_python_state(),
            numpy=None if numpy is None else _numpy_state(numpy),
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
        """Return the state as a nest that `gradsentinel.state.tree.flatten` can store."""
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


class _Twister:
    """A global Mersenne Twister, whose state takes long to read and rarely changes in a training loop.

    Python and NumPy give its 624 words one by one, as numbers: tens of microseconds, with making and freeing
    them. A look into its memory tells whether they are what they were: each draw moves the place among them,
    and when all were used they are all replaced, so its place and its first eight words tell one state from
    every other that a program gets to. If that memory did not look as expected when it was first read, the
    state is read each time.

    Args:
        words: where the words begin, in bytes from the address of the memory.
        place: where the place among them is.
        listed: the words and the place of a state.
    """

    SIZE = 624 * 4 + 4
    _FIRST = 8 * 4

    def __init__(self, *, words: int, place: int, listed: Callable[[Any], tuple[Iterable[int], int]]) -> None:
        self._words = words
        self._place = place
        self._listed = listed
        self._as_expected: bool | None = None
        self._last: tuple[object, object, bytes, Any] | None = None
        """The generator, what belongs to its state elsewhere, the look, and the state as it was read."""

    def state(self, generator: object, address: int, rest: object, read: Callable[[], Any]) -> Any:
        """Return the state; the very same object as long as it is the same state.

        Args:
            generator: the object it belongs to.
            address: where its memory is.
            rest: what belongs to the state and is elsewhere, to be compared.
            read: returns the state.
        """
        if self._as_expected is False:
            return read()
        look = string_at(address + self._words, self._FIRST) + string_at(address + self._place, 4)
        last = self._last
        if last is not None and last[0] is generator and last[1] == rest and last[2] == look:
            return last[3]
        state = read()
        if self._as_expected is None:
            words, place = self._listed(state)
            told = struct.pack("=624Ii", *words, place)
            self._as_expected = told == string_at(address + self._words, 624 * 4) + look[self._FIRST :]
        self._last = (generator, rest, look, state)
        return state

    def forget(self) -> None:
        """Have the state read the next time."""
        self._last = None


_python = _Twister(words=4, place=0, listed=lambda state: (state[1][:-1], state[1][-1]))
_numpy = _Twister(words=0, place=624 * 4, listed=lambda state: (state["state"]["key"], state["state"]["pos"]))
_IN_OBJECT = (
    sys.implementation.name == "cpython"
    and _random.Random.__basicsize__ >= object.__basicsize__ + _Twister.SIZE
)
"""True where Python's generator may have its words in its own object, behind the header."""


def _python_state() -> tuple[Any, ...]:
    generator: Any = getattr(random, "_inst", None)  # whose methods the functions of the module are
    if not (_IN_OBJECT and isinstance(generator, _random.Random)):
        return random.getstate()
    address, rest = id(generator) + object.__basicsize__, getattr(generator, "gauss_next", None)
    state: tuple[Any, ...] = _python.state(generator, address, rest, random.getstate)
    return state


def _numpy_state(module: Any) -> Mapping[str, Any]:
    generator: Any = getattr(module, "get_bit_generator", lambda: None)()
    state: Mapping[str, Any]
    if type(generator).__name__ != "MT19937":
        state = module.get_state(legacy=False)
        return state
    address = generator.ctypes.state_address
    state = _numpy.state(generator, address, None, lambda: module.get_state(legacy=False))
    if state["has_gauss"]:  # a number that waits to be returned is elsewhere; only a draw can bring one in
        _numpy.forget()
    return state


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
