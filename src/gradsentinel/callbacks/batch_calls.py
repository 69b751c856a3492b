"""The calls that look numbers up in a table or among classes, heard while somebody listens."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _is_tracing as is_tracing
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from gradsentinel.testing import record_swallowed

logger = logging.getLogger("gradsentinel")

_IGNORE_AT, _IGNORED = 4, -100
"""Where `ignore_index` stands among the arguments of the losses, and what it is if it is not given."""


_About = tuple[int, Any, int | None]
"""How many rows or classes there are, what holds them, and which other number is lawful."""


class Listener(Protocol):
    """Hears of look-ups."""

    def looks_up(self, numbers: Tensor, size: int, table: Any, ignore: int | None) -> Tensor | None:
        """Hear what is about to be looked up; return what to look up instead, or None.

        Args:
            numbers: of any shape.
            size: lawful are 0 to below this.
            table: the weight or the module that holds them, or None for the classes of a loss.
            ignore: lawful, too.
        """

    def holds(self, numbers: Tensor) -> bool:
        """Say whether these are its batch's numbers, one by one; no wait."""


class Calls:
    """Gives a listener the calls of its own thread from `begin` to `end`; between steps nothing is replaced.

    What is replaced are the four functions of torch through which every embedding and every loss over
    classes goes, whoever calls it and by which name. A mode of torch's would do, too, but under a mode
    torch takes other kernels for attention, and a healthy run would not be the same to the bit. Of a table
    that is spread over ranks each rank sees its part only, so there it is the module that is heard.

    Args:
        listener: who hears.
        spread: modules that look numbers up in a table of which this process holds a part.
    """

    def __init__(self, listener: Listener, spread: Iterable[nn.Module]) -> None:
        self.listener = listener
        self._hooks = [(module, _Before(self, module)) for module in spread]
        self._parts = {id(parameter) for module, _ in self._hooks for parameter in module.parameters()}
        self._key = RemovableHandle(OrderedDict()).id  # a key that no other hook has
        self.thread: int | None = None
        self.failure: Exception | None = None
        """What went wrong while somebody listened."""
        self._failed = False
        modules = [weakref.ref(module) for module, _ in self._hooks]
        weakref.finalize(self, _take_off, modules, self._key).atexit = False

    def begin(self, *, functions: bool) -> None:
        """Hear of calls from now on; without `functions` only of those of the modules."""
        self.end()
        if self._failed:
            return
        self.thread = threading.get_ident()
        for module, hook in self._hooks:
            if module._compiled_call_impl is None:  # else it would be compiled, too
                module._forward_pre_hooks[self._key] = hook
        if functions:
            with _lock:
                _listening.append(weakref.ref(self, _forget))
                _replace()

    def end(self) -> None:
        """Hear of nothing more."""
        if self.thread is None:
            return
        self.thread = None
        for module, _ in self._hooks:
            module._forward_pre_hooks.pop(self._key, None)
        with _lock:
            _keep(lambda reference: reference() is not self)

    def is_here(self) -> bool:
        """Say whether this thread listens, or is in a backward pass: what a checkpoint recomputes is there.

        Threads of autograd are none of Python's; a thread of the program is not heard.
        """
        if self.thread is None or self.thread == threading.get_ident():
            return self.thread is not None
        inside = torch._C._current_autograd_node() is not None
        return inside and isinstance(threading.current_thread(), threading._DummyThread)

    def holds(self, numbers: Any) -> bool:
        """Say whether these are the listener's numbers, one by one."""
        return bool(self._guarded(lambda: _is_plain(numbers) and self.listener.holds(numbers)))

    def heard(self, numbers: Any, about: Callable[[], _About]) -> Any:
        """Return what is to be looked up."""

        def hear() -> Any:
            size, table, ignore = about()
            if id(table) in self._parts or not _is_plain(numbers):
                return None
            return self.listener.looks_up(numbers, size, table, ignore)

        instead = self._guarded(hear) if self.is_here() else None
        return numbers if instead is None else instead

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # in the user's forward pass, which must go on
            logger.exception("look-ups of the model cannot be watched any more")
            record_swallowed(error)
            self.failure, self._failed = error, True
            self.end()
            return None


def _take_off(modules: Sequence[weakref.ref[nn.Module]], key: int) -> None:
    """Take the hooks of a dead listener off."""
    for reference in modules:
        module = reference()
        if module is not None:
            module._forward_pre_hooks.pop(key, None)


