"""The random number generators of a process: captured, restored, stored."""

import _random
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from ctypes import Array, c_char
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsentinel.devices import Device, device_of


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
        accelerators: dict[str, Tensor] = {}
        if devices:
            for device in _devices(devices):
                accelerators.update(device.generator_states())
        made = cls.__new__(cls)
        made.__dict__.update(  # at once: made in each step, and a frozen one sets each field by a call
            torch_cpu=torch.default_generator.get_state(),
            python=_python_state(),
            numpy=None if numpy is None else _numpy_state(numpy),
            devices=tuple(accelerators.items()) if accelerators else (),
        )
        return made

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
            found = next(_devices([name]), None)
            if found is None or not found.set_generator_state(state):
                missing.append(name)
        return tuple(missing)

    def draws_like(self, other: "RngState") -> bool:
        """Return True if torch and Python would draw the same from here on, on the devices that are known."""
        if self.python != other.python or not torch.equal(self.torch_cpu, other.torch_cpu):
            return False
        before = dict(self.devices)
        return all(name in before and torch.equal(before[name], state) for name, state in other.devices)

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
    them. A copy of its memory, all of it, tells whether the state is what it was, in a fraction of one.

    That memory is only ever a part of an object that is held while it is looked at, and objects of CPython
    do not move; another interpreter reads the state each time. Is the memory of an object not what its state
    says (another build, another release), the state is read each time, too. What another thread draws
    meanwhile is noticed: a state is kept only if the memory is the same before and after it was read.

    Args:
        words: where the words begin, in bytes from the address of the memory.
        place: where the place among them is: right before or behind them.
        listed: the words and the place of a state.
    """

    SIZE = 624 * 4 + 4

    def __init__(self, *, words: int, place: int, listed: Callable[[Any], tuple[Iterable[int], int]]) -> None:
        self._words = words
        self._place = place
        self._listed = listed
        self.reader: object = None
        """What reads the state of it, where others might put something else in its place."""
        self.quick: tuple[Any, object, Array[c_char], bytes, Any] | None = None
        """The generator, what belongs to its state elsewhere, its memory, what that held, and the state then.

        The short way of a step, in which nobody has drawn: an object that is held does not move. Who finds
        the same again has the state. That is done in place: a call would take as long as all the rest.
        """
        self._generator: object = None
        """The one whose memory was compared with its state."""
        self._as_expected = False
        self._seen: tuple[int, Array[c_char]] | None = None
        """An address, and what lies there: read only while the object it is a part of is held."""
        self._last: tuple[object, bytes, Any] | None = None
        """What belongs to the state elsewhere, the memory, and the state as it was read."""

    def state(self, generator: object, address: int, rest: object, read: Callable[[], Any]) -> Any:
        """Return the state; the very same object as long as it is the same state.

        Args:
            generator: the object whose memory it is.
            address: where in it that begins.
            rest: what belongs to the state and is elsewhere, to be compared.
            read: returns the state.
        """
        known = generator is self._generator
        if known and not self._as_expected:
            return read()
        if self._seen is None or self._seen[0] != address:
            self._seen = address, (c_char * self.SIZE).from_address(address)
        memory = self._seen[1]
        look = memory.raw
        last = self._last
        if known and last is not None and last[0] == rest and last[1] == look:
            return last[2]
        state = read()
        whole = memory.raw == look  # nobody drew meanwhile
        if not known and whole:
            words, place = self._listed(state)
            told = bytearray(self.SIZE)
            struct.pack_into("=624I", told, self._words, *words)
            struct.pack_into("=i", told, self._place, place)
            self._generator, self._as_expected = generator, told == look
        self._last = (rest, look, state) if whole else None
        trusted = whole and generator is self._generator and self._as_expected
        self.quick = (generator, rest, memory, look, state) if trusted else None
        return state

    def forget(self) -> None:
        """Have the state read the next time."""
        self._last = self.quick = None


_python = _Twister(words=4, place=0, listed=lambda state: (state[1][:-1], state[1][-1]))
_numpy = _Twister(words=0, place=624 * 4, listed=lambda state: (state["state"]["key"], state["state"]["pos"]))
_CPYTHON = sys.implementation.name == "cpython"
_IN_OBJECT = _CPYTHON and _random.Random.__basicsize__ >= object.__basicsize__ + _Twister.SIZE
"""True where Python's generator may have its words in its own object, behind the header."""


def _python_state() -> tuple[Any, ...]:
    generator: Any = getattr(random, "_inst", None)  # whose methods the functions of the module are
    if _python.quick is not None and random.getstate is _python.reader:
        known, rest, memory, look, state = _python.quick
        if known is generator and generator.gauss_next == rest and memory.raw == look:
            return state  # type: ignore[no-any-return]
    if not (_IN_OBJECT and isinstance(generator, _random.Random)):
        return random.getstate()
    if random.getstate != generator.getstate:  # somebody put others in their place
        return random.getstate()
    _python.reader = random.getstate
    address, rest = id(generator) + object.__basicsize__, getattr(generator, "gauss_next", None)
    return _python.state(generator, address, rest, generator.getstate)  # type: ignore[no-any-return]


def _numpy_state(module: Any) -> Mapping[str, Any]:
    if _numpy.quick is not None:
        known, _, memory, look, state = _numpy.quick
        if known is module.get_bit_generator() and memory.raw == look:
            return state  # type: ignore[no-any-return]
    generator: Any = getattr(module, "get_bit_generator", lambda: None)()
    if not _CPYTHON or type(generator) is not module.MT19937:  # others may be of any size
        return module.get_state(legacy=False)  # type: ignore[no-any-return]
    address = generator.ctypes.state_address  # what NumPy offers for this: the struct within the object
    read: Mapping[str, Any] = _numpy.state(generator, address, None, lambda: module.get_state(legacy=False))
    # A number that waits to be returned is elsewhere, and only a draw can bring one in. Another generator may
    # have been put in this one's place while the state was read.
    if read["has_gauss"] or module.get_bit_generator() is not generator:
        _numpy.forget()
    return read


@contextmanager
def preserved_rng(devices: Iterable[torch.device | str] = ()) -> Iterator[RngState]:
    """Restore the generators on leaving the block, however it is left; yields their state on entering."""
    state = RngState.capture(devices)
    try:
        yield state
    finally:
        state.restore()


def _devices(given: Iterable[torch.device | str]) -> Iterator[Device]:
    for one in given:
        with suppress(
            RuntimeError
        ):  # a type whose backend has not been imported and that torch does not know
            yield device_of(one)
