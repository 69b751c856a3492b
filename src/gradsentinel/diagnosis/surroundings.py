"""What a forward pass reaches outside of modules and tensors: no replay can put that back."""

from __future__ import annotations

import dis
import inspect
import random
import types
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from gradsentinel.diagnosis.belongings import has_memory
from gradsentinel.diagnosis.code_tree import codes
from gradsentinel.diagnosis.own_code import containers_written, is_own, top_of
from gradsentinel.measures.inspection import answers, readable
from gradsentinel.run import Run

_MOST_FUNCTIONS = 256
_MOST_VALUES = 4096
_DEEPEST = 5
_SMALL = 1 << 10
"""Elements of a container that are looked into, and of a tensor that are compared; beyond, its version."""
_LARGE = 1 << 20
"""Bytes of an array up to which a checksum tells whether it is the same."""
_CLOCKS = frozenset({"time", "datetime"})
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_SIZED = (Mapping, list, tuple, deque, set, frozenset)
_OF_MODULES = frozenset(nn.Module().__dict__)


class Surroundings:
    """The values outside of the model's tensors that `forward=` and the modules refer to.

    Found by name: globals, closures, defaults, class attributes, attributes of modules and of objects, in the
    functions that the user wrote. Nobody keeps them from step to step, so a replay begins with what the
    loop's own forward pass left there.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.clocks: list[str] = []
        """What reads the time, by the name that the program uses."""
        self._values: dict[str, Any] = {}
        self._foreign: dict[str, nn.Module] = {}
        """Modules that are not of the model, as a teacher."""
        self.functions: list[types.FunctionType] = []
        """The user's own functions that a forward pass may run."""
        for name, value in _named(run, self.functions):
            if not answers(value):
                continue
            if isinstance(value, nn.Module):
                self._foreign.setdefault(name, value)
            elif not _counts(value):
                continue
            elif top_of(value) in _CLOCKS:
                self.clocks.append(name)
            elif len(self._values) < _MOST_VALUES:
                self._values.setdefault(name, value)
        for name, value in _of_classes(run):
            self._values.setdefault(name, value)
        self._before = self._marks()

    def changed(self) -> list[str]:
        """Return the names of what is not as it was when this object was made."""
        now = self._marks()
        return [name for name, mark in self._before.items() if now.get(name) != mark]

    def read(self) -> set[str]:
        """Return the names outside of local variables that the forward pass reads; attributes with a dot."""
        names: set[str] = set()
        for function in self.functions:
            outer = function.__code__.co_freevars
            for part in codes(function.__code__):
                for instruction in dis.get_instructions(part):
                    name, how = str(instruction.argval), instruction.opname
                    if how == "LOAD_ATTR":
                        names.add(f".{name}")
                    elif how in ("LOAD_GLOBAL", "LOAD_NAME") or (how == "LOAD_DEREF" and name in outer):
                        names.add(name)
        return names

    def settings(self) -> set[str]:
        """Return what the layers of others hold, by names with a dot before them: their own code reads it."""
        layers = [module for _, module in self._modules() if not is_own(type(module))]
        plain = {name for module in layers for name in vars(module).keys() - _OF_MODULES}
        tensors = {name for module in layers for name in (*module._parameters, *module._buffers)}
        return {f".{name}" for name in plain | tensors}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the forward pass may reach and that are neither parameters nor buffers."""
        left = iter(range(_MOST_VALUES))
        for name, module in self._foreign.items():
            held = (*module.named_parameters(), *module.named_buffers())
            yield from ((f"{name}.{path}", tensor) for path, tensor in held)
        for name, value in self._values.items():
            yield from _tensors_in(name, value, left)
        for path, module in self._modules():
            for name, value in vars(module).items():
                if name not in _OF_MODULES:
                    yield from _tensors_in(f"{path}.{name}", value, left)

    def drawn(self) -> list[str]:
        """Return the names of random generators and iterators that have moved on since this was made."""
        return [name for name in self.changed() if _state_of_generator(self._values.get(name)) is not None]

    def written(self) -> list[str]:
        """Return the names outside of local variables that the forward pass assigns to, by its code.

        What it assigns may be the same the second time, and so no change. What holds the activations of the
        pass itself does not count: no later pass can compute with those.
        """
        names = {name for function in self.functions for name in _stores(function.__code__)}
        names.update(*(containers_written(function.__code__) for function in self.functions))
        modules = [module for _, root in self._run.host.modules() for module in root.modules()]
        for module in modules:
            held = vars(module)
            names -= {name for name in names & held.keys() if _is_activation(held[name])}
            names -= module._buffers.keys() | module._parameters.keys()  # a replay begins with the step's
        return sorted(names)

    def _marks(self) -> dict[str, Any]:
        mark = _Marks()
        marks = {name: mark.of(value) for name, value in self._values.items()}
        for path, module in self._modules():
            for name, value in vars(module).items():
                if name not in _OF_MODULES and answers(value) and not isinstance(value, nn.Module):
                    marks[f"{path}.{name}"] = mark.of(value)
        return marks

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for _, root in self._run.host.modules():
            yield from ((path or type(module).__name__, module) for path, module in root.named_modules())


def _named(run: Run, reached: list[types.FunctionType]) -> Iterator[tuple[str, Any]]:
    """What the user's functions have from outside, by name; `reached` gets those that a pass may run."""
    modules = [module for _, root in run.host.modules() for module in root.modules()]
    functions = [getattr(run.forward, "func", run.forward), *_hooks(modules)]
    methods = Methods({type(module) for module in modules})
    functions += methods.called({"forward", "__call__"})
    return names_outside(functions, methods, reached)