def _is_plain(numbers: Any) -> bool:
    return (
        isinstance(numbers, Tensor)
        and type(numbers) in (Tensor, nn.Parameter)
        and not (numbers.dtype.is_floating_point or numbers.dtype.is_complex or numbers.dtype is torch.bool)
        and numbers.layout is torch.strided
        and numbers.device.type != "meta"
        and not numbers.is_nested
        and numbers.numel() > 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not _is_captured(numbers.device)
    )


def _is_captured(device: torch.device) -> bool:
    """Say whether what is done now becomes part of a graph that is run later, on memory as it was."""
    asked = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


_lock = threading.RLock()  # a listener may die of the garbage collection while it is held
_listening: list[weakref.ref[Calls]] = []
_ours: dict[tuple[Any, str], list[tuple[Any, Any]]] = {}
"""What stood there, and what of ours calls it; made once for each."""
_MOST_STOOD = 16


def _of_table(args: tuple[Any, ...], _: dict[str, Any]) -> _About:
    return args[0].shape[0], args[0], None


def _of_classes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _About:
    scores = args[0]
    ignore = args[_IGNORE_AT] if len(args) > _IGNORE_AT else kwargs.get("ignore_index", _IGNORED)
    return scores.shape[min(1, scores.dim() - 1)], None, ignore


_FUNCTIONS: tuple[tuple[Any, str, Callable[..., _About]], ...] = (
    (torch, "embedding", _of_table),
    (torch, "embedding_bag", _of_table),
    (torch, "embedding_renorm_", _of_table),
    (torch._C._nn, "cross_entropy_loss", _of_classes),
    (torch._C._nn, "nll_loss_nd", _of_classes),
)
"""All of them take the table or the scores first, and then the numbers."""


def _asked(numbers: Any, about: Callable[[], _About]) -> Any:
    """Have those hear who are here: of several trainings the one whose numbers these are, if known."""
    those = [calls for reference in tuple(_listening)[::-1] if (calls := reference()) and calls.is_here()]
    if len(those) > 1:
        those = [calls for calls in those if calls.holds(numbers)] or those
    for calls in those:
        numbers = calls.heard(numbers, about)
    return numbers


def _heard(plain: Callable[..., Any], about: Callable[..., _About]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _listening or is_compiling() or is_tracing() or len(args) < 2:
            return plain(*args, **kwargs)
        if isinstance(args[0], Tensor) and args[0].dim():
            args = (args[0], _asked(args[1], lambda: about(args, kwargs)), *args[2:])
        return plain(*args, **kwargs)

    return call


def _replace() -> None:
    for owner, name, about in _FUNCTIONS:
        stands = getattr(owner, name)
        known = _ours.setdefault((owner, name), [])
        if any(stands is ours for _, ours in known):
            continue
        ours = next((ours for plain, ours in known if plain is stands), None)
        if ours is None:  # the first time, or somebody has put something else there meanwhile
            if len(known) >= _MOST_STOOD:
                continue
            ours = _heard(stands, about)
            known.append((stands, ours))
        setattr(owner, name, ours)


def _put_back() -> None:
    for (owner, name), known in _ours.items():
        for plain, ours in known:
            if getattr(owner, name) is ours:  # else somebody's stands on top, which goes on to the plain one
                setattr(owner, name, plain)
                break


def _keep(stays: Callable[[weakref.ref[Calls]], bool]) -> None:
    """Let go of the other listeners, and of the functions when there is none left."""
    if _listening:
        _listening[:] = [reference for reference in _listening if stays(reference)]
        if not _listening:
            _put_back()


def _forget(dead: weakref.ref[Calls]) -> None:
    """Hear that a listener is no more: a sentinel that nobody has closed."""
    with _lock:
        _keep(lambda reference: reference is not dead)


def _forget_all() -> None:
    """Begin a process that was forked: who listens is the other one."""
    global _lock  # noqa: PLW0603 - a thread that is not here may hold it
    _lock = threading.RLock()
    _keep(lambda _: False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _nothing(*_: Any) -> None:
    """What is left of our hooks in a copy of the model."""


def _silent() -> Any:
    return _nothing


class _Before:
    """A hook on a module that looks numbers up; none in a copy of the module."""

    __slots__ = ("calls", "module")

    def __init__(self, calls: Calls, module: nn.Module) -> None:
        self.calls = weakref.ref(calls)
        self.module = module

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        calls = self.calls()
        if is_compiling() or is_tracing() or module is not self.module or not args or calls is None:
            return None
        size: Any = module.num_embeddings
        return (calls.heard(args[0], lambda: (size, module, None)), *args[1:])

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _silent, ()
