"""One operator call taken out of a step: run alone, cut to size, and told in a few facts."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gradsentinel.diagnosis.operands import bad_index, running_statistics
from gradsentinel.diagnosis.record import Event
from gradsentinel.diagnosis.storable import nbytes
from gradsentinel.measures.inspection import parts_of

STANDARD = ("aten", "prims")
"""Namespaces of operators that come with torch."""
_MOST_ROWS = 8
_MOST_TRIALS = 64
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True)
class Expected:
    """The element that the operator made bad."""

    output: int
    index: tuple[int, ...]
    nan: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCall:
    """An operator and what it was given; enough to run it anywhere."""

    name: str
    """Namespace, operator and overload: 'aten::div.Tensor'."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: str
    """Where it ran."""
    expected: Expected | None = None
    """None for memory that nobody wrote: there any element will do."""
    reproduced: bool | None = None
    """Whether it made the same of the same inputs when they were put aside; None if that was not tried."""
    cut: str = ""
    """Which part of the inputs this is, if not all."""
    modules: tuple[str, ...] = ()
    """Modules whose import makes the operator known to torch."""
    script: str = ""
    """The training script, if that makes it known: nobody imports one of those unasked."""
    libraries: tuple[str, ...] = ()
    """Shared libraries that may hold it."""


class CannotRun(RuntimeError):
    """An operator cannot be run here; the message says why."""


def call_of(event: Event, *, device: torch.device, limit: int) -> tuple[OperatorCall | None, str]:
    """Return the call of an operator that made bad values, or None and why it is not there.

    Runs the operator once more on the same inputs, where they are.

    Args:
        event: the operator, as it was traced.
        device: where it ran.
        limit: bytes; larger inputs are cut down to the bad rows, if the operator allows it.
    """
    if not (event.args or event.kwargs):
        return None, f"inputs of {event.op}: the trace has not kept them"
    module, libraries = whereabouts(event.function)
    call = OperatorCall(
        name=name_of(event.function),
        args=tree_map(_detached, tuple(event.args)),
        kwargs=tree_map(_detached, dict(event.kwargs)),
        device=str(device),
        modules=() if module in (None, "__main__") else (module,),
        script=script_name() if module == "__main__" else "",
        libraries=libraries,
    )
    size = nbytes([call.args, dict(call.kwargs)])
    if size > limit:
        smaller = _cut(event, call, limit)
        if smaller is None:
            return None, f"inputs of {event.op}: {size} bytes, and no part of them alone shows the fault"
        call = smaller
    if event.allocation:
        return call, ""
    try:
        outputs = run(event.function, call.args, call.kwargs)
    except Exception as error:  # noqa: BLE001 - a custom operator may raise anything
        return call, f"a trial of {event.op} alone: it raised {type(error).__name__}: {error}"
    expected = _expected(event, outputs, whole=not call.cut)
    return replace(call, expected=expected, reproduced=expected is not None), ""


def name_of(function: Any) -> str:
    """Return namespace, operator and overload of a torch operator."""
    return f"{function.namespace}::{function.overloadpacket.__name__}.{function._overloadname}"


def find(name: str) -> Any:
    """Return the operator of that name.

    Raises:
        CannotRun: if this torch has none, or it is no plain computation on tensors.
    """
    match = re.fullmatch(r"(\w+)::(\w+)\.(\w+)", name)
    if match is None:
        raise CannotRun(f"{name!r} is no name of an operator")
    try:
        function = getattr(getattr(getattr(torch.ops, match[1]), match[2]), match[3])
    except AttributeError:
        raise CannotRun(f"{name} is not known to torch {torch.__version__} here") from None
    schema = getattr(function, "_schema", None)
    # A bundle may come from anybody: operators that open files are no evidence of anything.
    if (
        schema is None
        or not torch._C._dispatch_has_kernel(_registered_name(schema))
        or any(argument.name in ("filename", "file") for argument in schema.arguments)
    ):
        raise CannotRun(f"{name} is no computation on tensors")
    return function


