"""Watches every operator of a replayed step, and remembers those whose results are not finite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gradsentinel.diagnosis.memory import Badness, Memory, bad_mask, judge
from gradsentinel.diagnosis.operands import running_statistics
from gradsentinel.diagnosis.record import FIELDS, FROM_BATCH, FROM_BUFFERS, FROM_PARAMETERS, Call, Edge, Event
from gradsentinel.diagnosis.source import user_line
from gradsentinel.diagnosis.spread import measure_of
from gradsentinel.measures.bounds import bounds
from gradsentinel.wording import plain_name

_MAX_COPY = 1 << 20
"""Elements of an argument that is overwritten by its operator: up to here a copy of it is kept."""
_FRAMEWORKS = ("torch.", "megatron.", "mindspeed")
"""How the modules begin whose autograd Functions are no custom operators: what they call counts."""
_SCALED_SUMS = ("addmm", "baddbmm", "addbmm", "addmv", "addr")
"""Operators that add a product to their first argument, beta times; with 0 they do not read it."""
_MULTIPLICATIONS = ("mul", "div", "true_divide", "pow", "addcmul", "addcdiv", "lerp", "foreach_mul")
_ALLOCATIONS = ("empty", "new_empty", "resize")


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what became non-finite where, while it is active; costs time, changes nothing.

    Works on the operators below autograd, forward and backward. Memory is told apart by its storage,
    so views and in-place writes are followed.

    Args:
        modules: the module tree's roots with their prefixes.
        parameters: with their names.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        parameters: Iterable[tuple[str, Tensor]],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.calls: dict[int, Call] = {}
        """Where the forward operator of each autograd node was called, by the node's number."""
        self.custom: set[str] = set()
        """The user's own autograd Functions and operator libraries that ran."""
        self.fields: list[str] = []
        """The paths of the batch's tensors; each has a bit of its own, from `FIELDS` on."""
        self.fed = 0
        """Bits: what was given to modules with parameters of their own. Targets, as a rule, are not."""
        self.outside: list[tuple[str, Tensor]] = []
        """Buffers and attributes, by what they are called in words."""
        self.operators = 0
        self.narrow = False
        """True if some operator's result is narrower than float32."""
        self.in_backward = False
        self.memory = Memory()
        self._bounds = bounds()
        self._room = self._bounds.copies
        self._kept = 0
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        for prefix, root in modules:
            for path, module in root.named_modules():
                name = plain_name(".".join(part for part in (prefix, path) if part))
                self._names.setdefault(id(module), name)
            for name, buffer in root.named_buffers():
                self.declare(buffer, f"buffer {plain_name(name)}", FROM_BUFFERS)
        for name, parameter in parameters:
            self.declare(parameter, f"parameter {name}", FROM_PARAMETERS)

    def declare(self, tensor: Tensor, leaf: str, origin: int) -> None:
        """Say what a tensor is that no operator makes."""
        cell = self.memory.cell(tensor)
        if cell is not None:
            cell.leaf, cell.origin = leaf, origin
            if origin == FROM_BUFFERS:
                self.outside.append((leaf, tensor))

    def declare_field(self, tensor: Tensor, path: str) -> None:
        """Say that a tensor is a field of the batch; what is computed from it can be told by its bit."""
        cell = self.memory.cell(tensor)
        if cell is not None:
            shared = cell.origin if cell.leaf.startswith("batch") else 0  # two fields in one memory
            cell.leaf = f"batch {path}".strip()
            cell.origin = shared | FROM_BATCH | 1 << (FIELDS + len(self.fields))
            self.fields.append(path)

    def here(self) -> Call:
        """Return where the program is: the module that runs, and the user's line."""
        return self._call(backward=False)

    def fields_in(self, origin: int) -> list[str]:
        """Return the fields of the batch among what a value was computed from."""
        return [path for number, path in enumerate(self.fields) if origin >> (FIELDS + number) & 1]

    def begin_backward(self, root: Tensor) -> None:
        """Say that the backward pass is about to start from a tensor."""
        self.in_backward = True

    @contextmanager
    def module_stack(self) -> Iterator[None]:
        """Follow which module is running."""
        hooks = nn.modules.module
        enter = hooks.register_module_forward_pre_hook(self._enter)
        leave = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            with warnings.catch_warnings():
                # A compiled module says that such hooks hear of it twice: they may.
                warnings.filterwarnings("ignore", message="Using `torch.compile")
                yield
        finally:
            enter.remove()
            leave.remove()
            self._stack.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self.in_backward and any(p is not None for p in module._parameters.values()):
            cells = [self.memory.known(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            for cell in cells:
                self.fed |= 0 if cell is None else cell.origin
        self._stack.append(self._names.get(id(module), type(module).__name__))

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._stack:
            self._stack.pop()

    # -- the operators -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and look at what it made."""
        kwargs = kwargs or {}
        self.operators += 1
        if kwargs.get("beta") == 0 and func.overloadpacket.__name__ in _SCALED_SUMS:
            args = (torch.zeros_like(args[0]), *args[1:])  # memory that nobody has written, as a rule
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = [(tensor, self.memory.read(tensor)) for tensor in inputs]
        origins = tuple(0 if cell is None else cell.origin for _, (cell, _) in given)
        edges = tuple(
            Edge(number, cell.writer, cell.leaf, cell.lawful, badness, cell.origin)
            for number, (_, (cell, badness)) in enumerate(given)
            if cell is not None and badness
        )
        masks = []
        if torch.Tag.pointwise in func.tags:
            masks = [(t, bad_mask(t)) for t, (_, bad) in given if bad and t.layout is torch.strided]
        mask_origin = 0
        for tensor, (cell, _) in given:
            mask_origin |= cell.origin if cell is not None and tensor.dtype is torch.bool else 0
        statistics = running_statistics(func, args)
        kept_args, kept_kwargs = _before_overwriting(func, args, kwargs, statistics)
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not outputs and func._schema.is_mutable:
            outputs = _written_by(func, args)
        outputs += statistics
        allocation = is_allocation(func)
        self.narrow = self.narrow or any(o.is_floating_point() and o.dtype.itemsize < 4 for o in outputs)
        self._note(
            func,
            (kept_args, kept_kwargs),
            inputs,
            outputs,
            edges,
            masks,
            origins,
            mask_origin,
            allocation=allocation,
        )
        return result

    def _note(
        self,
        func: Any,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        inputs: list[Tensor],
        outputs: list[Tensor],
        edges: tuple[Edge, ...],
        masks: list[tuple[Tensor, Tensor]],
        origins: tuple[int, ...],
        mask_origin: int,
        *,
        allocation: bool,
    ) -> None:
        node = torch._C._current_autograd_node() if self.in_backward else None
        recomputed = node is not None and torch.is_grad_enabled()
        backward = self.in_backward and not recomputed
        sequence = _sequence(node) if backward else torch._C._autograd._get_sequence_nr() - 1
        first = not backward and sequence not in self.calls
        if first:
            self.calls[sequence] = self._on_behalf_of(self._call(backward=False))
        custom = self._custom(func, node if backward else None)
        if self._is_view(func, inputs, outputs):
            return
        measures = tuple("" if (cell := self.memory.known(t)) is None else cell.measures for t in inputs)
        measure = measure_of(func, given[0], measures)
        origin = 0
        for bits in origins:
            origin |= bits
        badness: list[Badness] = [judge(output) for output in outputs]
        total = Badness(any(b.nan for b in badness), any(b.inf for b in badness))
        if not (total or any(not edge.lawful for edge in edges)):
            self._wrote(outputs, origin, badness, measure=measure)
            return
        call = self._call(backward=True) if backward else self._on_behalf_of(self._call(backward=False))
        numbers = [x for x in tree_leaves(given) if isinstance(x, float) and not math.isfinite(x)]
        fresh = bool(total) and _is_fresh(func, outputs, edges, masks, total)
        if numbers and edges and not (total.nan and not any(edge.badness.nan for edge in edges)):
            fresh = (
                False  # it puts its own infinities beside bad values that came in: not the origin of those
            )
        lawful = (
            not total.nan
            and (not fresh or (bool(numbers) and _fills(func) and not (backward and custom)))
            and all(edge.lawful for edge in edges)
            and bool(edges or numbers)
        )
        event = Event(
            index=len(self.events),
            op=str(func),
            function=func,
            call=call,
            backward=backward,
            recomputed=recomputed,
            node=node.name() if backward and node is not None else None,
            sequence=sequence,
            custom=custom,
            first=first,
            in_no_grad=not torch.is_grad_enabled(),
            badness=total,
            edges=edges,
            fresh=fresh,
            literal=bool(numbers),
            allocation=allocation,
            origin=origin,
            lawful=lawful,
            argument_origins=origins,
            argument_measures=measures,
            mask_origin=mask_origin,
        )
        # An infinity of a mask that is still there after a reduction may be a row that is masked as a whole.
        survived = lawful and bool(edges) and torch.Tag.pointwise not in func.tags
        if total and ((fresh and not lawful) or survived):
            if self._kept < self._bounds.calls:
                self._kept += 1
                event.args, event.kwargs = self._as_given(func, given)
            event.results = tuple(o for o, b in zip(outputs, badness, strict=True) if b)
        self.events.append(event)
        for output, bad in zip(outputs, badness, strict=True):
            self._wrote([output], origin, [bad], event if bad else None, measure=measure)

    def _call(self, *, backward: bool) -> Call:
        return Call(self._stack[-1] if self._stack else (None if backward else ""), user_line(3))

    def _on_behalf_of(self, call: Call) -> Call:
        """Return the call of the forward operator whose derivative a loss takes by `torch.autograd.grad`."""
        running = torch._C._current_autograd_node()
        if self.in_backward or running is None:
            return call
        return self.calls.get(_sequence(running), call)

    def _is_view(self, func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
        """Tell a view by its memory: `to` and `reshape` say in their schema that they may be one."""
        returns = func._schema.returns
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return False
        given = {id(self.memory.known(tensor)) for tensor in inputs}
        return all(id(self.memory.known(output)) in given for output in outputs)

    def _as_given(self, func: Any, given: Any) -> Any:
        """Copy what the program may write to later, as far as there is room: exp(x) keeps no x of its own."""
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if func._schema.is_mutable or size > self._room:  # what it writes to was copied before
            return given
        self._room -= size
        return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, given)

    def _custom(self, func: Any, node: Any) -> str | None:
        name: str | None = None
        if is_own_function(node):
            name = str(node.name())
        elif func.namespace not in ("aten", "prims", "prim", "c10d", "_c10d_functional"):
            name = func.namespace
        if name is not None:
            self.custom.add(name)
        return name

    def _wrote(
        self,
        outputs: Iterable[Tensor],
        origin: int,
        badness: Iterable[Badness],
        event: Event | None = None,
        *,
        measure: str,
    ) -> None:
        for output, bad in zip(outputs, badness, strict=True):
            cell = self.memory.cell(output, made=True)
            if cell is None:
                continue
            self.memory.wrote(cell, output, bad)
            cell.origin |= origin
            cell.measures = measure
            if event is not None:
                cell.writer, cell.lawful = event.index, event.lawful


def _fills(func: Any) -> bool:
    """Tell putting an infinity somewhere, as masks do, from multiplying by it, which is never meant."""
    return func.overloadpacket.__name__.strip("_") not in _MULTIPLICATIONS


def is_allocation(func: Any) -> bool:
    """Return True if an operator hands out memory that nobody has written to."""
    return bool(func.overloadpacket.__name__.lstrip("_").startswith(_ALLOCATIONS))


def _is_fresh(
    func: Any,
    outputs: list[Tensor],
    edges: tuple[Edge, ...],
    masks: list[tuple[Tensor, Tensor]],
    total: Badness,
) -> bool:
    """Tell whether the inputs explain what is bad: element by element where the operator works so."""
    if not edges or (total.nan and not any(edge.badness.nan for edge in edges)):
        return True
    if torch.Tag.pointwise not in func.tags or len(outputs) != 1:
        return False
    unexplained = bad_mask(outputs[0])
    for _, mask in masks:
        try:
            unexplained &= ~mask.expand(unexplained.shape)
        except RuntimeError:  # an in-place operator of another shape
            return False
    return bool(unexplained.any())


def _before_overwriting(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], statistics: Sequence[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as they will still be after the operator has run."""
    mutable, written = func._schema.is_mutable, {id(tensor) for tensor in statistics}
    if not mutable and not written:
        return args, kwargs

    def copy(x: Any) -> Any:
        wanted = isinstance(x, Tensor) and (mutable or id(x) in written) and x.numel() <= _MAX_COPY
        return x.detach().clone() if wanted else x

    kept: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(copy, (tuple(args), kwargs))
    return kept


def _written_by(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the arguments that an operator without a result writes to."""
    schema = func._schema.arguments
    written = [a for a, s in zip(args, schema, strict=False) if s.alias_info and s.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def _sequence(node: Any) -> int:
    return -1 if node is None or node.name().endswith("AccumulateGrad") else int(node._sequence_nr())


def is_own_function(node: Any) -> bool:
    """Return True for the node of an autograd.Function of the user's own; frameworks have some, too."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    written = getattr(type(node), "_forward_cls", type(node)).__module__
    return not written.startswith(_FRAMEWORKS)


def names_of(loss: Tensor) -> Mapping[int, tuple[str, bool]]:
    """Return the autograd nodes behind a loss by number: name, and whether it is a user's Function."""
    found: dict[int, tuple[str, bool]] = {}
    waiting = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found[_sequence(node)] = (node.name(), is_own_function(node))
        waiting += [parent for parent, _ in node.next_functions]
    return found
