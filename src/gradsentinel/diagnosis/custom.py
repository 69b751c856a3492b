"""A custom autograd.Function caught in the act: what it was given when it made bad values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils._pytree import tree_leaves, tree_map

from gradsentinel.again.scene import MicroBatch
from gradsentinel.diagnosis import swap
from gradsentinel.diagnosis.findings import Findings
from gradsentinel.diagnosis.memory import judge
from gradsentinel.diagnosis.operator import script_name
from gradsentinel.diagnosis.record import Call
from gradsentinel.diagnosis.replay import Computed, Replay
from gradsentinel.diagnosis.trace import Trace
from gradsentinel.evidence import Diagnosis

_NOT_HERE = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A call of a custom autograd.Function: finite values in, bad ones out."""

    module: str
    """Where it can be imported from."""
    in_script: bool
    """True if that is the training script, which nobody imports unasked."""
    qualname: str
    args: tuple[Any, ...]
    """What `apply` was given."""
    grads: tuple[Any, ...] | None
    """What its backward was given, if that made the bad values."""
    unwritten: bool
    """True if the bad values are memory that nobody wrote to."""
    autocast: tuple[tuple[str, str], ...] = ()
    """Kinds of devices for which autocast was on in its forward pass, each with the dtype."""

    @property
    def backward(self) -> bool:
        """True if its backward made the bad values."""
        return self.grads is not None


def catch(findings: Findings) -> FunctionCall | None:
    """Run the guilty micro-batch once more and return the Function's call that made bad values.

    None if no autograd.Function is to blame, if it cannot be imported by name, or if it makes finite
    values now. Leaves the run as it is.
    """
    name = findings.custom
    classes = [kind for kind in _kinds(Function) if f"{kind.__name__}Backward" == name]
    classes = [kind for kind in classes if "<" not in kind.__qualname__]  # inside of a function
    if not classes:
        return None
    recorder = _Recorder()
    replay = Replay(findings.run)
    unwritten = findings.origin.allocation
    with replay.sheltered(), ExitStack() as stack:
        for kind in classes:
            stack.enter_context(recorder.listening(kind))
        replay.compute(findings.microbatch, mode=swap.Poison() if unwritten else None)  # type: ignore[no-untyped-call]
    if recorder.found is None:
        return None
    guilty, args, grads = recorder.found
    return FunctionCall(
        module=script_name() if guilty.__module__ == "__main__" else guilty.__module__,
        in_script=guilty.__module__ == "__main__",
        qualname=guilty.__qualname__,
        args=args,
        grads=grads,
        unwritten=unwritten,
        autocast=recorder.autocast,
    )


def blame_function(
    replay: Replay, microbatch: MicroBatch, computed: Computed, trace: Trace
) -> Diagnosis | None:
    """Return the diagnosis if a custom Function makes bad values of finite ones, and no operator shows it.

    One that computes in NumPy, or hands its memory to another library, has no operator of torch to be seen.
    Call it inside `Replay.sheltered`.

    Args:
        replay: of the step.
        microbatch: the guilty one.
        computed: what it came to.
        trace: a fresh one.
    """
    names = {name for name, mine in computed.nodes.values() if mine}
    recorder = _Recorder(trace.here)
    with ExitStack() as stack:
        for kind in _kinds(Function):
            if f"{kind.__name__}Backward" in names:
                stack.enter_context(recorder.listening(kind))
        replay.compute(microbatch, mode=trace)
    if recorder.found is None:
        return None
    kind, _, grads = recorder.found
    call = recorder.call or Call(None, None)
    phase = "forward" if grads is None else "backward"
    where = "" if call.line is None else f", {call.line}: {call.line.text}"
    fact = f"custom autograd.Function {kind.__name__}: finite in, non-finite out, in its {phase} pass{where}"
    alone = (
        "it is defined inside of a function, so nothing else can import it"
        if "<" in kind.__qualname__
        else f"to run it alone: from {kind.__module__} import {kind.__qualname__}"
    )
    return Diagnosis(
        cause="operator",
        confidence=0.9,
        phase=phase,
        module=call.module,
        node=f"{kind.__name__}Backward",
        source=None if call.line is None else str(call.line),
        evidence=(
            fact,
            "no operator of torch made the bad values: it computes in NumPy or another library",
            f"there is no operator for repro.py; {alone}",
        ),
        remedy=(
            f"check {kind.__name__} with torch.autograd.gradcheck on the inputs of this step",
            "replace it by standard operators meanwhile",
        ),
    )


