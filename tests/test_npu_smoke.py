"""examples/npu_smoke.py where there is no card: on the CPU, without a device, and when something fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "npu_smoke.py"
FAILING = f"""
import runpy, sys
script = runpy.run_path({str(SCRIPT)!r}, run_name="npu_smoke")
def fails(device, folder): raise RuntimeError("planted | here\\nand there")
script["CHECKS"][:] = [script["CHECKS"][0], ("planted", fails)]
sys.exit(script["main"](["--device", "cpu"]))
"""


SECRETS = {
    "ASCEND_HOME_PATH": "/opt/secret-cann",
    "ASCEND_TOOLKIT_HOME": "/opt/secret-toolkit",
    "ASCEND_PROCESS_LOG_PATH": "/logs/of jane/secret-run",
    "HCCL_IF_IP": "10.11.12.13",
    "HCCL_SOCKET_IFNAME": "ens-secret",
    "MASTER_ADDR": "node17.secret.example",
    "USER": "jane-secret",
}
TELLTALE = f"""
import os, runpy, sys
script = runpy.run_path({str(SCRIPT)!r}, run_name="npu_smoke")
def fails(device, folder): raise RuntimeError(
    "cannot open '/opt/secret-cann/lib x/libhccl.so' at node17.secret.example:29500 (10.11.12.13), "
    "ens-secret, jane-secret " + folder
)
script["CHECKS"][:] = [("planted", fails)]
main = script["main"]
main.__globals__["examine"] = lambda: type("Found", (), {{"checks": [
    type("Check", (), {{"name": "cann", "found": "in /opt/secret-cann", "remedy": "source /opt/secret.sh"}})
]}})
sys.exit(main(["--device", "cpu"] + sys.argv[1:]))
"""
FALLING = f"""
import runpy, sys, warnings
script = runpy.run_path({str(SCRIPT)!r}, run_name="npu_smoke")
script["CHECKS"][:] = [entry for entry in script["CHECKS"] if "falls back" in entry[0]]
trial, plain = script["Trial"], script["Trial"].run
def run(self, steps):
    warnings.warn("operator 'aten::hash' will fall back to run on the CPU")
    return plain(self, steps)
trial.run = run
sys.exit(script["main"](["--device", "cpu"]))
"""
FULL = f"""
import runpy, sys
from pathlib import Path
script = runpy.run_path({str(SCRIPT)!r}, run_name="npu_smoke")
def fills(device, folder):
    def fail(*args, **kwargs): raise OSError(28, "No space left on device")
    Path.write_text = fail
    return "the disk is full"
script["CHECKS"][:] = [("planted", fills)]
sys.exit(script["main"](["--device", "cpu"]))
"""


def run(folder, *command, **environment):
    return subprocess.run(  # noqa: S603 - our own script
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_on_a_cpu_everything_passes_that_a_cpu_can_show(tmp_path):
    done = run(tmp_path, SCRIPT, "--device", "cpu", "--report", "out.md")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("PASS", "FAIL", "NOT HERE"))]
    results = [line[:9].strip() for line in lines]
    assert (results.count("PASS"), results.count("NOT HERE")) == (13, 4)
    report = (tmp_path / "out.md").read_text()
    for line in lines:
        assert f"| {line[10:].partition(':')[0]}" in report
    assert f"torch: {torch.__version__}" in report
    assert str(Path.home()) not in report
    assert os.uname().nodename not in report.replace(os.uname().release, "")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_without_the_device_it_says_so_with_a_status_of_its_own(tmp_path, kind):
    if getattr(torch, kind, None) is not None and getattr(torch, kind).is_available():
        pytest.skip(f"there is a {kind} device here")
    done = run(tmp_path, SCRIPT, "--device", kind)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert f"torch sees no {kind} device" in done.stdout


@pytest.mark.slow
def test_an_operator_that_falls_back_to_the_cpu_fails_the_check(tmp_path):
    done = run(tmp_path, "-c", FALLING)
    assert done.returncode == 1, done.stderr
    assert "FAIL      device guard: as many operators" in done.stdout
    assert "operator 'aten::hash' will fall back to run on the CPU" in (tmp_path / "npu_smoke.md").read_text()


@pytest.mark.slow
def test_a_check_that_fails_is_told_and_the_others_go_on(tmp_path):
    done = run(tmp_path, "-c", FAILING)
    assert done.returncode == 1, done.stderr
    assert "FAIL      planted: RuntimeError: planted | here" in done.stdout
    report = (tmp_path / "npu_smoke.md").read_text()
    assert "| planted | FAIL | RuntimeError: planted / here and there |" in report
    assert "| several ranks agree | NOT HERE |" in report


@pytest.mark.slow
def test_the_report_names_no_path_host_or_user(tmp_path):
    done = run(tmp_path, "-c", TELLTALE, HCCL_DETERMINISTIC="true", **SECRETS)
    assert done.returncode == 1, done.stderr
    report = (tmp_path / "npu_smoke.md").read_text()
    rest = [word for word in ("secret", "10.11", "jane", "node17", "/opt", "/logs") if word in report]
    assert rest == []
    told = "RuntimeError: cannot open '<path>' at <host>:29500 (<hidden>), <hidden>, <user> <path>"
    assert f"| planted | FAIL | {told} |" in report
    assert "doctor, cann: in <path> -> source <path>" in report
    assert "'HCCL_DETERMINISTIC': 'true'" in report  # what changes results is still told
    assert "'HCCL_IF_IP': '(set)'" in report


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_noticed_before_anything_runs(tmp_path):
    done = run(tmp_path, SCRIPT, "--device", "cpu", "--report", "no/such/folder/report.md")
    assert done.returncode == 2
    assert "the report cannot be written" in done.stdout
    assert "PASS" not in done.stdout


@pytest.mark.slow
def test_a_disk_that_fills_up_meanwhile_costs_no_report(tmp_path):
    done = run(tmp_path, "-c", FULL)
    assert done.returncode == 0, done.stderr
    assert "| planted | PASS | the disk is full |" in done.stdout
    assert "it stands above, ready to be pasted" in done.stdout


@pytest.mark.multiprocess
@pytest.mark.slow
def test_with_torchrun_the_ranks_agree(tmp_path):
    done = run(tmp_path, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "PASS      several ranks agree: 2 ranks over gloo, rank 1 named on all of them" in done.stdout
    assert done.stdout.count("device found") == 1