def _of_classes(run: Run) -> Iterator[tuple[str, Any]]:
    """What the classes of the modules hold, for all of their instances."""
    types_of = {type(module) for _, root in run.host.modules() for module in root.modules()}
    for kind in {base for each in types_of for base in each.__mro__ if is_own(base)}:
        for name, value in vars(kind).items():
            method = callable(value) or isinstance(value, (classmethod, staticmethod, property))
            if not name.startswith("__") and not method:
                yield f"{kind.__name__}.{name}", value


def names_outside(
    start: Iterable[Any], methods: Methods, reached: list[types.FunctionType]
) -> Iterator[tuple[str, Any]]:
    """Yield what functions, and those that they call, have from outside, by name.

    Args:
        start: the functions to begin with.
        methods: those of the classes that are known already.
        reached: gets the user's own functions that are called.
    """
    functions: deque[Any] = deque(start)
    seen: set[int] = set()
    while functions and len(seen) < _MOST_FUNCTIONS:
        function = functions.popleft()
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType):
            with suppress(ValueError):  # it wraps itself
                function = inspect.unwrap(function)  # of torch.no_grad(), say
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        if isinstance(function, types.FunctionType):
            reached.append(function)
            functions += methods.called(names_in(function.__code__))
            found = list(_outside(function))
        else:  # an object with __call__, say
            found = [(type(function).__name__, function)]
        for name, value in found:
            if not answers(value):
                continue
            if isinstance(value, types.FunctionType):
                functions += [value] * is_own(value)
            else:
                functions += methods.of(value if isinstance(value, type) else type(value))
            yield name, value


class Methods:
    """Methods of the user's classes, to be found by the name by which they are called."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self._waiting: dict[str, list[Any]] = {}
        self._called: set[str] = set()
        self._kinds: set[type] = set()
        for kind in kinds:
            self.of(kind)

    def of(self, kind: type) -> list[Any]:
        """Take in the methods of a class; return those that are called already."""
        if kind in self._kinds or not is_own(kind):
            return []
        self._kinds.add(kind)
        for method in _methods(kind):
            self._waiting.setdefault(method.__name__, []).append(method)
        return self.called(self._called)

    def called(self, names: set[str]) -> list[Any]:
        """Return the methods of these names that were not returned before."""
        self._called |= names
        return [method for name in names & self._waiting.keys() for method in self._waiting.pop(name)]


def _counts(value: Any) -> bool:
    """Leave out functions, the classes of others, and modules, whose state is looked at anyway."""
    if isinstance(value, type):
        return is_own(value) and not issubclass(value, nn.Module)
    return (
        not isinstance(value, (types.FunctionType, types.BuiltinFunctionType, nn.Module))
        or top_of(value) in _CLOCKS
    )


def _hooks(modules: Iterable[nn.Module]) -> list[Any]:
    """The user's hooks on the modules' forward passes."""
    return [
        hook
        for module in modules
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if is_own(hook)
    ]


def _outside(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    with suppress(TypeError, ValueError):
        found = inspect.getclosurevars(function)
        for name, value in {**found.globals, **found.nonlocals}.items():
            yield name, value
            if answers(value) and isinstance(value, types.ModuleType) and is_own(value):
                inside = set(function.__code__.co_names) & vars(value).keys()
                yield from ((f"{name}.{key}", vars(value)[key]) for key in inside)
    yield from ((f"{function.__name__}()", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


def _methods(kind: type) -> list[Any]:
    return [
        value
        for base in kind.__mro__
        if is_own(base)
        for value in (getattr(v, "__func__", v) for v in vars(base).values())
        if isinstance(value, types.FunctionType)
    ]


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes that a function uses."""
    return {name for part in codes(code) for name in part.co_names}


