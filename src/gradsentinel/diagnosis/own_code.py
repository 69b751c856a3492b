"""What the user's own code does, read off its source: what it writes to that a replay cannot put back."""

from __future__ import annotations

import ast
import builtins
import re
import sys
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gradsentinel.diagnosis.code_tree import (
    alternatives,
    codes,
    has_no_graph,
    in_words,
    node_of,
    statements,
    stores_to_items,
    targets_of,
)

_FRAMEWORKS = frozenset(
    {"accelerate", "deepspeed", "gradsentinel", "lightning", "megatron", "numpy", "peft"}
    | {"pytorch_lightning", "torch", "transformers"}
)
_NOT_OURS = (sys.stdlib_module_names | _FRAMEWORKS) - {"__main__", "random"}
_CHANGES = frozenset(
    {"__delitem__", "__setitem__", "add", "append", "appendleft", "clear", "discard", "extend", "extendleft"}
    | {"fill", "frombytes", "insert", "itemset", "pop", "popitem", "popleft", "put", "remove", "rotate"}
    | {"setdefault", "sort", "reverse", "update"}
)
"""Methods that change a container or an array."""
_LOOKS_INTO = frozenset({"get", "setdefault", "__getitem__"})
"""Methods that hand out what a container holds."""
_SAME_MEMORY = frozenset({"T", "data", "grad", "imag", "mT", "real"})
"""Attributes of a tensor that are the tensor itself, not something that outlives it."""
_DETOURS = frozenset({"detach", "numpy", "storage", "untyped_storage"})
"""Methods through whose result memory is written to without autograd."""
_ADDRESSES = frozenset({"__array_interface__", "__cuda_array_interface__", "data_ptr"})
"""What tells where a tensor's memory is, for a library in C to write to."""
_ONLY_LOOK = frozenset({"bool", "hash", "hex", "id", "int", "len", "print", "repr", "str"})
_SHARE = frozenset(
    {"as_strided", "as_tensor", "asanyarray", "asarray", "from_dlpack", "from_numpy", "memoryview"}
)
"""Functions whose result has the memory of their first argument."""
_FILL_THEIR_FIRST = frozenset({"copyto", "fill_diagonal", "place", "put", "putmask", "setitem"})
"""Functions of NumPy and others that write to their first argument."""
_LIBRARIES = frozenset(
    {"F", "Tensor", "functional", "init", "math", "nn", "np", "numpy", "operator", "torch"}
)
"""What is called by these names changes what it is given, if anything: `torch.add` fills no container."""
_COPIES = frozenset({"clone", "copy", "item", "new_tensor", "tolist"})
_MAKES = re.compile(r"^(torch|np|numpy|math)\.|^(dict|list|set|int|float|defaultdict|Counter|deque)\b")
_OF_THE_STATE = re.compile("param|state_dict|buffer|shadow|ema", re.IGNORECASE)
"""A loop over those keeps averages, or initialises: no activations."""
_NO_GRAPHS = frozenset({"data", "inference_mode", "no_grad", "set_grad_enabled"})


def is_own_code(code: types.CodeType, package: str) -> bool:
    """Return True for code that the user wrote, of a module of this name."""
    installed = any(part in code.co_filename for part in ("site-packages", "dist-packages"))
    return package.partition(".")[0] not in _NOT_OURS and not installed


def is_own(value: Any) -> bool:
    """Return True for what the user wrote: not of torch, a known framework or the standard library."""
    top = top_of(value)
    # A function that `exec` made in a scope of no name is said to be of the builtins, which hold none.
    return top not in _NOT_OURS or (top == "builtins" and isinstance(value, types.FunctionType))


