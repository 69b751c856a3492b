"""Where the loop's own code writes to weights, beside the optimizer: they may be others in a replay."""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Collection, Iterator
from pathlib import Path

from gradsentinel.diagnosis.code_tree import has_no_graph, in_words, node_of, statements, targets_of
from gradsentinel.diagnosis.own_code import root_of, takes_a_detour, written_by

_OVER_WEIGHTS = re.compile(r"\b(named_)?param(eter)?s\b")
_OF_OTHERS = re.compile(
    "average|avg|best|copy|ema|frozen|grad|initial|momentum|old|ref|shadow|swa|target|teacher", re.IGNORECASE
)
"""By such names go averages and copies of weights, which a forward pass does not compute with."""


def weights_written(
    code: types.CodeType, names: Collection[str], within: tuple[int, int] | None = None
) -> list[str]:
    """Return where a function writes to what seem to be weights, without autograd: 'loop.py:12'.

    Args:
        code: of the function.
        names: of parameters, as their modules have them: `weight`, `bias`.
        within: the first and the last line that count; None: all of them.
    """
    node = node_of(code)
    if node is None:
        return []
    bound = set(_bound_to_weights(node))
    blocks = [part for part in ast.walk(node) if has_no_graph(part)]
    without = {id(inner) for block in blocks for inner in ast.walk(block)}
    lines = {
        part.lineno
        for part in statements(node)
        for written in _written_in(part)
        if (takes_a_detour(written) or id(part) in without)
        if _is_weight(written, names, bound)
    }
    first, last = within or (0, max(lines, default=0))
    return [f"{Path(code.co_filename).name}:{line}" for line in sorted(lines) if first <= line <= last]


def _written_in(part: ast.AST) -> list[ast.expr]:
    written = [t.value for t in targets_of(part) if isinstance(t, ast.Subscript)]
    written += [t for t in targets_of(part) if isinstance(t, ast.Attribute) and t.attr == "data"]
    if isinstance(part, ast.AugAssign):
        written.append(part.target)
    if isinstance(part, ast.Call) and getattr(part.func, "attr", "") != "requires_grad_":
        written += written_by(part)
    return written


def _is_weight(expression: ast.expr, names: Collection[str], bound: Collection[str]) -> bool:
    said = in_words(expression)
    root = root_of(expression)
    if root is None or _OF_OTHERS.search(said):
        return False
    parts = (part.attr for part in ast.walk(expression) if isinstance(part, ast.Attribute))
    return root in bound or any(part in names for part in parts)


def _bound_to_weights(node: ast.AST) -> Iterator[str]:
    """Yield the names that stand for one weight after the other in a loop over them."""
    for part in ast.walk(node):
        if isinstance(part, (ast.For, ast.comprehension)):
            for target, over in _pairs(part.target, part.iter):
                if _OVER_WEIGHTS.search(said := in_words(over)) and not _OF_OTHERS.search(said):
                    last = target.elts[-1] if isinstance(target, ast.Tuple) and target.elts else target
                    if isinstance(last, ast.Name):
                        yield last.id


def _pairs(target: ast.expr, over: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Take `for i, (a, b) in enumerate(zip(x, y))` apart."""
    called = over.func.id if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) else ""
    parts = target.elts if isinstance(target, ast.Tuple) else []
    if isinstance(over, ast.Call) and called == "enumerate" and len(parts) > 1 and over.args:
        yield from _pairs(parts[1], over.args[0])
    elif isinstance(over, ast.Call) and called == "zip" and len(parts) == len(over.args):
        for one, inner in zip(parts, over.args, strict=True):
            yield from _pairs(one, inner)
    else:
        yield target, over
