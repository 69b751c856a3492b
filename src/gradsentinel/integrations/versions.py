"""Which releases of a framework an adapter works with."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

from gradsentinel._version import __version__
from gradsentinel.errors import ConfigurationError


class FrameworkError(ConfigurationError, ImportError):
    """A framework is missing or too old for its adapter; the message names what is there and what is due."""


def require(*names: str, oldest: str, extra: str) -> ModuleType:
    """Import the first of these packages that is installed, and return it.

    Raises:
        FrameworkError: if none can be imported, or if it is older than `oldest`.
    """
    reasons = []
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
            continue
        check(name, str(getattr(module, "__version__", "0")), oldest=oldest, extra=extra)
        return module
    raise FrameworkError(
        f"gradsentinel {__version__} needs {' or '.join(names)} {oldest} or newer here, and there is none "
        f"({'; '.join(reasons)}): pip install 'gradsentinel[{extra}]'"
    )


def check(name: str, version: str, *, oldest: str, extra: str) -> None:
    """Raise FrameworkError if a package's version is older than the oldest that is supported."""
    if _numbers(version) < _numbers(oldest):
        raise FrameworkError(
            f"{name} {version} is too old: gradsentinel {__version__} needs {name} {oldest} or newer, "
            f"pip install -U 'gradsentinel[{extra}]'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
