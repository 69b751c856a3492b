"""A TensorBoard as a user starts it, for the tests in a browser and for the pictures of the documentation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ADDRESS = re.compile(r"(http://\S+?)/? \(Press")


@contextmanager
def tensorboard(logdir: Path) -> Iterator[str]:
    """Start TensorBoard on a free port; yields its address. It ends with the block."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0"]
    # Its fast loader is another program, which not every platform has.
    command += ["--host", "localhost", "--load_fast", "false", "--reload_interval", "1"]
    started = subprocess.Popen(  # noqa: S603 - ours
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert started.stderr is not None
    said = []
    try:
        for line in started.stderr:  # ends when it does
            said.append(line)
            found = _ADDRESS.search(line)
            if found:
                break
        else:
            raise RuntimeError(f"TensorBoard did not start:\n{''.join(said)}")
        drain = threading.Thread(target=started.stderr.read, daemon=True)  # a full pipe would stop it
        drain.start()
        yield found[1]
        started.terminate()
        drain.join()
    finally:
        started.kill()
        started.wait()
        started.stderr.close()


def demo(run_dir: Path, *, steps: int | None = None) -> None:
    """Make a run with `gradsentinel demo`."""
    command = [sys.executable, "-m", "gradsentinel", "demo", "--run-dir", str(run_dir)]
    command += [] if steps is None else ["--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    subprocess.run(command, check=True, capture_output=True, env=environment)  # noqa: S603 - ours
