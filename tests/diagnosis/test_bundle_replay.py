"""`gradsentinel replay` and `verify`: a saved step in another process, on the command line."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from typer.testing import CliRunner

from gradsentinel import NanCallback, Sentinel, SnapshotSaver, cli

PROJECT = """
    import torch
    from torch import nn


    class Gate(nn.Module):
        def __init__(self, safe):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.safe = safe

        def forward(self, x):
            x = self.lin(x)
            if self.safe:
                return torch.where(x > 0, torch.sqrt(torch.where(x > 0, x, 1.0)), x)
            return torch.where(x > 0, torch.sqrt(x), x)


    def build(safe=False):
        parts = {"body": nn.Linear(4, 4), "gate": Gate(safe), "drop": nn.Dropout(0.2)}
        return nn.ModuleDict({**parts, "norm": nn.BatchNorm1d(4), "frozen": nn.BatchNorm1d(4)})


    def loss(model, batch):
        x = model["drop"](model["gate"](model["body"](batch["x"])))
        return (model["frozen"](model["norm"](x)) - batch["y"]).pow(2).mean()


    def broken():
        return build(), loss


    def fixed():
        return build(safe=True), loss


    def with_optimizer():
        model = build(safe=True)
        return model, loss, torch.optim.AdamW(model.parameters())


    class AsObject:
        def __init__(self):
            self.model, self.forward = broken()


    def wider():
        return nn.ModuleDict({**build(), "body": nn.Linear(4, 8)}), loss


    def stranger():
        return nn.Linear(7, 7), loss


    def extended():
        model = build(safe=True)
        model["extra"] = nn.Linear(1, 1)
        return model, loss


    def raises():
        return build(), lambda model, batch: batch["nothing"]


    def incomplete():
        return build()


    def needs(argument):
        return argument


    not_a_factory = 3
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The user's own code, imported as the training imported it, and the directory that it is in."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "gradsentinel_test_project.py").write_text(textwrap.dedent(PROJECT))
    sys.path.insert(0, str(folder))
    try:
        import gradsentinel_test_project as module  # noqa: PLC0415 - made just now
    finally:
        sys.path.remove(str(folder))
    return module, folder


@pytest.fixture(scope="module")
def gated(project, tmp_path_factory):
    """Incidents of the gate, one with a bundle of each level."""
    module, _ = project
    found = {}
    for level in ("light", "standard", "full"):
        torch.manual_seed(0)
        model = module.build()
        model["frozen"].eval()
        batches = [{"x": torch.randn(8, 4).abs(), "y": torch.randn(8, 4)} for _ in range(3)]
        with torch.no_grad():
            model["gate"].lin.bias.add_(9.0)
        run_dir = tmp_path_factory.mktemp(level)
        with Sentinel(
            model,
            torch.optim.AdamW(model.parameters(), 1e-2),
            callbacks=[NanCallback(), SnapshotSaver(level=level)],
            run_dir=run_dir,
            forward=module.loss,
        ) as sentinel:
            for number, batch in enumerate(sentinel.steps(batches)):
                if number == 2:
                    with torch.no_grad():
                        model["gate"].lin.bias.sub_(9.0)
                sentinel.backward(module.loss(model, batch))
                sentinel.step(max_norm=1.0)
        (incident,) = sentinel.incidents
        assert incident.step == 2
        found[level] = (incident, run_dir)
    return found


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


def target(name):
    return "--target", f"gradsentinel_test_project:{name}"


