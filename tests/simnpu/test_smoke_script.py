"""The script that users with a card run, on the simulated one."""

import importlib.util
import os
import re
from pathlib import Path

import torch
from on_npu import run_on_npu, run_ranks_on_npu

SCRIPT = Path(__file__).parents[2] / "examples" / "npu_smoke.py"
NEEDS_A_CARD = {"health readings", "several ranks agree"}


def load():
    spec = importlib.util.spec_from_file_location("npu_smoke", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def smoke(report):
    code = load().main(["--device", "npu", "--report", str(report)])
    return code, report.read_text()


def rows(text):
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {title.strip(): (result.strip(), words.strip()) for title, result, words in lines[1:]}


def test_everything_that_can_be_seen_here_passes(tmp_path):
    code, text = run_on_npu(smoke, tmp_path / "report.md")
    found = rows(text)
    assert code == 0
    assert {title for title, (result, _) in found.items() if result != "PASS"} == NEEDS_A_CARD
    assert found["device found"][1] == "npu:0: SimAscend910B"
    assert "torch_npu 2." in found["versions"][1]
    assert found["device guard: the host waits for nothing"][1].startswith("0 waits in 20 steps")
    assert found["internal formats: bits are looked at in a plain one"][1] == "NZ and ND have one checksum"
    assert "with npu's own tool" in found["marks in a profile"][1]
    assert found["snapshots: staged copies, ordered before the next write"][1] == "pinned memory"


TABLES = Path(__file__).parents[1] / "devices" / "npu_smi"


def smoke_with_tool(report, folder):
    tool = folder / "npu-smi"
    counters = re.sub(r"(NPU ID *: )1", r"\g<1>0", (TABLES / "ecc_one_chip.txt").read_text())
    (folder / "ecc").write_text(counters)
    answers = (
        f"*ecc*) cat {folder / 'ecc'};;",
        f"*-m*) cat {TABLES / 'numbers_one_chip.txt'};;",
        f"*) cat {TABLES / 'one_chip.txt'};;",
    )
    tool.write_text(f'#!/bin/sh\ncase "$*" in {" ".join(answers)} esac\n')
    tool.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])
    script = load()
    script.CHECKS[:] = [entry for entry in script.CHECKS if entry[0] == "health readings"]
    code = script.main(["--device", "npu", "--report", str(report)])
    return code, report.read_text()


def test_it_reads_what_npu_smi_says_of_the_card(tmp_path):
    code, text = run_on_npu(smoke_with_tool, tmp_path / "report.md", tmp_path)
    result, words = rows(text)["health readings"]
    assert (code, result) == (0, "PASS")
    assert words.startswith("npu 0: health OK, 41 C, 93.7 W, HBM Single Bit Error Count 17")


def test_on_a_card_that_saturates(tmp_path):
    code, text = run_on_npu(smoke, tmp_path / "report.md", saturating=True)
    found = rows(text)
    assert code == 0
    assert found["overflow: infinities, or saturation"] == (
        "PASS",
        "saturation mode, SaturationCallback dropped the step",
    )


def agree(rank, folder):
    return load().agreement(torch.device("npu", rank), folder)


def test_ranks_agree_over_hccl(tmp_path):
    words = run_ranks_on_npu(agree, 2, tmp_path, tmp_path)
    assert words == ["2 ranks over hccl, rank 1 named on all of them"] * 2
