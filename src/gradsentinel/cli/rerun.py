"""What `replay` and `verify` share: their options, the user's code, the step with the user's model in it."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradsentinel.errors import GradSentinelError

if TYPE_CHECKING:
    import torch

    from gradsentinel.diagnosis.bundle import Bundle
    from gradsentinel.diagnosis.stage import Stage

Incident = Annotated[
    Path, typer.Argument(help="An incident's directory, or a run directory.", show_default=False)
]
Id = Annotated[
    str | None,
    typer.Argument(
        metavar="ID", help="Which incident of a run directory: its id or its step.", show_default=False
    ),
]
TargetName = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="PKG.MODULE:FACTORY",
        help="A function without arguments that returns (model, forward) or (model, forward, optimizer); "
        "also path/to/file.py:factory.",
        show_default=False,
    ),
]
Device = Annotated[
    str | None, typer.Option(help="Where to run.", show_default="where the factory put the model, else cpu")
]
RankNumber = Annotated[
    int | None, typer.Option("--rank", min=0, help="Whose part.", show_default="of the rank to blame")
]
OwnWeights = Annotated[
    bool, typer.Option("--own-weights", help="Leave the weights as the factory made them.")
]
Modules = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="NAME", help="Import this first, as for custom operators."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as a JSON object.")]


class UserCodeFailed(GradSentinelError):
    """The user's code or an option cannot be used; what is to be seen of it has been printed."""


@contextmanager
def user_code() -> Iterator[None]:
    """Tell failures of the user's code from ours: a traceback, one line, exit code 2."""
    try:
        yield
    except (GradSentinelError, OSError, typer.Exit, typer.Abort):
        raise
    except Exception as error:
        from gradsentinel.diagnosis.operator import CannotRun  # noqa: PLC0415 - imports torch

        if isinstance(error, CannotRun):
            raise UserCodeFailed(str(error)) from error
        traceback.print_exc()
        raise UserCodeFailed(f"it could not be run: {type(error).__name__}: {error}") from error


def directory_of(place: Path) -> Path:
    """Return the bundle's directory, of an incident named in any way."""
    return place.parent if place.name == "incident.json" else place


def cpu() -> torch.device:
    """Return the device that is always there."""
    import torch  # noqa: PLC0415 - only when something is run

    return torch.device("cpu")


def device_named(name: str | None) -> torch.device | None:
    """Return the device of that name, None for None; raises UserCodeFailed if there is none."""
    import torch  # noqa: PLC0415 - only when something is run

    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserCodeFailed(f"--device {name}: {str(error).partition(':')[0]}") from error
    backend = getattr(torch, device.type, None)
    if device.type != "cpu" and not (backend is not None and backend.is_available()):
        raise UserCodeFailed(f"--device {name}: there is none here")
    return device


def dtype_named(name: str | None) -> torch.dtype | None:
    """Return the floating dtype of that name, None for None; raises UserCodeFailed if it is none."""
    import torch  # noqa: PLC0415 - only when something is run

    found = None if name is None else getattr(torch, name.removeprefix("torch."), None)
    if name is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise UserCodeFailed(f"--dtype {name}: give a floating dtype, such as float32")
    return found


def import_all(modules: list[str] | None) -> None:
    """Import what makes the user's operators known, also from the current directory."""
    here = str(Path.cwd())
    if modules and here not in sys.path:
        sys.path.insert(0, here)
    for name in modules or ():
        importlib.import_module(name)


def stage_of(
    bundle: Bundle,
    name: str,
    device: torch.device | None,
    dtype: torch.dtype | None,
    *,
    own_weights: bool,
    fixed: bool,
) -> Stage:
    """Return the saved step with the target's model in it; `fixed` as for `set_up`."""
    from gradsentinel.diagnosis.stage import set_up, settings_of  # noqa: PLC0415 - imports torch
    from gradsentinel.diagnosis.target import load_target  # noqa: PLC0415 - imports torch

    with settings_of(bundle):
        target = load_target(name)
        return set_up(bundle, target, device=device, dtype=dtype, own_weights=own_weights, fixed=fixed)