def process(*arguments, cwd):
    return subprocess.run(  # noqa: S603 - ours
        [sys.executable, "-m", "gradsentinel", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_a_fresh_process_repeats_the_verdict(project, gated, tmp_path):
    _, folder = project
    incident, run_dir = gated["full"]
    elsewhere = tmp_path / "copied"
    shutil.copytree(run_dir / "incidents" / incident.id, elsewhere)
    done = process("replay", elsewhere, *target("broken"), "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["same_verdict"] is True
    assert told["now"] == {**incident.diagnosis.as_dict(), "evidence": told["now"]["evidence"]}
    assert (told["now"]["cause"], told["now"]["op"], told["now"]["module"]) == (
        "math",
        "aten.sqrt.default",
        "gate",
    )
    assert told["losses"] == [incident.loss]  # dropout, batch norm and weights are those of the step
    assert told["notes"] == ["weights: those of the failing step"]


@pytest.mark.slow
def test_verify_in_a_fresh_process(project, gated):
    _, folder = project
    incident, run_dir = gated["full"]
    for name, code in (("broken", 1), ("with_optimizer", 0)):
        done = process("verify", run_dir, incident.step, *target(name), "--json", cwd=folder)
        assert done.returncode == code, done.stderr
        checks = {check["what"]: check["held"] for check in json.loads(done.stdout)["checks"]}
        expected = {"operator": None, "module": not code, "step": not code}
        assert checks == (expected if code else {**expected, "optimizer": True})


def test_replay_of_the_operator_alone(gated):
    for level in ("standard", "full"):
        incident, run_dir = gated[level]
        result = invoke("replay", run_dir, 2)
        assert (result.exit_code, result.stderr) == (0, "")
        assert "aten.sqrt.default, alone, on cpu" in result.stdout
        assert "The bad values are there again." in result.stdout
        told = json.loads(invoke("replay", run_dir / "incidents" / incident.id, "--json").stdout)
        assert told["reproduced"] is True
        assert told["outputs"][0]["nonfinite"] > 0
        assert (
            json.loads(invoke("replay", run_dir, 2, "--dtype", "float64", "--json").stdout)["reproduced"]
            is True
        )


def test_replay_in_a_fixed_order_on_request(gated):
    on = "run again with deterministic algorithms (--deterministic): not by the very kernels of the run"
    _, run_dir = gated["full"]
    for arguments in ((), target("broken")):
        for flag in ((), ("--deterministic",)):
            result = invoke("replay", run_dir, 2, *arguments, *flag, "--json")
            assert (result.exit_code, torch.get_deterministic_debug_mode()) == (0, 0)
            assert json.loads(result.stdout)["deterministic"] == ([on] if flag else [])
            assert (on in " ".join(invoke("replay", run_dir, 2, *arguments, *flag).stdout.split())) == bool(
                flag
            )


def test_a_bundle_that_is_light_can_do_neither(gated):
    _, run_dir = gated["light"]
    for command in (("replay",), ("replay", *target("broken")), ("verify", *target("broken"))):
        result = invoke(command[0], run_dir, 2, *command[1:])
        assert (result.exit_code, result.stdout) == (2, "")
        assert "its level is light" in result.stderr


def test_without_the_weights_it_says_so_and_goes_on(gated):
    _, run_dir = gated["standard"]
    result = invoke("replay", run_dir, 2, *target("broken"))
    assert "weights: the target's own" in result.stdout
    assert "The failure is there again, with the same verdict." in result.stdout
    assert result.exit_code == 0
    held = invoke("verify", run_dir, 2, *target("fixed"))
    assert held.exit_code == 0
    assert "with the target's own weights" in " ".join(held.stdout.split())
    assert invoke("verify", run_dir, 2, *target("broken")).exit_code == 1


def test_what_is_told_of_a_replay_and_of_a_check(gated):
    incident, run_dir = gated["full"]
    said = " ".join(invoke("replay", run_dir, 2, *target("broken")).stdout.split())
    for text in (
        "then now",
        "cause math math",
        "operator aten.sqrt.default aten.sqrt.default",
        "module gate gate",
    ):
        assert text in said
    assert incident.diagnosis.source in said
    assert "weights: those of the failing step" in said
    finite = invoke("replay", run_dir, 2, *target("fixed"))
    assert finite.exit_code == 1
    assert "The failure is not there" in finite.stdout
    held = invoke("verify", run_dir, 2, *target("fixed"), "--before", "gradsentinel_test_project:broken")
    assert held.exit_code == 0
    said = " ".join(held.stdout.split())
    for text in (
        "ok before the fault is there without the fix",
        "- operator aten.sqrt.default alone makes bad values",
        "ok module gate: finite in, finite out",
        "ok step loss and gradients are finite",
        "The fix holds.",
    ):
        assert text in said


def test_a_control_without_the_fault_proves_nothing(gated):
    _, run_dir = gated["full"]
    result = invoke("verify", run_dir, 2, *target("fixed"), "--before", "gradsentinel_test_project:fixed")
    assert result.exit_code == 2
    assert "proves nothing" in result.stdout


@pytest.mark.parametrize("name", ["broken", "AsObject"])
def test_a_factory_may_return_a_tuple_or_an_object(gated, name):
    _, run_dir = gated["full"]
    assert invoke("replay", run_dir, 2, *target(name)).exit_code == 0


def test_a_factory_in_a_file(project, gated):
    _, folder = project
    _, run_dir = gated["full"]
    assert (
        invoke("replay", run_dir, 2, "--target", f"{folder}/gradsentinel_test_project.py:broken").exit_code
        == 0
    )


def test_a_model_that_has_grown_keeps_what_is_new(gated):
    _, run_dir = gated["full"]
    result = invoke("verify", run_dir, 2, *target("extended"))
    assert result.exit_code == 0
    assert "not saved, so as the factory made it: extra.weight, extra.bias" in result.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gradsentinel_test_project:wider", "body.weight has another shape"),
        ("gradsentinel_test_project:stranger", "none of the saved parameters"),
        ("gradsentinel_test_project:nobody", "has no nobody"),
        ("gradsentinel_test_project:incomplete", "return (model, forward)"),
        ("gradsentinel_test_project:not_a_factory", "return (model, forward)"),
        ("no_such_module_anywhere:x", "there is no module no_such_module_anywhere"),
        ("gradsentinel_test_project", "give pkg.module:factory"),
        (":x", "give pkg.module:factory"),
        ("missing/file.py:x", "there is no file"),
    ],
)
def test_a_target_that_cannot_be_used_is_one_line(gated, name, words):
    _, run_dir = gated["full"]
    for command in ("replay", "verify"):
        result = invoke(command, run_dir, 2, "--target", name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert len(result.stderr.splitlines()) == 1
        assert words in result.stderr


@pytest.mark.parametrize("name", ["raises", "needs"])
def test_what_the_users_code_raises_is_shown(gated, name):
    _, run_dir = gated["full"]
    result = invoke("replay", run_dir, 2, *target(name))
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "it could not be run: " in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda:99"], "none here"),
        (["--device", "toaster"], "--device toaster"),
        (["--dtype", "int64"], "floating dtype"),
        (["--rank", "7"], "no part of rank 7"),
    ],
)
def test_unusable_options(gated, arguments, words):
    if arguments[1].startswith("cuda") and torch.cuda.is_available():
        arguments = ["--device", "npu:0"]
    _, run_dir = gated["full"]
    result = invoke("replay", run_dir, 2, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


def test_damaged_and_foreign_bundles_are_one_line(gated, tmp_path):
    incident, run_dir = gated["full"]
    for number, damage in enumerate(
        ("scene/state.safetensors", "state/manifest.json", "operator/state.json")
    ):
        copy = tmp_path / str(number)
        shutil.copytree(run_dir / "incidents" / incident.id, copy)
        (copy / damage).write_bytes(b"x" * 10)
        for arguments in ((), target("broken")):
            result = invoke("replay", copy, *arguments)
            if damage.startswith("operator") == bool(arguments):
                continue  # this replay does not need the damaged part
            assert result.exit_code in (0, 1, 2)
            assert "Traceback" not in result.stderr
    result = invoke("replay", tmp_path / "nowhere")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
