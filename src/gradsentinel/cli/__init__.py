"""The `gradsentinel` command.

Exit codes: 0 all went well; 1 the doctor found something essential broken, the demo failed, a replay did
not show the fault again, a fix does not hold, or a run that was watched until its end failed; 2 the command
or a path cannot be used, or nothing could be tried.
"""

from gradsentinel.cli import (
    campaigning,
    commands,
    drilling,
    parameters,
    replaying,
    reporting,
    snapshots,
    verifying,
    watching,
)
from gradsentinel.cli.application import app, main

__all__ = [
    "app",
    "campaigning",
    "commands",
    "drilling",
    "main",
    "parameters",
    "replaying",
    "reporting",
    "snapshots",
    "verifying",
    "watching",
]
