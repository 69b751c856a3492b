"""examples/megatron_gpt.py with a command line that would show nothing."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "megatron_gpt.py"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("words", "environment", "says"),
    [
        ([], {}, "start it with torchrun --nproc-per-node 8"),
        ([], {"WORLD_SIZE": "2"}, "--tensor, --pipeline: do not fit 2 ranks"),
        (["--tensor", "8", "--pipeline", "1"], {"WORLD_SIZE": "8"}, "do not fit 8 ranks, 4 heads"),
        ([], {"WORLD_SIZE": "4"}, "--fault-rank: 0 to 3"),
        (["--fault-rank", "99"], {"WORLD_SIZE": "8"}, "--fault-rank: 0 to 7, -1: none"),
        (["--fault-step", "20"], {"WORLD_SIZE": "8"}, "--fault-step: 0 to 19"),
    ],
)
def test_a_layout_that_does_not_fit_and_a_fault_that_would_never_come_are_refused(
    tmp_path, words, environment, says
):
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    outside = {name: value for name, value in os.environ.items() if name not in {"WORLD_SIZE", "LOCAL_RANK"}}
    done = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, SCRIPT, *words],
        cwd=tmp_path,
        env={**outside, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
