"""Installs a wheel into an empty environment, and uses it there as somebody does who has nothing else.

python tests/empty_environment.py dist/gradsentinel-*.whl
"""

# ruff: noqa: T201 - a script that prints

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TWO_STEPS = """
import torch
from gradsentinel import NanCallback, Rollback, Sentinel, __file__ as home

assert "site-packages" in home, home
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
batches = [torch.ones(2, 4), torch.full((2, 4), float("nan"))]
with Sentinel(model, optimizer, callbacks=[NanCallback(), Rollback()], run_dir="run") as sentinel:
    for batch in sentinel.steps(batches):
        sentinel.backward(model(batch).mean())
        sentinel.step(max_norm=1.0)
assert [incident.outcome.value for incident in sentinel.incidents] == ["skipped"], sentinel.incidents
assert all(bool(p.isfinite().all()) for p in model.parameters())
print("two steps made, one of them dropped")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    with tempfile.TemporaryDirectory(prefix="gradsentinel-empty-") as folder:
        home = Path(folder)
        venv.create(home / "venv", with_pip=True)
        binaries = home / "venv" / ("Scripts" if sys.platform == "win32" else "bin")

        def call(*command: str | Path) -> None:
            print("$", *(str(word) if "\n" not in str(word) else "..." for word in command), flush=True)
            subprocess.run([binaries / command[0], *command[1:]], cwd=home, check=True)  # noqa: S603 - ours

        quiet = ("--quiet", "--disable-pip-version-check")
        call("python", "-m", "pip", "install", *quiet, "-c", ROOT / "constraints.txt", wheel)
        call("python", "-m", "pip", "check")
        call("gradsentinel", "--version")
        call("gradsentinel", "--help")
        call("gradsentinel", "demo", "--help")
        call("gradsentinel", "doctor")
        call("python", "-c", TWO_STEPS)
        call("gradsentinel", "incidents", "run")
        call("gradsentinel", "report", "run", "-o", "report.html")
        call("gradsentinel", "demo", "--steps", "60", "--run-dir", "demo")
    print("The wheel works in an empty environment.")


if __name__ == "__main__":
    main()
