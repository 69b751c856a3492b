"""The command lines that go on from an incident: see it, run it again, check a fix."""

from __future__ import annotations

import shlex
from typing import Any

from gradsentinel.views.run_files import RunFiles
from gradsentinel.views.words import word

_TARGET = "--target pkg.module:factory"


def commands(run: RunFiles, folder: str, lang: str, *, read: bool = True) -> list[dict[str, Any]]:
    """Return what can be done with what is in the bundle, as lines for a shell; not read: incident.json."""
    names = run.files.entries("incidents", folder)
    directory = run.path / "incidents" / folder
    where = shlex.quote(str(directory))
    found = []
    program = next((name for name in names if name.startswith("repro") and name.endswith(".py")), None)
    if program is not None:
        found.append(("repro", f"python {shlex.quote(str(directory / program))}"))
    elif any(name == "operator" or name.startswith("operator-rank") for name in names):
        found.append(("replay_operator", f"gradsentinel replay {where}"))
    if any(name == "scene" or name.startswith("scene-rank") for name in names):
        found.append(("replay_step", f"gradsentinel replay {where} {_TARGET}"))
        found.append(("verify", f"gradsentinel verify {where} {_TARGET}"))
    if read:
        found.append(("show", f"gradsentinel show {where}"))
    found.append(("report", f"gradsentinel report {shlex.quote(str(run.path))} -o report.html"))
    return [{"what": what, "line": line, "label": word("command", what, lang)} for what, line in found]
