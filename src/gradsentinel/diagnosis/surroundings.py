"""What a forward pass reaches outside of modules and tensors: no replay can put that back."""

from __future__ import annotations

import dis
import inspect
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from gradsentinel.diagnosis.belongings import has_memory
from gradsentinel.measures.inspection import readable
from gradsentinel.run import Run

_MOST_FUNCTIONS = 256
_MOST_VALUES = 4096
_DEEPEST = 5
_SMALL = 1 << 10
"""Elements up to which the values of a tensor or an array are compared; beyond, its version."""
_CLOCKS = frozenset({"time", "datetime"})
_FRAMEWORKS = frozenset(
    {"accelerate", "deepspeed", "gradsentinel", "lightning", "megatron", "numpy", "peft"}
    | {"pytorch_lightning", "torch", "transformers"}
)
_NOT_OURS = (sys.stdlib_module_names | _FRAMEWORKS) - {"__main__", "random"}
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
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
        self._functions: list[types.FunctionType] = []
        for name, value in _named(run, self._functions):
            if _top(value) in _CLOCKS:
                self.clocks.append(name)
            elif len(self._values) < _MOST_VALUES:
                self._values.setdefault(name, value)
        self._before = self._marks()

    def changed(self) -> list[str]:
        """Return the names of what is not as it was when this object was made."""
        now = self._marks()
        return [name for name, mark in self._before.items() if now.get(name) != mark]

    def written(self) -> list[str]:
        """Return the names outside of local variables that the forward pass assigns to, by its code.

        What it assigns may be the same the second time, and so no change. What holds the activations of the
        pass itself does not count: no later pass can compute with those.
        """
        names = {name for function in self._functions for name in _stores(function.__code__)}
        modules = [module for _, root in self._run.host.modules() for module in root.modules()]
        for module in modules:
            held = vars(module)
            names -= {name for name in names & held.keys() if _is_activation(held[name])}
        return sorted(names)

    def _marks(self) -> dict[str, Any]:
        mark = _Marks()
        marks = {name: mark.of(value) for name, value in self._values.items()}
        for _, root in self._run.host.modules():
            for path, module in root.named_modules():
                for name, value in vars(module).items():
                    if name not in _OF_MODULES and not isinstance(value, nn.Module):
                        marks[f"{path or type(module).__name__}.{name}"] = mark.of(value)
        return marks


def _named(run: Run, reached: list[types.FunctionType]) -> Iterator[tuple[str, Any]]:
    """What the user's functions have from outside, by name; `reached` gets those that a pass may run."""
    modules = [module for _, root in run.host.modules() for module in root.modules()]
    functions: deque[Any] = deque([getattr(run.forward, "func", run.forward), *_hooks(modules)])
    methods = _Methods({type(module) for module in modules})
    functions += methods.called({"forward", "__call__"})
    seen: set[int] = set()
    while functions and len(seen) < _MOST_FUNCTIONS:
        function = functions.popleft()
        function = getattr(function, "__func__", function)
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        if isinstance(function, types.FunctionType):
            reached.append(function)
            functions += methods.called(_names_in(function.__code__))
            found = list(_outside(function))
        else:  # an object with __call__, say
            found = [(type(function).__name__, function)]
        for name, value in found:
            if isinstance(value, types.FunctionType):
                functions += [value] * _is_own(value)
            else:
                functions += methods.of(value if isinstance(value, type) else type(value))
            if _counts(value):
                yield name, value


class _Methods:
    """Methods of the user's classes, to be found by the name by which they are called."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self._waiting: dict[str, list[Any]] = {}
        self._called: set[str] = set()
        self._kinds: set[type] = set()
        for kind in kinds:
            self.of(kind)

    def of(self, kind: type) -> list[Any]:
        """Take in the methods of a class; return those that are called already."""
        if kind in self._kinds or not _is_own(kind):
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
        return _is_own(value) and not issubclass(value, nn.Module)
    return (
        not isinstance(value, (types.FunctionType, types.BuiltinFunctionType, nn.Module))
        or _top(value) in _CLOCKS
    )


def _hooks(modules: Iterable[nn.Module]) -> list[Any]:
    """The user's hooks on the modules' forward passes."""
    return [
        hook
        for module in modules
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if _is_own(hook)
    ]


def _outside(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    with suppress(TypeError, ValueError):
        found = inspect.getclosurevars(function)
        for name, value in {**found.globals, **found.nonlocals}.items():
            yield name, value
            if isinstance(value, types.ModuleType) and _is_own(value):
                inside = set(function.__code__.co_names) & vars(value).keys()
                yield from ((f"{name}.{key}", vars(value)[key]) for key in inside)
    yield from ((f"{function.__name__}()", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


def _methods(kind: type) -> list[Any]:
    return [
        value
        for base in kind.__mro__
        if _is_own(base)
        for value in (getattr(v, "__func__", v) for v in vars(base).values())
        if isinstance(value, types.FunctionType)
    ]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _names_in(code: types.CodeType) -> set[str]:
    return {name for part in _codes(code) for name in part.co_names}


def _stores(code: types.CodeType) -> Iterator[str]:
    """The names that a function assigns to and that outlive it."""
    for part in _codes(code):
        for instruction in dis.get_instructions(part):
            outer = instruction.opname == "STORE_DEREF" and instruction.argval in code.co_freevars
            if outer or instruction.opname in ("STORE_ATTR", "STORE_GLOBAL"):
                yield str(instruction.argval)


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def _is_own(value: Any) -> bool:
    return _top(value) not in _NOT_OURS


def _top(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0]
    module = getattr(value, "__module__", None)
    if not isinstance(module, str):
        module = type(value).__module__
    return module.partition(".")[0]


# -- one value ---------------------------------------------------------------------------------------


class _Marks:
    """Looks into values, as deep and as long as there is reason to; the same way every time."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return something that differs if the value does, and that holds on to nothing large."""
        self._left -= 1
        if isinstance(value, _SCALARS):
            return repr(value)
        drawn = _state_of_generator(value)
        if drawn is not None:
            return drawn
        if isinstance(value, Tensor):
            # One with a graph was put aside by the pass itself: no later pass can compute with it.
            if _is_activation(value):
                return "an activation"
            return id(value), value._version, _content(value)
        try:
            inside = _inside(value) if depth < _DEEPEST and self._left > 0 else None
        except Exception:  # noqa: BLE001 - the user's own properties and reprs raise anything; its id is left
            inside = None
        if inside is None:
            return id(value)
        return type(value).__name__, tuple((key, self.of(held, depth + 1)) for key, held in inside)


def _content(tensor: Tensor) -> str:
    small = readable(tensor) is None and has_memory(tensor) and tensor.numel() <= _SMALL
    return repr(tensor.detach().flatten().tolist()) if small and tensor.layout is torch.strided else ""


def _inside(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Return what a value holds; None for what is not looked into."""
    if isinstance(value, Mapping):
        return [(repr(key), held) for key, held in list(value.items())[:_SMALL]]
    if isinstance(value, (list, tuple, deque)):
        return [("", held) for held in list(value)[:_SMALL]]
    if isinstance(value, (set, frozenset)):
        return [(repr(sorted(map(repr, value))), None)]
    if isinstance(value, type):
        return [(name, held) for name, held in vars(value).items() if not name.startswith("__")]
    if isinstance(value, (types.FunctionType, types.ModuleType, nn.Module)) or not _is_own(type(value)):
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
    if hasattr(value, "get_state"):
        return repr(value.get_state())
    size = getattr(value, "size", None)
    return value.tobytes() if isinstance(size, int) and size <= _SMALL else id(value)
