"""The autograd graph behind a loss, to be compared: did the loop compute what `forward=` computes?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

_OURS = "gradsentinel."
_WRAPPER = "_DDPSink"
"""A node that DDP puts around the outputs of a model; a replay calls the model without it."""

Graph: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The nodes in the order in which they are reached, each with its name and the numbers of those behind it."""


def graph_of(root: Any) -> Graph:
    """Return the nodes behind an autograd node; empty for None.

    The nodes outlive the backward pass, which frees only what they had saved. Nodes of ours (faults that are
    put in for a fire drill) are looked through: they are no part of the user's program.
    """
    numbers: dict[Any, int] = {}
    behind: list[Sequence[Any]] = []
    waiting = [_through(root)]
    while waiting:
        node = waiting.pop()
        if node is None or node in numbers:
            continue
        numbers[node] = len(numbers)
        behind.append([_through(parent) for parent, _ in node.next_functions])
        waiting += reversed(behind[-1])
    return tuple(
        (node.name(), tuple(-1 if parent is None else numbers[parent] for parent in parents))
        for node, parents in zip(numbers, behind, strict=True)
    )


def difference(loop: Graph, replay: Graph) -> str:
    """Say which nodes only one of two graphs has; empty if the graphs are the same."""
    if loop == replay:
        return ""
    mine, theirs = (Counter(name for name, _ in graph) for graph in (loop, replay))
    more, less = mine - theirs, theirs - mine
    said = [f"{_listed(more)} only in the loop"] if more else []
    said += [f"{_listed(less)} only in forward="] if less else []
    return " and ".join(said) or "the same operators, put together in another way"


def _listed(names: Counter[str]) -> str:
    shown = [name if count == 1 else f"{count} {name}" for name, count in names.most_common(3)]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _through(node: Any) -> Any:
    while node is not None and _is_instrument(node):
        node = node.next_functions[0][0] if node.next_functions else None
    return node


def _is_instrument(node: Any) -> bool:
    written = getattr(type(node), "_forward_cls", None)
    ours = written is not None and str(written.__module__).startswith(_OURS)
    return ours or str(node.name()).startswith(_WRAPPER)
