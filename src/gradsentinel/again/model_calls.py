"""What the step in flight gave to the model and got back from it, call by call, kept by reference."""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._C import _is_tracing as is_tracing
from torch.compiler import is_compiling
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from gradsentinel.measures.bounds import bounds
from gradsentinel.state.tree import map_tensors
from gradsentinel.testing import record_swallowed

logger = logging.getLogger("gradsentinel")

_MOST_CALLS = 64
"""In one micro-batch; a loop that makes more is no case for a comparison call by call."""
_OF_A_CALL = 4
"""What is noted of a call beside its root; of a return it is less."""
_DEEPEST = 8
_MOST_LEAVES = 256
"""Numbers, names and tensors in what one call is given or returns."""
_NOT_THEIRS = ("torch.", "gradsentinel.")
_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, slice})

Leaf: TypeAlias = tuple[tuple[Any, ...], Any, int]
"""Where a value is in what was given or returned, the value, and how often it had been written to by then."""


class OwnHooks:
    """Counts the hooks that are registered within forward passes and are ours, none of the loop's."""

    registered = 0


class Unknown:
    """Stands for a value that nobody can compare."""


UNKNOWN = Unknown()
_NOT_KEPT: Leaf = ((), UNKNOWN, 0)


@dataclass(slots=True)
class ModelCall:
    """One call of a root module: what it was given, and what it returned."""

    name: str
    """Prefix of the root module's names; empty where there is one."""
    given: list[Leaf]
    order: int
    """Its number among the calls and returns of the micro-batch."""
    graph: bool
    """False under `no_grad`."""
    modes: tuple[type, ...] = ()
    """The dispatch and function modes of the program's own that it ran under."""
    made: list[Leaf] | None = None
    """None: it has not returned, by an exception."""
    returned: int = 0
    """Likewise a number, of its return."""
    hooks: int = 0
    """So many hooks were registered from when the batch was handed out until it returned."""