def run(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Run an operator on copies of what it would overwrite; return the tensors it made or wrote."""
    if function._schema.is_mutable or running_statistics(function, args):
        args, kwargs = tree_map(_cloned, (tuple(args), dict(kwargs)))
    with torch.no_grad():
        result = function(*args, **kwargs)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if not outputs and function._schema.is_mutable:
        schema = function._schema.arguments
        written = [a for a, s in zip(args, schema, strict=False) if s.alias_info and s.alias_info.is_write]
        outputs = [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]
    return outputs + running_statistics(function, args)


def shows(call: OperatorCall, outputs: Sequence[Tensor]) -> bool:
    """Return True if the element that was bad is bad in these outputs; NaN or Inf does not matter."""
    expected = call.expected
    if expected is None or expected.output >= len(outputs):
        return any(bool(bad_elements(output).any()) for output in outputs)
    bad = bad_elements(outputs[expected.output])
    try:
        return bool(bad[expected.index])
    except IndexError:
        return bool(bad.any())


@torch.no_grad()
def bad_elements(tensor: Tensor) -> Tensor:
    """Return which elements are NaN or Inf; of a sparse tensor which of its values."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return torch.zeros((), dtype=torch.bool)
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    elif values.layout is not torch.strided:
        values = values.values()
    if values.dtype.itemsize == 1:
        values = values.float()
    bad = ~torch.isfinite(parts_of(values))
    return bad.any(-1) if values.is_complex() else bad


@contextmanager
def filled_memory() -> Iterator[None]:
    """Let torch fill fresh memory with NaN, so that what nobody writes shows."""
    mode = torch.get_deterministic_debug_mode()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.set_deterministic_debug_mode(mode)


def whereabouts(function: Any) -> tuple[str | None, tuple[str, ...]]:
    """Return which module makes an operator known, or which loaded libraries may; none for torch's own."""
    if function.namespace in STANDARD:
        return None, ()
    schema = function._schema.name
    module = _module_of_custom_op(schema) or _module_of_registration(function)
    if module is None and function.namespace in sys.modules:
        module = function.namespace
    return module, () if module is not None else tuple(sorted(map(str, torch.ops.loaded_libraries)))


def _module_of_custom_op(schema: str) -> str | None:
    definitions = getattr(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
    definition = definitions.get(schema)
    module: str | None = getattr(getattr(definition, "_init_fn", None), "__module__", None)
    return module


def _module_of_registration(function: Any) -> str | None:
    """Find the module whose file registered the operator: the dispatcher remembers it."""
    registered = torch._C._dispatch_dump(_registered_name(function._schema))
    for file in re.findall(r"registered at (.+?):\d+", registered):
        if file.endswith(".py") and not file.startswith(_TORCH):
            for module in [*sys.modules.values()]:
                if getattr(module, "__file__", None) == file:
                    return str(module.__name__)
    return None


def _registered_name(schema: Any) -> str:
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def script_name() -> str:
    """Return the name under which the script that runs could be imported."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return str(spec.name) if spec is not None else Path(getattr(main, "__file__", None) or "script").stem


# -- the element to look at ---------------------------------------------------------------------------


def _expected(event: Event, outputs: Sequence[Tensor], *, whole: bool) -> Expected | None:
    """Return the first element that the operator made bad; None if all it makes now is finite."""
    known = bad_index(event) if whole else None
    flags = [bad_elements(output) for output in outputs]
    if known is not None:
        index, result = known
        for number, (output, bad) in enumerate(zip(outputs, flags, strict=True)):
            if output.shape == result.shape and bad.shape == output.shape and bool(bad[index]):
                return Expected(number, index, bool(torch.isnan(output[index])))
    found = []
    for number, (output, bad) in enumerate(zip(outputs, flags, strict=True)):
        if not bool(bad.any()):
            continue
        nans = torch.isnan(output) if output.layout is torch.strided else bad
        wanted = nans & bad if event.badness.nan and nans.shape == bad.shape and bool(nans.any()) else bad
        place = int(wanted.flatten().to(torch.uint8).argmax())
        index = (
            tuple(int(i) for i in torch.unravel_index(torch.tensor(place), bad.shape)) if bad.dim() else ()
        )
        is_nan = nans.shape == bad.shape and bool(nans[index]) and output.layout is torch.strided
        found.append(Expected(number, index, is_nan))
    return min(found, key=lambda entry: (event.badness.nan and not entry.nan, entry.output), default=None)


# -- cutting -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Part:
    """The inputs as they have been cut so far, and the flags of the result that belong to them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    bad: Tensor
    said: list[str] = field(default_factory=list)


def _cut(event: Event, call: OperatorCall, limit: int) -> OperatorCall | None:
    """Keep only the rows that are bad, along one dimension of the result after the other.

    Whether the operator treats its rows apart is not looked up but tried: the part is kept if the
    operator makes the same bad elements of it.
    """
    if event.allocation or not event.results or event.results[0].layout is not torch.strided:
        return None
    result = event.results[0]
    part = _Part(tuple(call.args), dict(call.kwargs), bad_elements(result))
    for dim in sorted(range(result.dim()), key=lambda d: -result.shape[d]):
        if nbytes([part.args, part.kwargs]) <= limit:
            break
        part = _without_good_rows(event, part, dim) or part
    if not part.said or nbytes([part.args, part.kwargs]) > limit:
        return None
    return replace(call, args=part.args, kwargs=part.kwargs, cut="; ".join(part.said))


def _without_good_rows(event: Event, part: _Part, dim: int) -> _Part | None:
    length = part.bad.shape[dim]
    others = tuple(d for d in range(part.bad.dim()) if d != dim)
    rows = (part.bad.any(others) if others else part.bad).nonzero().flatten()[:_MOST_ROWS]
    if not 0 < len(rows) < length:
        return None
    wanted = part.bad.index_select(dim, rows)
    leaves = [leaf for leaf in tree_leaves((part.args, part.kwargs)) if isinstance(leaf, Tensor)]
    ways = [_ways(tensor, part.bad.dim(), dim, length) for tensor in leaves]
    trials = sorted(itertools.islice(itertools.product(*ways), _MOST_TRIALS), key=_uncut)
    for trial in trials:
        if all(where is None for where in trial):
            continue
        chosen = {id(tensor): where for tensor, where in zip(leaves, trial, strict=True)}

        def select(value: Any, chosen: Mapping[int, int | None] = chosen) -> Any:
            where = chosen.get(id(value)) if isinstance(value, Tensor) else None
            return value if where is None else value.index_select(where, rows.to(value.device))

        args, kwargs = tree_map(select, (part.args, part.kwargs))
        try:
            outputs = run(event.function, args, kwargs)
        except Exception:  # noqa: BLE001, S112 - inputs that do not fit each other: the next trial may
            continue
        if any(o.shape == wanted.shape and torch.equal(bad_elements(o), wanted) for o in outputs):
            said = f"{rows.tolist()} of {length} along dimension {dim} of the result"
            return _Part(args, kwargs, wanted, [*part.said, said])
    return None


def _ways(tensor: Tensor, dims: int, dim: int, length: int) -> list[int | None]:
    """Along which of its dimensions a tensor may go with that one of the result, the likeliest first."""
    if tensor.layout is not torch.strided:
        return [None]
    aligned = (dim, dim - dims + tensor.dim())
    ways = [d for d in dict.fromkeys(aligned) if 0 <= d < tensor.dim() and tensor.shape[d] == length]
    return [*ways, None]


def _uncut(trial: Sequence[int | None]) -> int:
    return sum(where is None for where in trial)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
