"""What `replay` and `verify` share: their options, the user's code, the step with the user's model in it."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from gradsentinel.cli.output import choose
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """What a command was asked to run again, and how."""

    bundle: Bundle
    target: str | None
    device: torch.device | None
    own_weights: bool
    as_json: bool

    def stage(self, target: str, dtype: torch.dtype | None = None, *, fixed: bool = False) -> Stage:
        """Return the saved step with the model of that target in it; `fixed` as for `set_up`."""
        from gradsentinel.diagnosis.stage import set_up, settings_of  # noqa: PLC0415 - imports torch
        from gradsentinel.diagnosis.target import load_target  # noqa: PLC0415 - imports torch

        own = self.own_weights
        with settings_of(self.bundle):
            loaded = load_target(target)
            return set_up(self.bundle, loaded, device=self.device, dtype=dtype, own_weights=own, fixed=fixed)


def on_a_saved_step(function: Callable[..., int]) -> Callable[..., None]:
    """Give a command the options that say which saved step to run, and with what.

    It is called with a `Rerun` and the options of its own, and returns the exit code.
    """
    command = function.__name__

    def run(
        *,
        incident: Path,
        incident_id: str | None,
        target: str | None,
        device: str | None,
        rank: int | None,
        own_weights: bool,
        modules: list[str] | None,
        as_json: bool,
        **own: Any,
    ) -> None:
        from gradsentinel.diagnosis.bundle import Bundle  # noqa: PLC0415 - imports torch

        rerun = Rerun(
            bundle=Bundle(directory_of(choose(incident, incident_id, command)), rank),
            target=target,
            device=device_named(device),
            own_weights=own_weights,
            as_json=as_json,
        )
        with user_code():
            import_all(modules)
            code = function(rerun, **own)
        raise typer.Exit(code)

    parameters = _parameters(function)
    run.__name__, run.__doc__, run.__module__ = command, function.__doc__, function.__module__
    setattr(run, "__signature__", inspect.Signature(parameters))  # noqa: B010 - what typer goes by
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(function: Callable[..., int]) -> list[inspect.Parameter]:
    """Return the shared parameters, and between them those of the function's own, which follow its first."""
    hints = get_type_hints(function, localns={"Rerun": Rerun}, include_extras=True)
    own = list(inspect.signature(function).parameters.values())[1:]
    shared = {
        "incident": (Incident, inspect.Parameter.empty),
        "incident_id": (Id, None),
        "target": (TargetName, None),
        **{parameter.name: (hints[parameter.name], parameter.default) for parameter in own},
        "device": (Device, None),
        "rank": (RankNumber, None),
        "own_weights": (OwnWeights, False),
        "modules": (Modules, None),
        "as_json": (AsJson, False),
    }
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(name, kind, default=d, annotation=a) for name, (a, d) in shared.items()]


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
