"""The source of functions, as far as it can be read."""

from __future__ import annotations

import ast
import dis
import linecache
import re
import types
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from typing import Any

_NO_GRAPH = re.compile(r"\b(no_grad|inference_mode|set_grad_enabled)\b")
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def stores_to_items(code: types.CodeType, names: Collection[str]) -> bool:
    """Return True if a function uses one of these names and writes to items, or calls what works in place."""
    used = {name for part in codes(code) for name in part.co_names}
    if used.isdisjoint(names):
        return False
    in_place = any(name.endswith("_") and not name.endswith("__") for name in used)
    steps = (step.opname for part in codes(code) for step in dis.get_instructions(part))
    return in_place or any(step == "STORE_SUBSCR" for step in steps)


def node_of(code: types.CodeType) -> ast.AST | None:
    """Return the function's place in its source; None if there is no source, or it is another one by now."""
    found = _source(code.co_filename)
    if found is None:
        return None
    tree, functions = found
    if code.co_name == "<module>":
        inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return ast.Module([part for part in tree.body if not isinstance(part, inner)], [])
    return functions.get((code.co_name, code.co_firstlineno))


def in_words(node: ast.AST) -> str:
    """Return an expression as it may be written; empty for one of generated code that nests too deep."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return ""


def has_no_graph(part: ast.AST) -> bool:
    """Return True for a block under `no_grad`, and for a function that is decorated so."""
    by: list[ast.expr] = []
    if isinstance(part, (ast.With, ast.AsyncWith)):
        by = [item.context_expr for item in part.items]
    elif isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
        by = part.decorator_list
    return any(_NO_GRAPH.search(in_words(expression)) for expression in by)


def called_without_graph(code: types.CodeType, is_activation: Callable[[str], bool]) -> set[str]:
    """Return the names of what a function calls under `no_grad` with one of its activations."""
    node = node_of(code)
    blocks = [part for part in ast.walk(node) if has_no_graph(part)] if node is not None else []
    called = {
        call.func
        for block in blocks
        for call in ast.walk(block)
        if isinstance(call, ast.Call)
        and any(isinstance(given, ast.Name) and is_activation(given.id) for given in call.args)
    }
    names = (getattr(function, "id", getattr(function, "attr", "")) for function in called)
    return set(filter(None, names))


def statements(node: ast.AST) -> Iterator[Any]:
    """Yield the parts of a function that have a line."""
    yield from (part for part in ast.walk(node) if hasattr(part, "lineno"))


def targets_of(part: ast.AST) -> list[ast.expr]:
    """What a statement assigns to or deletes, taken apart."""
    found: list[ast.expr] = []
    if isinstance(part, (ast.Assign, ast.Delete)):
        found = list(part.targets)
    elif isinstance(part, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.AsyncFor)):
        found = [part.target]
    return [
        leaf
        for target in found
        for leaf in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])
    ]


def alternatives(expression: ast.expr) -> Iterator[ast.expr]:
    """Yield what an expression may hand out: both sides of `x.data if late else x`, and all of a list."""
    inside: list[ast.expr]
    if isinstance(expression, (ast.Starred, ast.NamedExpr)):
        inside = [expression.value]
    elif isinstance(expression, ast.IfExp):
        inside = [expression.body, expression.orelse]
    elif isinstance(expression, ast.BoolOp):
        inside = expression.values
    elif isinstance(expression, (ast.List, ast.Tuple, ast.Set)):
        inside = expression.elts
    elif isinstance(expression, ast.Dict):
        inside = expression.values
    else:
        yield expression
        return
    for one in inside:
        yield from alternatives(one)


@lru_cache(maxsize=64)
def _source(filename: str) -> tuple[ast.Module, dict[tuple[str, int], ast.AST]] | None:
    """Return a file's tree, and its functions by name and first line: a large file is walked once."""
    lines = linecache.getlines(filename)
    if not lines:
        return None
    try:
        tree = ast.parse("".join(lines))
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return None
    functions: dict[tuple[str, int], ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            starts = [node.lineno, *(part.lineno for part in getattr(node, "decorator_list", []))]
            functions.setdefault((getattr(node, "name", "<lambda>"), min(starts)), node)
    return tree, functions