class Record:
    """The calls of one micro-batch, as they come."""

    __slots__ = ("_first_hook", "_instead", "_under_modes", "events", "lost", "room")

    def __init__(self, room: int, instead: Record | None = None) -> None:
        self.events: list[tuple[Any, ...]] = []
        """Of a call: the root, its name, what it was given, modes, and whether there is a graph. Of a return:
        the root, what it returned, and how many hooks there had been."""
        self.lost = ""
        """Why not all of the calls are known; empty if they are."""
        self.room = room
        """Bytes that may still be kept."""
        self._instead = instead
        self._under_modes: tuple[type, ...] = ()
        self._first_hook = RemovableHandle.next_id - OwnHooks.registered

    @property
    def calls(self) -> list[ModelCall]:
        """The calls in their order."""
        found: list[ModelCall] = []
        waiting: list[tuple[Any, ModelCall]] = []
        for order, (root, *event) in enumerate(self.events):
            if len(event) == _OF_A_CALL:
                name, given, modes, graph = event
                found.append(ModelCall(name, given, order, graph, modes))
                waiting.append((root, found[-1]))
                continue
            while waiting:
                known, call = waiting.pop()
                if known is root:  # else it has raised: nobody said that it had returned
                    call.made, hooks = event
                    call.returned, call.hooks = order, hooks - self._first_hook
                    break
        return found

    def given(self, name: str, root: nn.Module, args: Any, kwargs: Any) -> Any:
        """Take note of what a root module is called with; return what to call it with instead, or None."""
        if self.lost:
            return None
        if len(self.events) >= 2 * _MOST_CALLS:
            self.lost = f"the model was called more than {_MOST_CALLS} times"
            return None
        instead = self._instead
        if instead is not None:
            args, kwargs = self._replaced(instead, args, kwargs)
        # Under a mode, what is done to a tensor here would be seen there.
        modes = self._under_modes = _modes()
        leaves = [_NOT_KEPT] if modes else self._leaves(args, kwargs)
        self.events.append((root, name, leaves, modes, torch.is_grad_enabled()))
        return None if instead is None else (args, kwargs)

    def made(self, root: nn.Module, output: Any) -> None:
        """Take note of what a root module returned."""
        if not self.lost:
            leaves = [_NOT_KEPT] if self._under_modes else self._leaves(output, None)
            self.events.append((root, leaves, RemovableHandle.next_id - OwnHooks.registered))

    def _replaced(self, instead: Record, args: Any, kwargs: Any) -> Any:
        """Put what another record holds in the place of the tensors at the same paths."""
        graph = torch.is_grad_enabled()
        number = sum(call.graph is graph for call in self.calls)
        calls = [call for call in instead.calls if call.graph is graph]
        others = calls[number].given if number < len(calls) else []
        kept = {path: value for path, value, _ in others if isinstance(value, Tensor)}
        swapped = {
            id(value): kept[path].clone()
            for path, value, _ in self._leaves(args, kwargs)
            if isinstance(value, Tensor) and path in kept
        }
        return map_tensors(lambda tensor: swapped.get(id(tensor), tensor), (args, kwargs))

    def _leaves(self, value: Any, more: Any) -> list[Leaf]:
        found: list[Leaf] = []
        self._take(value, (), found)
        if more:
            self._take(more, (), found)
        return found

    def _take(self, value: Any, path: tuple[Any, ...], found: list[Leaf]) -> None:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            try:
                self.room -= value.untyped_storage().nbytes()
                kept = value.detach() if value.requires_grad else value  # the same memory, without a graph
                found.append((path, kept, kept._version) if self.room >= 0 else (path, UNKNOWN, 0))
            except RuntimeError:  # it has no memory of its own, or no version: sparse, of vmap, of inference
                found.append((path, UNKNOWN, 0))
        elif kind in _SCALARS:
            found.append((path, value, 0))
        elif len(found) >= _MOST_LEAVES or len(path) > _DEEPEST:
            found.append((path, UNKNOWN, 0))
        else:
            self._look_into(value, path, found)

    def _look_into(self, value: Any, path: tuple[Any, ...], found: list[Leaf]) -> None:
        if isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields")):
            inside: Iterable[tuple[Any, Any]] = enumerate(value)
        elif isinstance(value, Mapping):
            inside = value.items()
        elif isinstance(value, tuple):  # a named one
            inside = zip(value._fields, value, strict=True)  # type: ignore[attr-defined]
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inside = ((one.name, getattr(value, one.name, None)) for one in dataclasses.fields(value))
        else:
            inside = ()
            found.append((path, UNKNOWN, 0))
        for key, one in inside:
            self._take(one, (*path, key), found)


class ModelCalls:
    """Hears of the calls of the root modules while a micro-batch is on its way through the model.

    The hooks are on the modules from when a batch is handed out until its backward pass begins, so a model
    that is copied, scripted or written to disk between two steps carries none. Nothing is copied, and nothing
    waits; no graph is kept, and of memory no more than the bound `passed`, until the step is decided.

    Args:
        roots: the modules with the prefixes of their names.
    """

    def __init__(self, roots: Iterable[tuple[str, nn.Module]]) -> None:
        self.record: Record | None = None
        """Of the micro-batch that is on its way."""
        self._hooks = [(root, _Before(self, root, name), _After(self, root, name)) for name, root in roots]
        self._key = RemovableHandle(OrderedDict()).id  # a key that no other hook has
        self._records: dict[int, Record] = {}
        self._size = bounds().passed
        self._room = self._size

    def of(self, number: int) -> Record | None:
        """Return what is known of a micro-batch of the step in flight; None if nothing is."""
        return self._records.get(number)

    def listen(self, number: int) -> None:
        """Hear of the calls of a micro-batch, from now on."""
        self.stop()
        self._records[number] = record = Record(self._room)
        self._begin(record)

    def stop(self) -> None:
        """Take the hooks off."""
        record, self.record = self.record, None
        if record is None:
            return
        self._room = record.room
        key = self._key
        for root, _, _ in self._hooks:
            # Somebody may have cleared all hooks of the module meanwhile.
            root._forward_pre_hooks.pop(key, None)
            root._forward_pre_hooks_with_kwargs.pop(key, None)
            root._forward_hooks.pop(key, None)

    def forget(self) -> None:
        """Let go of everything: the step is decided, or another one begins."""
        self.stop()
        self._records.clear()
        self._room = self._size

    @contextmanager
    def replayed(self, instead: Record | None = None) -> Iterator[Record]:
        """Hear of the calls in the block instead, and give the model what it was given in another record."""
        self.stop()
        room, record = self._room, Record(self._size, instead)
        self._begin(record)
        try:
            yield record
        finally:
            self.stop()
            self._room = room

    def _begin(self, record: Record) -> None:
        key = self._key
        for root, before, after in self._hooks:
            if root._compiled_call_impl is not None:  # its hooks would be compiled, too
                record.lost = "the model is compiled"
                continue
            # As `register_forward_pre_hook(prepend=True)` and its like do, in a tenth of the time.
            root._forward_pre_hooks[key] = before
            if len(root._forward_pre_hooks) > 1:
                root._forward_pre_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
            root._forward_pre_hooks_with_kwargs[key] = True
            root._forward_hooks[key] = after
        self.record = record

    def failed(self) -> None:
        """Give up for good, in an exception's place: what is known is only ever more evidence."""
        self.forget()
        self._hooks.clear()


