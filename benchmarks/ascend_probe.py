"""MindStudio Probe (msprobe) as a peer: TrainerMon and monitor_v2 on weight gradients, written as csv.

It has dependencies of its own, so it gets an environment of its own under `.cache/`, which sees the packages
of the present one, and is measured in a process of its own, against a plain loop there.
"""

# ruff: noqa: PLC0415 - some imports belong to the other environment

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

VERSION = "26.2.0"
HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parent / ".cache" / "msprobe"
STATISTICS = ["min", "max", "mean", "norm", "nans"]
"""What monitor_v2 collects by default; TrainerMon is told to collect the same."""


def install() -> str | None:
    """Make the environment if there is none; return why it could not be made, or None."""
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / f"installed-{VERSION}"
    if stamp.exists():
        return None
    commands = (
        [sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)],
        [
            *(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("-c", str(HERE.parent / "constraints.txt"), f"mindstudio-probe=={VERSION}"),
        ],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["it failed without a word"])[-1]
        if command is commands[0]:
            parent = sysconfig.get_paths()["purelib"]
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            site = ENVIRONMENT / "lib" / version / "site-packages"
            (site / "parent.pth").write_text(parent + "\n", encoding="utf-8")
    stamp.touch()
    return None


def measure(tokens: int, max_norm: float | None, *, seconds: float, cpu_time: bool = False) -> dict[str, Any]:
    """Return the comparisons with the plain loop, by variant, or why there are none."""
    problem = install()
    if problem is not None:
        return {"missing": problem}
    arguments = [str(tokens), "none" if max_norm is None else str(max_norm), str(seconds), str(int(cpu_time))]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [str(ENVIRONMENT / "bin" / "python"), str(Path(__file__).resolve()), *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env={**os.environ, "MONITOR_OUTPUT_DIR": str(Path(folder) / "v1")},
        )
    if done.returncode:
        return {"missing": (done.stderr.strip().splitlines() or ["it failed without a word"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def variants(max_norm: float | None) -> list[Any]:
    """Return the plain loop, twice, and the two monitors."""
    import torch
    from msprobe.core.monitor_v2 import TrainerMonitorV2
    from msprobe.pytorch import TrainerMon
    from peers import plain
    from race import Variant
    from workload import adamw, forward, model

    folder = Path.cwd()
    (folder / "v1").mkdir(exist_ok=True)
    (folder / "v2").mkdir(exist_ok=True)
    first, second = folder / "v1.json", folder / "v2.json"
    one = {"targets": {}, "wg_distribution": True, "format": "csv", "ops": STATISTICS}
    first.write_text(json.dumps(one), encoding="utf-8")
    two = {
        "output_dir": str(folder / "v2"),
        "monitors": {"weight_grad": {"enabled": True, "ops": STATISTICS}},
    }
    second.write_text(json.dumps(two), encoding="utf-8")

    def monitored(start: Any) -> Any:
        net = model()
        optimizer = adamw(net)
        start(net, optimizer)

        def step(x: Any, y: Any) -> None:
            forward(net, x, y).backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def start_first(net: Any, optimizer: Any) -> None:
        monitor = TrainerMon(str(first), params_have_main_grad=False)
        monitor.set_monitor(net, optimizer)

    def start_second(net: Any, optimizer: Any) -> None:
        TrainerMonitorV2(str(second), fr="pytorch").start(model=net, optimizer=optimizer)

    return [
        Variant("plain", plain(max_norm)),
        Variant("plain again (A/A)", plain(max_norm)),
        Variant("msprobe TrainerMon, csv", monitored(start_first), in_place=False),
        Variant("msprobe monitor_v2, csv", monitored(start_second), in_place=False),
    ]


def _main(tokens: str, max_norm: str, seconds: str, cpu_time: str) -> None:
    import torch
    from race import compare, race, warm_up
    from workload import CLOCK, batches

    torch.set_num_threads(1)
    if cpu_time == "1":
        CLOCK.now = time.thread_time
    taking_part = variants(None if max_norm == "none" else float(max_norm))
    warm_up(taking_part, batches(int(tokens)), 3)
    rounds = race(taking_part, batches(int(tokens)), seconds=float(seconds))
    found = {one.name: compare(one, taking_part[0]) for one in taking_part[1:]}
    written = [path.stat().st_size for path in Path.cwd().rglob("*.csv")]
    if not written:
        raise RuntimeError("nothing was written: the monitors were not at work")
    print(json.dumps({"rounds": rounds, "variants": found}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
