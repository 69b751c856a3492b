"""The source of functions, as far as it can be read."""

from __future__ import annotations

import ast
import dis
import linecache
import types
from collections.abc import Collection, Iterator
from functools import lru_cache

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
