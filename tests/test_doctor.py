import json
import os
import re
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from typer.testing import CliRunner

from gradsentinel import __version__, cli
from gradsentinel.cann import RELEASES, Cann, cann_for, find_cann, releases_for
from gradsentinel.checks import (
    AUTOLOAD,
    Check,
    Device,
    State,
    check_backends,
    check_buffers,
    check_cann,
    check_determinism,
    check_devices,
    check_directory,
    check_distributed,
    check_encoding,
    check_health,
    check_npu_version,
    check_silent_check,
    check_torch,
    check_version,
    is_older,
    release,
)
from gradsentinel.doctor import PARTS, Report, examine, installed

CPU = Device(name="cpu", what="2 cores")
GPU = Device(name="cuda:0", what="a GPU")
DEAD = Device(name="npu:1", what="RuntimeError: device lost", works=False)


def install(folder, name, version, *, entry_points="", code=None):
    """Make a distribution that can be found on a path: its metadata and, perhaps, a module."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    if code is not None:
        (folder / f"{name}.py").write_text(code)


def doctor(path, *options, **environment):
    """Run the command in a process that finds `path` first."""
    kept = {name: value for name, value in os.environ.items() if name not in {AUTOLOAD, "COLUMNS"}}
    return subprocess.run(  # noqa: S603 - ours
        [sys.executable, "-m", "gradsentinel", "doctor", *options],
        env={**kept, "PYTHONPATH": str(path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def check_of(report, name):
    (found,) = [check for check in report["checks"] if check["name"] == name]
    return found


# -- on this machine -----------------------------------------------------------------------------------


def test_the_doctor_finds_what_is_here():
    report = examine()
    assert report.healthy
    assert report.versions["gradsentinel"] == __version__
    assert report.versions["torch"] == torch.__version__
    assert report.versions["safetensors"] == metadata.version("safetensors")
    assert report.versions["python"] == sys.version.split()[0]
    assert report.devices[0].name == "cpu"
    kinds = {"cuda": torch.cuda, "mps": torch.mps}
    seen = [device.name for device in report.devices if device.name.partition(":")[0] in kinds]
    there = [f"{kind}:{i}" for kind, module in kinds.items() for i in range(module.device_count())]
    assert seen == there
    assert all(device.works for device in report.devices)
    assert {check.name for check in report.checks} >= {
        *("torch", "safetensors", "devices", "distributed", "determinism", "directory", "encoding")
    }


def test_parts_are_what_the_metadata_says():
    parts = {part["name"]: part for part in examine().parts}
    assert list(parts) == [
        *("tensorboard", "matplotlib", "lightning", "transformers", "accelerate"),
        *("megatron-core", "torch-npu", "nvidia-ml-py", "prometheus-client", "mlflow-skinny", "numpy"),
    ]
    there = {distribution.name.lower().replace("_", "-") for distribution in metadata.distributions()}
    for name, part in parts.items():
        assert (part["version"] is not None) == (name in there)
        assert part["install"].startswith("pip install ")
    assert parts["numpy"]["version"] == metadata.version("numpy")
    assert parts["numpy"]["enough"]


def test_the_pip_lines_and_minimum_versions_are_those_of_the_extras():
    requirements = [Requirement(line) for line in metadata.requires("gradsentinel")]
    for part in PARTS:
        extra = re.search(r"gradsentinel\[(\w+)\]", part.install)
        wanted = {"extra": extra[1] if extra else "test", "platform_system": "Linux"}
        (minimum,) = [
            str(one.specifier)
            for one in requirements
            if one.name.replace("_", "-").lower() == part.names[0] and one.marker.evaluate(wanted)
        ]
        assert minimum == f">={part.minimum}", part
    essential = {one.name: str(one.specifier) for one in requirements if one.marker is None}
    for name in ("torch", "safetensors"):
        minimum = essential[name].removeprefix(">=")
        assert check_version(name, minimum).state is State.OK
        assert minimum in check_version(name, "0.1").remedy


def test_the_command_prints_the_report():
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert (result.exit_code, result.stderr) == (0, "")
    words = " ".join(result.stdout.split())
    told = [f"torch {torch.__version__}", f"gradsentinel {__version__}", "Everything essential works."]
    told += ["pip install 'gradsentinel[npu]'" if installed("torch-npu") is None else "Ascend NPUs"]
    assert [text for text in told if text not in words] == []


def test_as_json_it_prints_one_object():
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert report.keys() == {"schema", "healthy", "versions", "devices", "parts", "checks"}
    assert report["healthy"] is True
    assert check_of(report, "torch") == {
        "name": "torch",
        "state": "ok",
        "found": torch.__version__,
        "remedy": "",
    }


# -- with other packages -------------------------------------------------------------------------------

BACKEND = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
NO_DRIVER = "raise ImportError('libascend_hal.so: cannot open shared object file')"


@pytest.mark.slow
def test_parts_are_not_imported_and_something_broken_is_exit_code_1(tmp_path):
    for name, version in (("torch_npu", "2.1.0"), ("lightning", "1.9"), ("matplotlib", "99.0")):
        install(tmp_path, name, version, code=f"raise SystemExit('{name} was imported')")
    install(tmp_path, "safetensors", "0.3.1")
    done = doctor(tmp_path, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    assert report["healthy"] is False
    assert check_of(report, "safetensors")["state"] == "broken"
    assert "pip install --upgrade 'safetensors>=" in check_of(report, "safetensors")["remedy"]
    parts = {part["name"]: (part["version"], part["enough"]) for part in report["parts"]}
    assert parts["torch-npu"] == ("2.1.0", False)
    assert parts["lightning"] == ("1.9", False)
    assert parts["matplotlib"] == ("99.0", True)
    assert "was not made for" in check_of(report, "torch_npu")["found"]
    text = " ".join(doctor(tmp_path).stdout.split())
    assert "Broken: safetensors." in text
    assert "lightning 1.9 too old: pip install 'gradsentinel[lightning]'" in text


@pytest.mark.slow
def test_a_backend_without_its_driver_is_told_by_its_own_words(tmp_path):
    install(tmp_path, "torch_npu", torch.__version__, entry_points=BACKEND, code=NO_DRIVER)
    done = doctor(tmp_path, "--json", **{AUTOLOAD: "0"})
    assert (done.returncode, done.stderr) == (0, "")
    check = check_of(json.loads(done.stdout), "backends")
    assert check["state"] == "note"
    assert "ImportError: libascend_hal.so" in check["found"]
    assert f"keep {AUTOLOAD}=0" in check["remedy"]


@pytest.mark.slow
def test_a_backend_that_works_but_is_switched_off_is_told(tmp_path):
    install(tmp_path, "torch_npu", torch.__version__, entry_points=BACKEND, code="def _autoload(): pass")
    off = check_of(json.loads(doctor(tmp_path, "--json", **{AUTOLOAD: "0"}).stdout), "backends")
    assert (off["state"], off["remedy"].split(",")[0]) == ("note", f"unset {AUTOLOAD}")
    on = check_of(json.loads(doctor(tmp_path, "--json").stdout), "backends")
    assert (on["state"], on["found"]) == ("ok", "torch_npu loaded")


CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise OSError('libhccl.so: cannot open shared object file')", "OSError: libhccl.so"),
        pytest.param("import no_such_part_of_cann", "no_such_part_of_cann", marks=pytest.mark.slow),
        pytest.param(CRASH, "signal 11", marks=pytest.mark.slow),
    ],
)
def test_where_a_backend_breaks_the_import_of_torch_the_doctor_says_so_and_looks_at_the_rest(
    tmp_path, code, told
):
    install(tmp_path, "torch_npu", torch.__version__, entry_points=BACKEND, code=code)
    done = doctor(tmp_path, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    assert report["healthy"] is False
    check = check_of(report, "torch")
    assert (check["state"], told in check["found"]) == ("broken", True)
    assert f"export {AUTOLOAD}=0" in check["remedy"]
    assert "torch_npu" in check["remedy"]
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["works"] is True
    cann = check_of(report, "cann")
    assert (cann["state"], "CANN is not" in cann["found"]) == ("note", True)
    assert AUTOLOAD in cann["remedy"]


TRAINING = """
import sys, torch
from torch import nn
import gradsentinel
from gradsentinel import DeviceHealthCallback, Sentinel, standard
model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
callbacks = [*standard("runs"), DeviceHealthCallback()]
batches = [torch.randn(8, 4) for _ in range(6)]
batches[3][0, 0] = float("nan")
with Sentinel(model, optimizer, callbacks=callbacks, run_dir="runs") as sentinel:
    for batch in sentinel.steps(batches):
        sentinel.backward(model(batch).square().mean())
        sentinel.step()