def _modes() -> tuple[type, ...]:
    """Return the kinds of modes that are active and are the program's own."""
    if not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()):
        return ()
    active: list[Any] = [*_get_current_dispatch_mode_stack()]
    active += _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return tuple(type(mode) for mode in active if not type(mode).__module__.startswith(_NOT_THEIRS))


def _nothing(*_: Any) -> None:
    """What is left of our hooks in a copy of the model."""


def _silent() -> Any:
    return _nothing


class _Hook:
    """A hook that leaves the module alone, and is none in a copy of it."""

    __slots__ = ("calls", "name", "root")

    def __init__(self, calls: ModelCalls, root: nn.Module, name: str) -> None:
        self.calls = calls
        self.root = root
        self.name = name

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _silent, ()


class _Before(_Hook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        record = self.calls.record
        if is_compiling() or record is None or module is not self.root or is_tracing():
            return None
        try:
            return record.given(self.name, module, args, kwargs)
        except Exception as error:  # the user's own containers raise anything: no reason to stop the run
            logger.exception("what the loop gives to the model cannot be looked at any more")
            record_swallowed(error)
            self.calls.failed()
            return None


class _After(_Hook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        record = self.calls.record
        if is_compiling() or record is None or module is not self.root or is_tracing():
            return
        try:
            record.made(module, output)
        except Exception as error:  # likewise
            logger.exception("what the loop gets back from the model cannot be looked at any more")
            record_swallowed(error)
            self.calls.failed()


def _called(name: str, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module, or those within if it only holds them: nobody can call a ModuleDict."""
    if getattr(type(root), "forward", None) is not nn.Module.forward:
        yield name, root
        return
    for child, module in root.named_children():
        yield from _called(f"{name}.{child}" if name else child, module)


def calls_of(host: Any, model: Any, forward: Any) -> ModelCalls | None:
    """Return what hears of the calls of a loop's root modules; None where that is of no use.

    Without `forward=` no replay can be compared with them; the hooks of compiled or scripted code would be
    compiled, too; and a sharded model is not run again.
    """
    given = model.values() if isinstance(model, Mapping) else model
    wrapped = [given] if isinstance(given, nn.Module) else list(given)
    wrapped += [module.module for module in wrapped if hasattr(module, "module")]  # DDP
    compiled = any(hasattr(module, "_orig_mod") for module in wrapped)
    scripted = any(isinstance(root, torch.jit.ScriptModule) for _, root in host.modules())
    if forward is None or compiled or scripted or host.sharded_modules():
        return None
    return ModelCalls(called for name, root in host.modules() for called in _called(name, root))
