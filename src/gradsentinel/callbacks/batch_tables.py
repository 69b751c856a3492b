"""The tables of the model in which numbers are looked up."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gradsentinel.host import Host

_SPREAD = "VocabParallelEmbedding"
"""Megatron's: looks up what is in this rank's rows, and makes 0 of the rest, whatever it is."""
_MOST_NODES = 32
"""So far back it is seen that a table was computed of one of the model's parameters."""


class Tables:
    """Knows which tables are the watched model's, by what it consists of at the moment.

    Args:
        host: has the model.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.find()

    def find(self) -> None:
        """Look at the model anew."""
        modules = [
            (prefix, path, module)
            for prefix, root in self.host.modules()
            for path, module in root.named_modules()
        ]
        self._sizes = [
            (module, name, child, _rows(child))
            for _, _, module in modules
            for name, child in module._modules.items()
            if child is not None and _rows(child)
        ]
        spread = [(p, n, m) for p, n, m in modules if type(m).__name__ == _SPREAD and _rows(m)]
        self.spread = [module for _, _, module in spread]
        """Those of which this process holds a part."""
        self._weighted = [(p, n, m) for p, n, m in modules if _rows(m)]
        self._own = [
            (_joined(p, n, name), buffer)
            for p, n, m in modules
            for name, buffer in m._buffers.items()
            if buffer is not None
        ]
        self._own += self.host.named_parameters()
        self._names = {id(m): _joined(p, n) or type(m).__name__ for p, n, m in spread}
        self._names |= {id(one): name.removesuffix(".weight") for name, one in self._own}
        self._generation = getattr(self.host, "generation", 0)

    def moved(self) -> bool:
        """Say whether a table is not any more what it was."""
        if getattr(self.host, "generation", 0) != self._generation:
            return True
        for parent, name, module, size in self._sizes:
            if parent._modules.get(name) is not module or _rows(module) != size:
                return True
        return False

    def name_of(self, table: Any) -> str | None:
        """Return the name of a table of the model, '' if it has none; None if it is none of the model's."""
        name = self._names.get(id(table))
        if name is not None or not isinstance(table, Tensor):
            return name
        for prefix, path, module in self._weighted:  # a shard that was put together for the forward pass
            if module.__dict__.get("weight") is table or module._parameters.get("weight") is table:
                return _joined(prefix, path)
        address = _address(table)
        if address and any(_address(one) == address for _, one in self._own):
            return ""
        return "" if self._is_computed(table) else None

    def _is_computed(self, table: Tensor) -> bool:
        """Say whether a table was computed of a parameter of the model: tied, parametrized, cast."""
        waiting, seen = [table.grad_fn], 0
        while waiting and seen < _MOST_NODES:
            node, seen = waiting.pop(0), seen + 1
            if node is None:
                continue
            if id(getattr(node, "variable", None)) in self._names:
                return True
            waiting += [before for before, _ in node.next_functions]
        return False


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _rows(module: nn.Module) -> int:
    """Return the number of rows of a table, as its module has it; 0 for others."""
    rows = getattr(module, "num_embeddings", 0)
    return rows if isinstance(rows, int) else 0


def _address(one: Tensor) -> int:
    """Return where the memory of a plain tensor begins; 0 if nobody can tell."""
    plain = type(one) in (Tensor, nn.Parameter) and one.device.type != "meta"
    return one.untyped_storage().data_ptr() if plain else 0