class _Recorder:
    """Wraps a Function's own methods for a while; keeps the first call that made bad values of fine ones.

    Args:
        where: says where the program is.
    """

    def __init__(self, where: Callable[[], Call] | None = None) -> None:
        self.found: tuple[type, tuple[Any, ...], tuple[Any, ...] | None] | None = None
        self.call: Call | None = None
        """Where it was called from."""
        self.autocast: tuple[tuple[str, str], ...] = ()
        """Where autocast was on in its forward pass, and in which dtype."""
        self._where = where
        self._calls: dict[int, Call] = {}
        self._casts: dict[int, tuple[tuple[str, str], ...]] = {}
        self._given: dict[int, tuple[Any, tuple[Any, ...], list[int]]] = {}  # by context, which is kept alive

    @contextmanager
    def listening(self, kind: type) -> Iterator[None]:
        separate = kind.setup_context is not Function.setup_context  # type: ignore[attr-defined]
        method = "vjp" if kind.vjp is not Function.vjp else "backward"  # type: ignore[attr-defined]
        wrapped = {
            "forward": self._forward(kind, kind.forward, separate=separate),  # type: ignore[attr-defined]
            method: self._backward(kind, getattr(kind, method)),
        }
        if separate:
            wrapped["setup_context"] = self._setup(kind.setup_context)  # type: ignore[attr-defined]
        before = {name: kind.__dict__.get(name, _NOT_HERE) for name in wrapped}
        try:
            for name, function in wrapped.items():
                setattr(kind, name, staticmethod(function))
            yield
        finally:
            for name, own in before.items():
                if own is _NOT_HERE:
                    delattr(kind, name)
                else:
                    setattr(kind, name, own)
            self._given.clear()

    def _forward(self, kind: type, function: Callable[..., Any], *, separate: bool) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = args if separate else args[1:]
            here = None if self._where is None else self._where()
            if not separate:
                self._remember(args[0], given, here)
            fine = self.found is None and not _bad(given)
            kept = _copied(given) if fine else ()
            result = function(*args, **kwargs)
            if fine and _bad(result):
                self.found, self.call, self.autocast = (kind, kept, None), here, _autocast(given)
            return result

        return forward

    def _setup(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
            self._remember(ctx, tuple(inputs), None if self._where is None else self._where())
            return function(ctx, inputs, output)

        return setup_context

    def _backward(self, kind: type, function: Callable[..., Any]) -> Callable[..., Any]:
        def backward(ctx: Any, *grads: Any) -> Any:
            known = self._given.get(id(ctx))
            fine = self.found is None and known is not None and not _bad(grads)
            kept = _copied(grads) if fine else ()
            result = function(ctx, *grads)
            if fine and known is not None and _bad(result) and _versions(known[1]) == known[2]:
                self.found, self.call = (kind, _copied(known[1]), kept), self._calls.get(id(ctx))
                self.autocast = self._casts.get(id(ctx), ())
            return result

        return backward

    def _remember(self, ctx: Any, args: tuple[Any, ...], here: Call | None) -> None:
        if here is not None:
            self._calls[id(ctx)] = here
        self._casts[id(ctx)] = _autocast(args)
        self._given[id(ctx)] = (ctx, args, _versions(args))


def _kinds(root: type) -> Iterator[type]:
    kinds: list[type] = root.__subclasses__()
    for kind in kinds:
        yield kind
        yield from _kinds(kind)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _autocast(value: Any) -> tuple[tuple[str, str], ...]:
    """Return the kinds of devices among some tensors for which autocast is on now, each with the dtype."""
    kinds = sorted({tensor.device.type for tensor in _tensors(value)} - {"meta"})
    return tuple(
        (kind, str(torch.get_autocast_dtype(kind)).removeprefix("torch."))
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    )


def _bad(value: Any) -> bool:
    return any(judge(tensor) for tensor in _tensors(value))


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(value)]


@torch.no_grad()
def _copied(value: tuple[Any, ...]) -> tuple[Any, ...]:
    copies: tuple[Any, ...] = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, value)
    return copies
