"""The user's model for a replay elsewhere: what `--target pkg.module:factory` names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradsentinel.errors import GradSentinelError
from gradsentinel.host import Forward


class TargetError(GradSentinelError, ValueError):
    """A target cannot be used; the message says why and what it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model, and how the loss of a micro-batch is computed with it."""

    name: str
    model: Any
    """A module, several, or a mapping from name to module, as `Sentinel` takes it."""
    forward: Forward
    optimizers: tuple[Optimizer, ...] = ()
    """Without them the optimizer's state is left out of a replay."""


_SHAPE = "return (model, forward), (model, forward, optimizer), or an object with these attributes"


def load_target(name: str) -> Target:
    """Import a factory and call it without arguments.

    Args:
        name: `pkg.module:factory` or `path/to/file.py:factory`; modules are also looked for in the
            current directory.

    Raises:
        TargetError: if there is no such factory, or it does not return what it should.
        Exception: whatever the user's code raises.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise TargetError(f"--target {name}: give pkg.module:factory or path/to/file.py:factory")
    found: Any = _module(place, name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise TargetError(f"--target {name}: {place} has no {attribute}")
        found = getattr(found, part)
    made = found() if callable(found) and not _is_target(found) else found
    return _as_target(name, made)


def _module(place: str, name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not (place == error.name or place.startswith(f"{error.name}.")):
                raise  # the module is there, what it imports is not
            raise TargetError(f"--target {name}: there is no module {place}; started in {here}") from None
    path = Path(place)
    if not path.is_file():
        raise TargetError(f"--target {name}: there is no file {place}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"--target {name}: {place} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _is_target(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "model") and hasattr(value, "forward")


def _as_target(name: str, made: Any) -> Target:
    if isinstance(made, (tuple, list)) and len(made) in (2, 3):
        model, forward, *rest = made
        optimizer = rest[0] if rest else None
    elif _is_target(made) and not isinstance(made, nn.Module):
        model, forward, optimizer = made.model, made.forward, getattr(made, "optimizer", None)
    else:
        raise TargetError(f"--target {name}: got a {type(made).__name__}; {_SHAPE}")
    modules = (
        model.values() if isinstance(model, Mapping) else model if isinstance(model, Sequence) else [model]
    )
    wrong = [type(one).__name__ for one in modules if not isinstance(one, nn.Module)]
    if wrong:
        raise TargetError(f"--target {name}: its model is a {wrong[0]}, not a torch.nn.Module; {_SHAPE}")
    if not callable(forward):
        raise TargetError(f"--target {name}: its forward is a {type(forward).__name__}; {_SHAPE}")
    optimizers = (
        ()
        if optimizer is None
        else tuple(optimizer)
        if isinstance(optimizer, (list, tuple))
        else (optimizer,)
    )
    strangers = [type(one).__name__ for one in optimizers if not isinstance(one, Optimizer)]
    if strangers:
        raise TargetError(f"--target {name}: its optimizer is a {strangers[0]}, not a torch.optim.Optimizer")
    return Target(name=name, model=model, forward=forward, optimizers=optimizers)
