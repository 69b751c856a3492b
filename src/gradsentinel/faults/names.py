"""Names of the modules and parameters of a model, as users write them: without what wrappers put in front."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from gradsentinel.faults.dice import Dice

_WRAPPERS = {
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
}  # torch.compile, FSDP, checkpoint
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)  # these call what they wrap "module"


class Names:
    """Finds modules and parameters by exact name, by pattern, or by the seed.

    `blocks.0.attn` is found in a model that is compiled or wrapped for parallel training too; the name with
    the wrappers' parts works as well.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = {}
        self.parameters: dict[str, str] = {}
        self._tidy: dict[str, str] = {}
        for raw, name, module in _walk(model, "", ""):
            self._tidy[raw] = name
            self.modules[name] = module  # a wrapper and what it wraps share a name: the inner one stays
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    self._tidy[_join(raw, leaf)] = _join(name, leaf)
                    self.parameters[_join(name, leaf)] = _join(raw, leaf)

    def module(
        self, wanted: str | None, dice: Dice, *, suits: Callable[[nn.Module], bool] = lambda _: True
    ) -> tuple[str, nn.Module]:
        """Return a module and its name; unset, the seed chooses one that computes something and suits.

        Raises:
            ValueError: no module has this name, or none suits.
        """
        if wanted is None:
            names = list(self._computing(suits))
            if not names:
                raise ValueError(
                    "the model has no module this fault could be in by chance: name one with module="
                )
        else:
            names = self._matching(wanted, self.modules, "module")
        name = dice.choice(names, "module")
        module = self.modules[name]
        if any(isinstance(m, torch.jit.ScriptModule) for m in (self.model, module)):
            raise ValueError(
                f"{name or 'the model'} is a TorchScript module, which does not run Python hooks: attach the "
                "plan to the model before torch.jit.script, or use torch.compile"
            )
        return name, module

    def parameter(self, wanted: str | None, dice: Dice, *, trained: bool) -> tuple[str, Callable[[], Tensor]]:
        """Return the name of a parameter and a function that returns the parameter as it is then.

        Raises:
            ValueError: no parameter has this name, or it holds nothing that could be hit.
        """
        names: Sequence[str]
        if wanted is None:
            # A parameter that modules share counts once, under its first name.
            once = {id(self._get(name)): name for name in reversed(self.parameters)}
            names = [name for name in reversed(once.values()) if self._unfit(name, trained=trained) is None]
            if not names:
                raise ValueError("the model has no trained parameter with elements to hit")
        else:
            names = self._matching(wanted, self.parameters, "parameter")
            fit = [name for name in names if self._unfit(name, trained=trained) is None]
            if not fit:
                raise ValueError(f"parameter {names[0]!r} {self._unfit(names[0], trained=trained)}")
            names = fit
        name = dice.choice(names, "parameter")
        return name, lambda: self._get(name)

    def _get(self, name: str) -> Tensor:
        return self.model.get_parameter(self.parameters[name])

    def _unfit(self, name: str, *, trained: bool) -> str | None:
        parameter = self._get(name)
        if trained and not parameter.requires_grad:
            return "is frozen (requires_grad=False), so it has no gradient: name a trained one"
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return f"is {parameter.dtype}: name one with a floating dtype"
        if parameter.numel() == 0:
            return "has no elements here: name one that has, or limit the fault to ranks= that hold it"
        return None

    def _matching(self, wanted: str, known: Iterable[str], what: str) -> list[str]:
        names = list(known)
        tidy = self._tidy.get(wanted, wanted)
        if tidy in names:
            return [tidy]
        found = [name for name in names if fnmatch.fnmatchcase(name, wanted)]
        if found:
            return found
        near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.3) or [n for n in names if n][:3]
        nearest = ", ".join(repr(name) for name in near)
        raise ValueError(
            f"the model has no {what} {wanted!r}; the nearest: {nearest or f'it has no {what}s'}"
        )

    def _computing(self, suits: Callable[[nn.Module], bool]) -> Iterator[str]:
        """Yield the modules that a forward pass most likely calls: the innermost ones."""
        inside: tuple[str, ...] = ()
        seen: set[int] = set()
        for name, module in self.modules.items():
            if inside and name.startswith(inside):
                continue
            if isinstance(module, nn.MultiheadAttention):  # computes by itself, never calls its children
                inside += (f"{name}." if name else "",)
            elif next(module.children(), None) is not None or isinstance(
                module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
            ):
                continue
            if id(module) not in seen and suits(module):
                seen.add(id(module))
                yield name


def _join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf


def _walk(module: nn.Module, raw: str, name: str) -> Iterator[tuple[str, str, nn.Module]]:
    yield raw, name, module
    for part, child in module._modules.items():
        if child is not None:
            wrapper = part in _WRAPPERS or (part == "module" and isinstance(module, _PARALLEL))
            yield from _walk(child, _join(raw, part), name if wrapper else _join(name, part))