def _stores(code: types.CodeType) -> Iterator[str]:
    """The names that a function assigns to and that outlive it."""
    for part in codes(code):
        for instruction in dis.get_instructions(part):
            outer = instruction.opname == "STORE_DEREF" and instruction.argval in code.co_freevars
            if outer or instruction.opname in ("STORE_ATTR", "STORE_GLOBAL"):
                yield str(instruction.argval)


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


# -- one value ---------------------------------------------------------------------------------------


class _Marks:
    """Looks into values, as deep and as long as there is reason to; the same way every time."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return something that differs if the value does, and that holds on to nothing large."""
        self._left -= 1
        if type(value) in (bool, int, str, bytes):
            return type(value).__name__, value  # no copy in words: an int may be too long for that
        if not answers(value):
            return id(value)
        try:
            mark = self._mark(value, depth)
        except Exception:  # noqa: BLE001 - the user's own properties and reprs raise anything; its id is left
            mark = None
        return id(value) if mark is None else mark

    def _mark(self, value: Any, depth: int) -> Any:
        if isinstance(value, _SCALARS):
            return repr(value)
        if isinstance(value, Tensor):
            # One with a graph was put aside by the pass itself: no later pass can compute with it.
            kept = not _is_activation(value)
            return (id(value), value._version, _content(value)) if kept else "an activation"
        mark = _state_of_generator(value)
        memory = _memory_of(value) if mark is None else None
        if memory is not None:
            mark = id(value), zlib.crc32(memory)
        look = mark is None and depth < _DEEPEST and self._left > 0
        inside = _inside(value) if look else None
        if inside is None:
            return mark
        size = len(value) if isinstance(value, _SIZED) else 0  # more than is looked into
        return type(value).__name__, size, tuple((key, self.of(held, depth + 1)) for key, held in inside)


def _content(tensor: Tensor) -> str:
    small = readable(tensor) is None and has_memory(tensor) and tensor.numel() <= _SMALL
    return repr(tensor.detach().flatten().tolist()) if small and tensor.layout is torch.strided else ""


def _memory_of(value: Any) -> bytes | None:
    """Return the bytes of an array or a buffer; None for what is neither, or too large."""
    if isinstance(value, (array, bytearray, memoryview)):
        read: Any = partial(bytes, value)
    else:
        read = getattr(value, "tobytes", None) if top_of(type(value)) == "numpy" else None
    if read is None:
        return None
    size = getattr(value, "nbytes", None)
    size = size if isinstance(size, int) else len(value) * getattr(value, "itemsize", 1)
    return read() if size <= _LARGE else None


def _tensors_in(name: str, value: Any, left: Iterator[int], depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if next(left, None) is None or not answers(value) or isinstance(value, _SCALARS):
        return
    if isinstance(value, Tensor):
        yield name, value
        return
    inside: Iterable[tuple[str, Any]] = ()
    with suppress(Exception):  # the user's own properties and reprs raise anything
        inside = list((_inside(value) if depth < _DEEPEST else None) or ())
    for _, held in inside:
        yield from _tensors_in(name, held, left, depth + 1)


def _inside(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Return what a value holds; None for what is not looked into."""
    if isinstance(value, Mapping):
        return [(repr(key), held) for key, held in islice(value.items(), _SMALL)]
    if isinstance(value, (list, tuple, deque)):
        return [("", held) for held in islice(value, _SMALL)]
    if isinstance(value, (set, frozenset)):
        return [(repr(sorted(map(repr, islice(value, _SMALL)))), None)]
    if isinstance(value, type):
        return [(name, held) for name, held in vars(value).items() if not name.startswith("__")]
    if isinstance(value, (types.FunctionType, types.ModuleType, nn.Module)) or not is_own(type(value)):
        return None
    held = [*getattr(value, "__dict__", {}).items()]
    slots = [name for kind in type(value).__mro__ for name in _listed(kind.__dict__.get("__slots__", ()))]
    return held + [(name, getattr(value, name)) for name in slots if hasattr(value, name)]


def _listed(names: Any) -> list[str]:
    return [name for name in ([names] if isinstance(names, str) else names) if not name.startswith("__")]


def _state_of_generator(value: Any) -> Any:
    if hasattr(type(value), "__next__"):
        return object()  # what it will hand out next cannot be told: as good as another one
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, random.Random):
        return value.getstate()
    return _of_numpy(value) if type(value).__module__.startswith("numpy.") else None


def _of_numpy(value: Any) -> Any:
    bits = getattr(value, "bit_generator", None)
    if bits is not None:
        return repr(bits.state)
    return repr(value.get_state()) if hasattr(value, "get_state") else None
