"""The line of the user's own code that is running."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch

import gradsentinel

_OURS = str(Path(gradsentinel.__file__).parent) + os.sep
_DEMO = _OURS + "demo" + os.sep
"""The demo is a user of the rest, like any other program."""
_FOREIGN = (
    str(Path(torch.__file__).parent) + os.sep,
    "<",
    *(sysconfig.get_path("stdlib") + os.sep + name for name in ("contextlib.py", "functools.py")),
)
_REPLAY = str(Path(__file__).with_name("replay.py"))
_STOPS = ("run_forward", "run_backward")
"""Names of the functions of ours that start the user's code: what called them does not matter."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of code."""

    path: str
    number: int

    def __str__(self) -> str:
        return f"{Path(self.path).name}:{self.number}"

    @property
    def text(self) -> str:
        """The code, without its indentation; empty if the file is not there."""
        return linecache.getline(self.path, self.number).strip()


def user_line(above: int = 2) -> Line | None:
    """Return the innermost running line that is neither torch's nor ours; None if there is none.

    The search begins so many frames above this one.
    """
    try:
        frame: FrameType | None = sys._getframe(above)
    except ValueError:
        return None  # a thread of autograd's own, where hooks run for other devices than the CPU
    while frame is not None:
        code = frame.f_code
        path = code.co_filename
        if path.startswith(_OURS) and not path.startswith(_DEMO):
            if code.co_name in _STOPS and path == _REPLAY:
                return None
        elif not path.startswith(_FOREIGN) and not _passes_on(code):
            return Line(path, frame.f_lineno)
        frame = frame.f_back
    return None


def _passes_on(code: CodeType) -> bool:
    """Tell what stands between the user's line and torch: modes, and torch's marks of what is deprecated."""
    return code.co_name == "__torch_function__" or code.co_filename.endswith("typing_extensions.py")


def raising_line(error: BaseException) -> Line | None:
    """Return the innermost line of an exception's traceback that is neither torch's nor ours."""
    found: Line | None = None
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        ours = path.startswith(_OURS) and not path.startswith(_DEMO)
        if not ours and not path.startswith(_FOREIGN):
            found = Line(path, trace.tb_lineno)
        trace = trace.tb_next
    return found