def top_of(value: Any) -> str:
    """Return the name of the package that something comes from."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0]
    module = getattr(value, "__module__", None)
    if not isinstance(module, str):
        module = type(value).__module__
    return module.partition(".")[0]


# -- what outlives a call ----------------------------------------------------------------------------


def containers_written(code: types.CodeType) -> set[str]:
    """Return the names of containers that a function fills or empties, and that it has not made itself.

    A cache that is filled only once holds the same the second time: no value shows that, the code does.
    """
    node = node_of(code)
    if node is None:
        return set()
    local = {name for part in codes(code) for name in (*part.co_varnames, *part.co_cellvars)}
    outside = _Outside(local, node)
    found: set[str] = set()
    for part in ast.walk(node):
        for target in targets_of(part):
            if isinstance(target, ast.Subscript) and outside.is_outside(target.value):
                found.add(_last_name(_holder(target.value)))
        if isinstance(part, ast.Call):
            found |= outside.changed_by(part)
    return found


class _Outside:
    """Tells expressions that reach outside of a function from its own values."""

    def __init__(self, local: set[str], node: ast.AST) -> None:
        self._local = local
        self._aliases: set[str] = set()
        for _ in range(2):  # an alias of an alias
            for part in ast.walk(node):
                value = getattr(part, "value", None)
                if isinstance(part, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and value is not None:
                    names = {t.id for t in targets_of(part) if isinstance(t, ast.Name)}
                    self._aliases |= names if self.is_outside(value) else set()

    def is_outside(self, expression: ast.expr) -> bool:
        """Return True for what outlives the call, as far as its form tells."""
        if isinstance(expression, ast.Name):
            name = expression.id
            return name in self._aliases or (name not in self._local and not hasattr(builtins, name))
        if isinstance(expression, ast.Attribute):
            within = isinstance(expression.value, ast.Name) and expression.attr not in _SAME_MEMORY
            return within or self.is_outside(expression.value)
        if isinstance(expression, ast.Subscript):
            return self.is_outside(expression.value)
        called = expression.func if isinstance(expression, ast.Call) else None
        if isinstance(expression, ast.Call) and _last_name(expression.func) in _SHARE and expression.args:
            return self.is_outside(expression.args[0])
        if isinstance(called, ast.Attribute):
            return called.attr in _LOOKS_INTO | _DETOURS and self.is_outside(called.value)
        return isinstance(called, ast.Name) and called.id in ("globals", "vars")

    def changed_by(self, call: ast.Call) -> set[str]:
        """Return the names of what a call changes that outlives it."""
        called = call.func
        if isinstance(called, ast.Name) and called.id == "setattr" and len(call.args) > 1:
            name = call.args[1]
            return {str(name.value) if isinstance(name, ast.Constant) else _last_name(call.args[0])}
        written = [keyword.value for keyword in call.keywords if keyword.arg == "out"]
        written += call.args[:1] if _last_name(called) in _FILL_THEIR_FIRST else []
        # A tensor's own version tells what is written to it, unless that goes through another one.
        if isinstance(called, ast.Attribute) and (
            (called.attr in _CHANGES and root_of(called) not in _LIBRARIES)
            or (_is_in_place(called) and takes_a_detour(called.value))
        ):
            written.append(called.value)
        return {_last_name(_holder(expression)) for expression in written if self.is_outside(expression)}


def assigned_in_turns(
    code: types.CodeType, *, every: bool, known: Collection[types.CodeType] = ()
) -> set[str]:
    """Return the names outside of local variables that a function assigns to while a loop runs.

    Those of attributes with a dot before them.

    Args:
        code: of the function.
        every: True to take in what it assigns outside of its own loops: it is called by one.
        known: functions that are left out where it defines them.
    """
    node = node_of(code)
    if node is None:
        return set()
    loops = (ast.For, ast.AsyncFor, ast.While)
    where = [node] if every else [part for part in ast.walk(node) if isinstance(part, loops)]
    local = {*code.co_varnames, *code.co_cellvars} if code.co_name != "<module>" else set()
    outside = _Outside({name for part in codes(code) for name in part.co_varnames} | local, node)
    found: set[str] = set()
    left_out = _inside_of(known, code)
    for part in (inner for outer in where for inner in ast.walk(outer) if id(inner) not in left_out):
        for target in targets_of(part):
            if isinstance(target, ast.Name) and target.id not in code.co_varnames:
                found |= {target.id}
            elif isinstance(target, ast.Attribute):
                found |= {f".{target.attr}"}
            elif isinstance(target, ast.Subscript) and outside.is_outside(target.value):
                name = _last_name(target.value)
                found |= {f".{name}" if isinstance(target.value, ast.Attribute) else name}
    return found


# -- what autograd does not see ----------------------------------------------------------------------


def writes_beside_autograd(
    code: types.CodeType,
    values: Mapping[str, Any] | None = None,
    known: Collection[types.CodeType] = (),
    *,
    graph: bool = True,
    given: Collection[str] = (),
) -> list[str]:
    """Return where a function writes to tensors without autograd: 'loop.py:12'.

    Through `.data`, `.detach()`, NumPy or bare memory, or under `no_grad`: that changes what a forward pass
    computes and leaves no trace in the graph. Averages of weights, and what the function has just made, do
    not count.

    Args:
        code: of the function.
        values: what its names stand for, as far as known.
        known: functions that are left out where it defines them.
        graph: False if it is called under `no_grad`.
        given: its parameters that hold tensors which autograd does not see.
    """
    node, place = node_of(code), Path(code.co_filename).name
    if node is None:  # no form shows what is written; names do, and that something is
        return [f"{place}:{code.co_firstlineno}"] * stores_to_items(code, _DETOURS | _SHARE | _NO_GRAPHS)
    beside = _Beside(node, values or {}, given, graph=graph)
    left_out = _inside_of(known, code)
    parts = (part for part in statements(node) if id(part) not in left_out)
    lines = sorted({part.lineno for part in parts if beside.writes(part)})
    return [f"{place}:{line}" for line in lines]


class _Beside:
    def __init__(
        self, node: ast.AST, values: Mapping[str, Any], given: Collection[str], *, graph: bool
    ) -> None:
        self._values = values
        self._without: set[int] = set()
        """The statements that run without a graph, by id."""
        self._made: set[str] = set()
        self._detours = aliases_of(node, given)
        for part in ast.walk(node):
            if has_no_graph(part) or not graph:
                self._without |= {id(inner) for inner in ast.walk(part)} if graph else {id(part)}
            over = part.iter if isinstance(part, (ast.For, ast.comprehension)) else None
            if over is not None and _OF_THE_STATE.search(in_words(over)):
                self._made |= {n.id for n in ast.walk(part.target) if isinstance(n, ast.Name)}  # type: ignore[attr-defined]
            value = getattr(part, "value", None)
            if isinstance(part, (ast.Assign, ast.AnnAssign)) and value is not None:
                names = {t.id for t in targets_of(part) if isinstance(t, ast.Name)}
                self._made |= names if _is_made(value) else set()

    def writes(self, part: ast.AST) -> bool:
        """Return True if a statement or call writes to a tensor that it has not made, without a graph."""
        targets = targets_of(part)
        written = [t.value for t in targets if isinstance(t, ast.Subscript)]
        written += [
            t for t in targets if isinstance(t, ast.Attribute) and t.attr == "data" and not _is_self(t)
        ]
        if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
            written.append(part.target)
        if isinstance(part, ast.Call):
            written += written_by(part)
        return any(self._counts(expression, part) for expression in written)

    def _counts(self, expression: ast.expr, part: ast.AST) -> bool:
        root = root_of(expression)
        if root is None or root in self._made or not self._may_be_activation(root):
            return False
        if takes_a_detour(expression) or root in self._detours:
            return True
        return id(part) in self._without and not _reaches_into_an_object(expression)

    def _may_be_activation(self, name: str) -> bool:
        """What is known by its value must be a tensor, and no weight; a name alone may be anything."""
        if name not in self._values:
            return True
        value = self._values[name]
        return not isinstance(value, nn.Parameter) and (
            isinstance(value, (Tensor, nn.Module)) or type(value).__module__.startswith("numpy")
        )


def written_by(call: ast.Call) -> list[ast.expr]:
    """What a call writes to, by the name of its function: `x.add_(1)`, `torch.Tensor.add_(x, 1)`."""
    called, first = call.func, call.args[:1]
    given = (*call.args, *(keyword.value for keyword in call.keywords))
    if _last_name(called) not in _ONLY_LOOK:
        parts = [part for one in given for part in ast.walk(one) if isinstance(part, ast.Attribute)]
        owners = [part.value for part in parts if part.attr in _ADDRESSES]
        if owners:
            return [ast.Attribute(owner, "data", ast.Load()) for owner in owners]
    written = [keyword.value for keyword in call.keywords if keyword.arg == "out"]
    if isinstance(called, ast.Attribute) and (_is_in_place(called) or called.attr == "__setitem__"):
        written += first if root_of(called) in _LIBRARIES else [called.value]
    if _last_name(called) in _FILL_THEIR_FIRST:
        written += first
    if isinstance(called, ast.Name) and called.id == "setattr" and len(call.args) > 1:
        data = isinstance(call.args[1], ast.Constant) and call.args[1].value == "data"
        written += [ast.Attribute(call.args[0], "data", ast.Store())] if data else []
    return [x for one in written for x in (one.elts if isinstance(one, (ast.List, ast.Tuple)) else [one])]


def _is_in_place(called: ast.Attribute) -> bool:
    return called.attr.endswith("_") and not called.attr.endswith("__")


def _is_self(target: ast.Attribute) -> bool:
    """True for `self.data = batch`, an attribute of the user's."""
    return isinstance(target.value, ast.Name) and target.value.id == "self"