print([str(i.kind) for i in sentinel.incidents], "torch_npu" in sys.modules)
"""


@pytest.mark.slow
def test_an_installation_without_cann_never_breaks_a_training(tmp_path):
    install(tmp_path, "torch_npu", torch.__version__, entry_points=BACKEND, code=CRASH)
    done = subprocess.run(  # noqa: S603 - ours
        [sys.executable, "-c", TRAINING],
        env={**os.environ, "PYTHONPATH": str(tmp_path), AUTOLOAD: "0", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "['nonfinite_input'] False\n"), done.stderr


@pytest.mark.slow
def test_a_torch_npu_without_metadata_is_seen_and_not_judged_by_its_version(tmp_path):
    (tmp_path / "torch_npu.py").write_text("raise SystemExit('torch_npu was imported')")
    report = json.loads(doctor(tmp_path, "--json").stdout)
    assert check_of(report, "torch_npu")["state"] == "ok"
    assert "torch_npu unknown is installed" in check_of(report, "cann")["found"]
    assert report["healthy"] is True


def make_cann(folder, version, *, note="ascend_toolkit_install.info"):
    home = folder / "Ascend" / "ascend-toolkit" / "latest"
    (home / "x86_64-linux").mkdir(parents=True)
    (home / "x86_64-linux" / note).write_text(f"package_name=Ascend-cann-toolkit\nversion={version}\n")
    (home.parent / "set_env.sh").write_text("")
    return home


@pytest.mark.slow
def test_the_doctor_knows_which_cann_belongs_to_which_torch_npu(tmp_path):
    install(tmp_path, "torch_npu", "2.9.0.post2", code="raise SystemExit('imported')")
    home = make_cann(tmp_path, "8.5.0")
    found = json.loads(doctor(tmp_path, "--json", ASCEND_TOOLKIT_HOME=str(home)).stdout)
    cann = check_of(found, "cann")
    assert cann["found"] == f"8.5.0 in {home}, but torch_npu 2.9.0.post2 was released with CANN 9.0.0"
    assert cann["remedy"].startswith("install CANN 9.0.0")
    silent = check_of(found, "silent check")
    assert (silent["state"], "NPU_ASD_CONFIG is unset" in silent["found"]) == ("note", True)
    assert "enable:true,with_checksum:true" in silent["remedy"]
    switched_on = doctor(tmp_path, "--json", NPU_ASD_CONFIG="enable:true", HOME=str(tmp_path))
    report = json.loads(switched_on.stdout)
    assert check_of(report, "silent check")["state"] == "ok"
    cann = check_of(report, "cann")  # in a usual place, but nobody has sourced its script
    assert "environment is not set up" in cann["found"]
    assert cann["remedy"].startswith(f"source {home.parent / 'set_env.sh'}")


# -- judgements ----------------------------------------------------------------------------------------

JUDGEMENTS = [
    (check_torch("2.5.1+cu121", ""), State.BROKEN, "pip install --upgrade 'torch>=2.6'"),
    (check_torch("2.6.0", ""), State.OK, ""),
    (check_torch("2.10.0a0+git1", ""), State.OK, ""),
    (check_torch(None, "ModuleNotFoundError: no torch"), State.BROKEN, "pip install"),
    (
        check_torch("2.9.0", f"RuntimeError: Failed to load. Set {AUTOLOAD}=0"),
        State.BROKEN,
        f"export {AUTOLOAD}=0",
    ),
    (check_torch("2.9.0", "OSError: libcudart.so.12"), State.BROKEN, "reinstall"),
    (check_version("safetensors", None), State.BROKEN, "pip install"),
    (check_version("safetensors", "0.4.2"), State.BROKEN, "'safetensors>=0.4.3'"),
    (check_version("safetensors", "unknown"), State.OK, ""),
    (check_devices((CPU,), []), State.OK, ""),
    (check_devices((CPU,), ["The NVIDIA driver is too old"]), State.NOTE, "driver"),
    (check_devices((CPU, GPU), ["something harmless"]), State.OK, ""),
    (check_devices((CPU, GPU, DEAD), []), State.BROKEN, "ASCEND_RT_VISIBLE_DEVICES"),
    (check_backends({"torch_npu": ""}, "1"), State.OK, ""),
    (check_backends({"torch_npu": ""}, "0"), State.NOTE, f"unset {AUTOLOAD}"),
    (check_backends({"a": "", "torch_npu": "ImportError: x"}, "0"), State.NOTE, "set_env.sh"),
    (check_npu_version("2.9.1+cpu", "2.9.0.post2"), State.OK, ""),
    (check_npu_version("2.10.0", "2.1.0"), State.NOTE, "torch-npu==2.10.*"),
    (check_npu_version("2.13.0", "2.9.0"), State.NOTE, "2.13.0 with CANN 9.2.0"),
    (check_npu_version("2.9.1", "unknown"), State.OK, ""),
    (check_cann("2.13.0", None), State.NOTE, "install CANN 9.2.0 with its driver and source its set_env.sh"),
    (check_cann("9.9.9", None), State.NOTE, f"export {AUTOLOAD}=0"),
    (check_cann("2.13.0", None, works=True), State.OK, ""),
    (check_cann("2.13.0", Cann("/ascend", "9.2.0", active=True)), State.OK, ""),
    (check_cann("2.13.0", Cann("/ascend", "9.2.0.RC1", active=True)), State.OK, ""),
    (check_cann("2.13.0", Cann("/ascend", None, active=True)), State.OK, ""),
    (check_cann("2.13.0", Cann("/ascend", "9.2.0", active=False)), State.NOTE, "source /ascend/set_env.sh"),
    (check_cann("2.7.1.post2+git1", Cann("/a", "8.3.RC1", active=True)), State.NOTE, "install CANN 8.5.0"),
    (check_silent_check("2.13.0", {}), State.NOTE, "NPU_ASD_CONFIG=enable:true"),
    (check_silent_check("2.13.0", {"NPU_ASD_CONFIG": "enable:false"}), State.NOTE, "DeviceHealthCallback"),
    (check_silent_check("2.13.0", {"NPU_ASD_CONFIG": "enable:true, with_checksum:true"}), State.OK, ""),
    (check_health({"cpu", "npu"}, {}), State.NOTE, "npu-smi: comes with the Ascend driver"),
    (check_health({"cpu", "cuda"}, {"npu-smi": True}), State.NOTE, "gradsentinel[nvml]"),
    (check_health({"cuda"}, {"nvidia-ml-py": True}), State.OK, ""),
    (check_distributed(("gloo", "hccl")), State.OK, ""),
    (check_distributed(()), State.NOTE, "install"),
    (check_distributed(None), State.NOTE, "install"),
    (check_determinism({"cpu"}, {}), State.OK, ""),
    (check_determinism({"cpu", "cuda"}, {}), State.NOTE, "CUBLAS_WORKSPACE_CONFIG=:4096:8"),
    (check_determinism({"cpu", "cuda"}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}), State.OK, ""),
    (
        check_determinism({"cpu", "npu"}, {"HCCL_DETERMINISTIC": "FALSE"}),
        State.NOTE,
        "HCCL_DETERMINISTIC=true",
    ),
    (check_determinism({"cpu", "npu"}, {"HCCL_DETERMINISTIC": "true"}), State.OK, ""),
    (check_buffers({"GRADSENTINEL_BUFFERS": "pinned=4MiB"}), State.OK, ""),
    (check_buffers({"GRADSENTINEL_BUFFERS": "pin=4MiB"}), State.BROKEN, "unset GRADSENTINEL_BUFFERS"),
    (check_encoding("utf-8"), State.OK, ""),
    (check_encoding("UTF8"), State.OK, ""),
    (check_encoding("ANSI_X3.4-1968"), State.NOTE, "PYTHONIOENCODING=utf-8"),
    (check_encoding(None), State.NOTE, "PYTHONIOENCODING=utf-8"),
]


@pytest.mark.parametrize(
    ("check", "state", "remedy"), JUDGEMENTS, ids=[f"{c.name}-{c.found}" for c, *_ in JUDGEMENTS]
)
def test_judgements(check, state, remedy):
    assert check.state is state
    assert remedy in check.remedy
    assert bool(check.remedy) == (state is not State.OK)


def test_what_is_not_installed_is_not_judged():
    assert check_backends({}, "0") is None
    assert check_npu_version("2.9.0", None) is None
    assert check_npu_version(None, "2.9.0") is None
    assert check_cann(None, None) is None
    assert check_silent_check(None, {}) is None
    assert check_buffers({}) is None
    assert check_health({"cpu", "mps"}, {}) is None


def test_the_directory_is_judged_by_writing_to_it(tmp_path):
    assert check_directory(tmp_path).state is not State.BROKEN
    assert list(tmp_path.iterdir()) == []
    missing = check_directory(tmp_path / "missing")
    assert (missing.state, missing.found.split(": ")[1]) == (State.NOTE, os.strerror(2))


def test_a_directory_one_may_not_write_to(tmp_path):
    tmp_path.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)  # root may write anywhere
    try:
        check = check_directory(tmp_path)
    finally:
        if root:
            os.seteuid(0)
        tmp_path.chmod(0o755)
    assert (check.state, check.found.split(": ")[1]) == (State.NOTE, os.strerror(13))
    assert "run_dir=" in check.remedy


@pytest.mark.parametrize(
    "versions",
    [("2.6", "2.6.0"), ("2.9.1", "2.10"), ("2.5.1+cu121", "2.6"), ("0.4.2", "0.4.3"), ("3", "2.99.99")],
)
def test_versions_compare_as_everybody_else_compares_them(versions):
    for one, other in (versions, versions[::-1]):
        assert is_older(one, other) == (Version(one) < Version(other))


def test_a_version_that_cannot_be_read_is_not_too_old():
    assert release("unknown") == ()
    assert not is_older("unknown", "1.0")


def test_the_report_shows_what_is_broken_and_never_obeys_what_it_prints():
    report = Report(
        versions={"torch": "\x1b[31m2.0"},
        devices=(CPU, Device(name="cuda:0", what="[red]\x1b[2Jfailed", works=False)),
        parts=tuple(part.as_dict() for part in PARTS),
        checks=(
            check_torch("2.5", ""),
            Check(name="encoding", state=State.NOTE, found="[bold]ascii", remedy="do \x07 this"),
        ),
    )
    assert not report.healthy
    console = Console(width=200)
    for width in (20, 60, 80):
        with console.capture() as capture:
            console.print(report, width=width)
        assert max(map(len, capture.get().splitlines())) <= width
    with console.capture() as capture:
        console.print(report)
    text = capture.get()
    assert all(character.isprintable() or character == "\n" for character in text)
    told = [
        "Broken: torch.",
        "[red]\\x1b[2Jfailed",
        "[bold]ascii",
        "-> do \\x07 this",
        "-> pip install --upgrade",
    ]
    assert [words for words in told if words not in text] == []
    assert json.loads(json.dumps(report.as_dict()))["healthy"] is False


# -- CANN ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("note", "text", "version"),
    [
        ("ascend_toolkit_install.info", "package_name=x\nversion=8.3.RC1\narch=aarch64\n", "8.3.RC1"),
        ("version.info", "Version=8.5.0\n", "8.5.0"),
        ("version.cfg", "# version: 1.0\ntoolkit_running_version=[9.0.0:9.0.0]\n", "9.0.0"),
        ("version.info", "nothing of the kind", None),
    ],
)
def test_the_version_that_an_installation_states(tmp_path, note, text, version):
    home = tmp_path / "latest"
    home.mkdir()
    (home / note).write_text(text)
    assert find_cann({"ASCEND_TOOLKIT_HOME": str(home)}) == Cann(str(home), version, active=True)


@pytest.mark.parametrize(
    ("name", "version"),
    [("cann-9.2.0", "9.2.0"), ("8.0.RC3", "8.0.RC3"), ("8.3.RC1.alpha001", "8.3.RC1.alpha001"), ("x", None)],
)
def test_or_the_one_its_directory_is_named_after(tmp_path, name, version):
    (tmp_path / name).mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / name)
    assert find_cann({"ASCEND_HOME_PATH": str(tmp_path / "latest")}).version == version


def test_a_variable_that_leads_nowhere_is_no_cann(tmp_path):
    assert find_cann({"ASCEND_TOOLKIT_HOME": str(tmp_path / "gone")}) is None


def test_the_table_of_releases():
    assert len({release.torch_npu for release in RELEASES}) == len(RELEASES)
    for one in RELEASES:
        assert release(one.torch_npu)[:3] == release(one.torch)
        assert cann_for(one.torch_npu) == cann_for(f"{one.torch_npu}+gitabc") == one.cann
        assert one in releases_for(f"{one.torch}+cpu")
    assert releases_for("2.99") == releases_for("unknown") == []
    assert cann_for("2.1.0") is None