def _reaches_into_an_object(expression: ast.expr) -> bool:
    """Tell `self.kept[name]` from `x.select(0, 1)`, which is a part of x."""
    called = {id(inner.func) for inner in ast.walk(expression) if isinstance(inner, ast.Call)}
    attributes = (inner for inner in ast.walk(expression) if isinstance(inner, ast.Attribute))
    return any(id(inner) not in called for inner in attributes)


def takes_a_detour(expression: ast.expr) -> bool:
    """Return True for `x.data[...]`, `x.detach()`, `x.cpu().numpy()`, and not for a copy of it."""
    node: ast.AST = expression
    found = False
    while True:
        if isinstance(node, ast.Attribute):
            found = found or node.attr == "data"
            node = node.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and _last_name(node.func) in _SHARE and node.args:
            found, node = True, node.args[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _COPIES:
                return False
            found = found or node.func.attr in _DETOURS
            node = node.func.value
        else:
            return found


def aliases_of(node: ast.AST, given: Collection[str]) -> set[str]:
    """Return the names of tensors that autograd does not see in a function, those it is given included."""
    found = set(given)
    for part in (*ast.walk(node), *ast.walk(node)):  # an alias of an alias
        value: Any = getattr(part, "value", None)
        named = isinstance(part, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and value is not None
        for one in alternatives(value) if named else ():
            if takes_a_detour(one) or (root_of(one) in found and not _is_made(one)):
                found |= {t.id for t in targets_of(part) if isinstance(t, ast.Name)}
    return found


def _is_made(value: ast.expr) -> bool:
    if isinstance(value, (ast.Constant, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.Tuple)):
        return True
    if not isinstance(value, ast.Call):
        return False
    called = value.func
    if _last_name(called) in _SHARE:
        return False
    return bool(_MAKES.match(in_words(called))) or (
        isinstance(called, ast.Attribute) and called.attr in _COPIES
    )


def _inside_of(known: Collection[types.CodeType], code: types.CodeType) -> set[int]:
    """The ids of what belongs to some functions, of those that one function defines."""
    nodes = (node_of(inner) for inner in codes(code) if inner is not code and inner in known)
    return {id(part) for node in nodes if node is not None for part in ast.walk(node)}


def _holder(expression: ast.AST) -> ast.AST:
    """Return what memory belongs to: `kept` of `kept[0].data` and of `np.asarray(kept)`."""
    while True:
        called = expression.func if isinstance(expression, ast.Call) else None
        if isinstance(expression, ast.Subscript) or (
            isinstance(expression, ast.Attribute) and expression.attr in _SAME_MEMORY
        ):
            expression = expression.value
        elif isinstance(expression, ast.Call) and _last_name(expression.func) in _SHARE and expression.args:
            expression = expression.args[0]
        elif isinstance(called, ast.Attribute) and called.attr in _LOOKS_INTO | _DETOURS:
            expression = called.value
        else:
            return expression


def root_of(expression: ast.AST) -> str | None:
    """Return the name that an expression begins with, or shares the memory of; None if it has none."""
    while not isinstance(expression, ast.Name):
        if isinstance(expression, (ast.Attribute, ast.Subscript)):
            expression = expression.value
        elif isinstance(expression, ast.Call):
            shared = _last_name(expression.func) in _SHARE and expression.args
            expression = expression.args[0] if shared else expression.func
        else:
            return None
    return expression.id


def _last_name(expression: ast.AST) -> str:
    if isinstance(expression, ast.Attribute):
        return expression.attr
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
        expression = expression.func  # what `cache.setdefault(key, [])` hands out is a part of it
    inside = getattr(expression, "value", None) or getattr(expression, "func", None)
    return "a container" if inside is None else _last_name(inside)
