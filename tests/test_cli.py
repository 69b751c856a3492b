import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from gradsentinel import NanCallback, Sentinel, SnapshotSaver, __version__, cli
from gradsentinel.decision import Action, Kind, Severity
from gradsentinel.evidence import Diagnosis, Sample, TensorEvidence
from gradsentinel.incident import SCHEMA, Incident, Outcome, Rank
from gradsentinel.store import RunDirectory
from gradsentinel.terminal import incident_story, incident_table
from gradsentinel.wording import duration, printable, size_of

TITLES = ["id", "step", "severity", "kind", "where", "cause", "action", "outcome", "seconds"]
INPUT, GRADIENT = "000001-nonfinite_input", "000004-nonfinite_gradient"
NOBODY = 65534


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    """What runs the tests may have set these."""
    for name in ("COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def invoke(*arguments, **environment):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env=environment)


def complaint(result):
    """The one line on stderr of a command that could do nothing."""
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def process(*arguments, code=None, **environment):
    """Run the command line, or `code`, in a process of its own that has no terminal."""
    kept = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "FORCE_COLOR"}}
    return subprocess.run(  # noqa: S603 - ours
        [sys.executable, *(["-m", "gradsentinel"] if code is None else ["-c", code]), *map(str, arguments)],
        env={**kept, **environment},
        capture_output=True,
        check=False,
    )


def strict_json(text):
    def refuse(token):
        raise ValueError(f"{token} is not JSON")

    return json.loads(text, parse_constant=refuse)


def train(run_dir, ids=None, *, steps=6):
    """A tiny run with a NaN in the data of step 1 and an Inf in a gradient of step 4."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(steps, 4, 3)
    x[1, 2, 0] = math.nan
    ids = list(range(10, 14)) if ids is None else ids
    batches = [{"x": part, "id": [f"{number}/{i}" for i in range(4)]} for number, part in enumerate(x)]
    batches[1]["id"] = ids
    with Sentinel(model, optimizer, callbacks=[NanCallback(), SnapshotSaver()], run_dir=run_dir) as sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(model(batch["x"]).pow(2).mean())
            if sentinel.step_count == 4:
                model[0].weight.grad[1, 2] = math.inf
            sentinel.step()
    return sentinel


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run with two incidents and their bundles; read only."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    assert [incident.id for incident in train(directory).incidents] == [INPUT, GRADIENT]
    return directory


def full_incident(**changes):
    """An incident with every field filled in."""
    fields = {
        "id": "000123-nonfinite_gradient",
        "step": 123,
        "time": "2026-01-31T08:15:00Z",
        "kind": Kind.NONFINITE_GRADIENT,
        "severity": Severity.CRITICAL,
        "action": Action.ROLLBACK,
        "outcome": Outcome.ROLLED_BACK,
        "message": "non-finite gradient in blocks.3.attn.q.weight",
        "detector": "NanCallback",
        "tensors": tuple(
            TensorEvidence(name=f"blocks.{i}.attn.q.weight", nonfinite=12, numel=65536, norm=0.81)
            for i in range(20)
        ),
        "ranks": (
            Rank(rank=5, host="node07", device="npu:5", coordinates={"tp": 1, "dp": 2}),
            Rank(rank=9, host="node08", device="npu:1", coordinates={"tp": 1, "dp": 4}),
        ),
        "microbatch": 2,
        "samples": (Sample(position=1, id="img-13.png", field="pixels"),),
        "diagnosis": Diagnosis(
            cause="data",
            confidence=0.9,
            phase="backward",
            module="blocks.3.attn",
            op="aten.div",
            node="DivBackward0",
            source="model.py:42",
            evidence=("the divisor is 0 in row 7",),
            remedy=("add eps to the divisor",),
        ),
        "recovery": "rolled back to step 100 (23 steps lost)",
        "loss": 2.5,
        "grad_norm": math.nan,
        "notes": ("3 steps in a row failed",),
        "seconds": {"detect": 0.001, "diagnose": 1.2, "recover": 0.3},
        "details": {"loss_scale": 1024.0},
    }
    return Incident(**{**fields, **changes})


def rendered(renderable, width=80, **console):
    out = Console(width=width, file=io.StringIO(), **console)
    out.print(renderable)
    return out.file.getvalue()


@contextmanager
def unprivileged() -> Iterator[None]:
    """Give up root for a moment: it may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


# -- the command itself --------------------------------------------------------------------------------


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"gradsentinel {__version__}\n")


def test_python_m_and_the_entry_point_are_the_command():
    assert process("--version").stdout.decode().strip() == f"gradsentinel {__version__}"
    (entry,) = metadata.entry_points(group="console_scripts", name="gradsentinel")
    assert entry.load() is cli.main


def test_help_names_every_command_and_its_options():
    assert all(name in invoke("--help").stdout for name in ("demo", "incidents", "show", "doctor"))
    assert all(option in invoke("demo", "--help").stdout for option in ("--steps", "--run-dir", "--seed"))


def test_without_a_command_the_help_is_shown():
    result = invoke()
    assert result.exit_code == 2
    assert "incidents" in result.stdout + result.stderr


def test_a_demo_too_short_for_its_faults_is_refused():
    result = invoke("demo", "--steps", "3")
    assert result.exit_code == 2
    assert "--steps" in result.stderr


def test_a_command_imports_nothing_for_the_others():
    code = "import gradsentinel.cli, sys; print('\\n'.join(sys.modules))"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603 - ours
    loaded = set(fresh.stdout.split())
    assert "gradsentinel.cli" in loaded
    assert loaded.isdisjoint({"gradsentinel.demo", "gradsentinel.doctor", "gradsentinel.terminal"})


# -- incidents -----------------------------------------------------------------------------------------


def test_incidents_prints_one_line_for_each(run):
    result = invoke("incidents", run)
    assert (result.exit_code, result.stderr) == (0, "")
    header, _, first, second, *_ = result.stdout.splitlines()
    assert header.split() == TITLES
    assert re.split(r"\s{2,}", first.strip())[:-1] == [
        *(INPUT, "1", "warning", "nonfinite_input", "sample 2 (id 12)", "data", "skip", "skipped")
    ]
    assert re.split(r"\s{2,}", second.strip())[:-1] == [
        *(GRADIENT, "4", "warning", "nonfinite_gradient", "0.weight", "unknown", "skip", "skipped")
    ]
    assert float(first.split()[-1]) >= 0
    assert f"gradsentinel show {run} ID" in result.stdout


def test_incidents_as_json_are_the_files(run):
    result = invoke("incidents", run, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    files = [
        json.loads((run / "incidents" / name / "incident.json").read_text()) for name in (INPUT, GRADIENT)
    ]
    assert strict_json(result.stdout) == files
    assert files[0]["loss"] == "nan"


def test_json_is_valid_even_if_a_file_is_not(tmp_path):
    data = full_incident().as_dict()
    data.update(loss=math.nan, seconds={"detect": math.inf}, samples=[{"position": 0, "id": math.nan}])
    data["diagnosis"]["confidence"] = math.nan
    path = tmp_path / "incidents" / "a" / "incident.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(data))
    for result in (invoke("incidents", tmp_path, "--json"), invoke("show", path, "--json")):
        assert result.exit_code == 0
        printed = strict_json(result.stdout)
        entry = printed[0] if isinstance(printed, list) else printed
        assert (entry["loss"], entry["seconds"], entry["samples"][0]["id"]) == (
            "nan",
            {"detect": "inf"},
            "nan",
        )
    assert "nan" in invoke("show", path).stdout
    assert invoke("incidents", tmp_path).exit_code == 0


def test_a_run_without_incidents(tmp_path):
    model = torch.nn.Linear(2, 1)
    with Sentinel(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=tmp_path / "healthy"):
        pass
    result = invoke("incidents", tmp_path / "healthy")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "No incidents" in result.stdout
    assert json.loads(invoke("incidents", tmp_path / "healthy", "--json").stdout) == []


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([b"a"] * 4, id="bytes"),
        pytest.param([Path("a")] * 4, id="paths"),
        pytest.param(["caf\udce9.png"] * 4, id="file names that are not UTF-8"),
        pytest.param([math.nan] * 4, id="NaN"),
        pytest.param([torch.tensor(3)] * 4, id="tensors"),
        pytest.param(["[red]\x1b[31m"] * 4, id="markup"),
    ],
)
def test_whatever_the_ids_of_the_records_the_run_goes_on_and_the_incident_is_shown(run_dir, ids):
    assert train(run_dir, ids).step_count == 6
    (sample,) = strict_json(invoke("show", run_dir, "1", "--json").stdout)["samples"]
    result = invoke("show", run_dir, "1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert printable(sample["id"]) in result.stdout
    assert f"(id {printable(sample['id'])})" in invoke("incidents", run_dir).stdout


def test_a_broken_incident_is_named_and_the_good_ones_are_shown(run_dir):
    train(run_dir)
    broken = run_dir / "incidents" / "000009-spike"
    broken.mkdir()
    (broken / "incident.json").write_text('{"schema": 1, "id": "0000')
    (run_dir / "incidents" / "000010-spike").mkdir()
    (run_dir / "incidents" / ".hidden").mkdir()
    (run_dir / "incidents" / "notes.txt").write_text("mine")
    result = invoke("incidents", run_dir)
    assert result.exit_code == 0
    assert INPUT in result.stdout
    assert GRADIENT in result.stdout
    first, second = result.stderr.splitlines()
    assert "000009-spike" in first
    assert "truncated" in first
    assert "000010-spike" in second
    assert len(json.loads(invoke("incidents", run_dir, "--json").stdout)) == 2
    assert "000009-spike" in complaint(invoke("show", run_dir, "9"))


def test_when_no_incident_can_be_read_the_exit_code_is_2(tmp_path):
    path = tmp_path / "incidents" / "000009-spike" / "incident.json"
    path.parent.mkdir(parents=True)
    path.write_text("")
    assert "000009-spike" in complaint(invoke("incidents", tmp_path))
    assert "000009-spike" in complaint(invoke("incidents", tmp_path, "--json"))


# -- unusable paths and files --------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["incidents", "show"])
def test_unusable_paths(command, tmp_path):
    (tmp_path / "a-file").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    names = {
        "missing": "does not exist",
        "a-file": "",
        "empty": "",
        "loop": "",
        "x" * 300: "",
        "a-file/x": "",
    }
    for name, words in names.items():
        line = complaint(invoke(command, tmp_path / name))
        assert name in line
        assert words in line


@pytest.mark.parametrize("command", ["incidents", "show"])
def test_a_directory_one_may_not_read(command, tmp_path):
    closed = tmp_path / "closed"
    (closed / "incidents").mkdir(parents=True)
    closed.chmod(0)
    try:
        with unprivileged():
            result = invoke(command, closed)
    finally:
        closed.chmod(0o700)
    line = complaint(result)
    assert "closed" in line
    assert "Permission denied" in line


def test_neither_a_pipe_nor_a_huge_file_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "checkpoint").open("wb") as file:
        file.truncate(1 << 40)
    for name in ("pipe", "checkpoint"):
        assert name in complaint(invoke("show", tmp_path / name))


def replaced(**changes):
    return json.dumps({**full_incident().as_dict(), **changes}).encode()


def without(key):
    return json.dumps({k: v for k, v in full_incident().as_dict().items() if k != key}).encode()


def in_diagnosis(**changes):
    return replaced(diagnosis={**full_incident().as_dict()["diagnosis"], **changes})


BROKEN = {
    "empty": b"",
    "truncated": replaced()[:200],
    "binary": bytes(range(256)),
    "utf-16": replaced().decode().encode("utf-16"),
    "a list": b"[]",
    "null": b"null",
    "foreign": b'{"name": "package", "version": "1.0"}',
    "newer": replaced(schema=SCHEMA + 1),
    "a schema of text": replaced(schema="1"),
    "too deep": b"[" * 100_000,
    "too long a number": b'{"schema": ' + b"1" * 10_000 + b"}",
    "no id": without("id"),
    "no seconds": without("seconds"),
    "an infinite step": replaced(step=math.inf),
    "an id that is no text": replaced(id=7),
    "a message that is no text": replaced(message=["x"]),
    "an unknown kind": replaced(kind="alien"),
    "an unknown severity": replaced(severity=3),
    "an unknown action": replaced(action=3),
    "an unknown outcome": replaced(outcome="lost"),
    "seconds that are no numbers": replaced(seconds={"detect": "soon"}),
    "seconds that are no object": replaced(seconds=[1]),
    "tensors that are no list": replaced(parameters=1),
    "a tensor without a name": replaced(parameters=[{"nonfinite": 1, "numel": 1, "norm": 1}]),
    "an index that is none": replaced(
        parameters=[{"name": "a", "nonfinite": 1, "numel": 1, "norm": 1, "first_index": 1}]
    ),
    "a host that is no text": replaced(ranks=[{"rank": 0, "host": None, "device": "cpu"}]),
    "a position that is none": replaced(samples=[{"position": "first", "id": 1, "field": "x"}]),
    "a micro-batch that is none": replaced(microbatch="second"),
    "notes that are no list": replaced(notes="abc"),
    "notes that are no text": replaced(notes=[1]),
    "details that are no object": replaced(details=[1]),
    "a diagnosis that is none": replaced(diagnosis="bad"),
    "a confidence that is none": in_diagnosis(confidence="high"),
    "a cause that is no text": in_diagnosis(cause=None),
    "a module that is no text": in_diagnosis(module=3),
    "evidence that is no text": in_diagnosis(evidence=[{}]),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_one_line(content, tmp_path):
    path = tmp_path / "incidents" / "000123-nonfinite_gradient" / "incident.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    for place in (("show", path), ("show", path.parent), ("show", tmp_path, "123"), ("incidents", tmp_path)):
        assert "incident.json" in complaint(invoke(*place))


def test_a_newer_file_says_what_to_do(tmp_path):
    (tmp_path / "incident.json").write_bytes(BROKEN["newer"])
    assert "upgrade" in complaint(invoke("show", tmp_path))


def test_an_incident_survives_its_file():
    incident = full_incident()
    again = Incident.from_dict(json.loads(json.dumps(incident.as_dict())))
    assert again.as_dict() == incident.as_dict()
    assert again.ranks == incident.ranks
    assert again.diagnosis == incident.diagnosis


# -- show ----------------------------------------------------------------------------------------------


def test_every_form_of_show_tells_the_same_story(run):
    bundle = run / "incidents" / GRADIENT
    by_id = invoke("show", run, GRADIENT)
    assert by_id.exit_code == 0
    for form in ((bundle,), (bundle / "incident.json",), (run, "4"), (run, "000004"), (run, GRADIENT[:9])):
        assert invoke("show", *form).stdout == by_id.stdout
    assert json.loads(invoke("show", run, "4", "--json").stdout) == json.loads(
        (bundle / "incident.json").read_text()
    )


def test_show_tells_everything_about_a_real_incident(run):
    out = " ".join(invoke("show", run, "1").stdout.split())
    incident = RunDirectory(run).read_incidents()[0]
    told = [
        *("Step 1: nonfinite input", "warning", "skipped", "NanCallback", incident.time[:10]),
        *(incident.message, incident.recovery[1:], "The loss was nan"),
        *("data (95% sure)", *incident.diagnosis.remedy, "2 12 x", "0.weight 12 of 12 nan [0, 0]"),
        *(f"0 on {incident.ranks[0].host}, cpu", "detect", "recover"),
        *("incident.json", "environment.json", "scene/", "bundle.json", str(run / "incidents" / INPUT)),
        f"gradsentinel replay {run / 'incidents' / INPUT} --target pkg.module:factory",
        f"gradsentinel verify {run / 'incidents' / INPUT} --target pkg.module:factory",
    ]
    assert [words for words in told if words not in out] == []


def test_show_tells_everything_about_a_full_incident(tmp_path):
    directory = RunDirectory(tmp_path).write_incident(full_incident())
    out = " ".join(invoke("show", directory).stdout.split())
    told = [
        *("critical", "rolled_back", "2026-01-31 at 08:15:00 UTC", "It was in micro-batch 2."),
        *("The loss was 2.5 and the gradient norm was nan.", "Rolled back to step 100 (23 steps lost)."),
        "data (90% sure), in the backward pass: blocks.3.attn, aten.div, DivBackward0, model.py:42",
        *("- the divisor is 0 in row 7", "- add eps to the divisor", "- 3 steps in a row failed"),
        *("1 img-13.png pixels", "blocks.0.attn.q.weight 12 of 65536 0.81 -", "and 8 more"),
        *("rank tp dp host device", "5 1 2 node07 npu:5", "9 1 4 node08 npu:1", "loss_scale 1024.0"),
        "detect 1.0 ms, diagnose 1.2 s, recover 300 ms",
    ]
    assert [words for words in told if words not in out] == []


def test_show_of_a_bare_incident_says_only_what_is_known():
    incident = Incident(id="0-spike", step=0, kind=Kind.SPIKE, action=Action.WARN, message="a spike")
    lines = rendered(incident_story(incident)).split("\n")
    assert [line.rstrip() for line in lines if line] == [
        "Step 0: spike  warning  reported",
        "What  Reported: a spike.",
        "Done  Reported only: the step was made and the run went on.",
    ]


def test_show_asks_which_incident_of_a_run(run):
    for arguments in ((run,), (run, "0000"), (run, "7")):
        line = complaint(invoke("show", *arguments))
        assert INPUT in line
        assert GRADIENT in line
    assert f"gradsentinel show {run} ID" in complaint(invoke("show", run))
    assert "no incidents/" in complaint(invoke("show", run / "incidents" / INPUT, "7"))


def test_the_id_comes_before_the_step_and_the_step_before_the_beginning(tmp_path):
    for name in ("12", "000012-spike", "000120-spike", "0-spike"):
        RunDirectory(tmp_path).write_incident(full_incident(id=name))
    for given_id, name in {
        "12": "12",
        "120": "000120-spike",
        "0": "0-spike",
        "00012": "000120-spike",
    }.items():
        assert json.loads(invoke("show", tmp_path, given_id, "--json").stdout)["id"] == name


# -- text from files is shown, not obeyed --------------------------------------------------------------

NASTY = {
    "[red]x[/red]": "[red]x[/red]",
    "[/]": "[/]",
    ":boom:": ":boom:",
    "[link=https://example.org]x": "[link=https://example.org]x",
    "\x1b[31mred": "\\x1b[31mred",
    "\x1b]0;title\x07": "\\x1b]0;title\\x07",
    "\x9b31m": "\\x9b31m",
    "a\rb\x08c": "a\\rb\\x08c",
    "right\u202eleft": "right\\u202eleft",
    "two\nlines": "two lines",
    "\ud800": "\\ud800",
    "{0} %s": "{0} %s",
}


@pytest.mark.parametrize("nasty", NASTY, ids=[f"{i}" for i in range(len(NASTY))])
def test_nasty_text_is_printed_literally(nasty, tmp_path):
    incident = full_incident(
        message=nasty,
        detector=nasty,
        recovery=nasty,
        notes=(nasty,),
        samples=(),
        tensors=(TensorEvidence(name=nasty, nonfinite=1, numel=1, norm=math.nan),),
        ranks=(Rank(rank=0, host=nasty, device=nasty, coordinates={nasty: 1}),),
        diagnosis=Diagnosis(
            cause=nasty,
            confidence=0.5,
            phase=nasty,
            module=nasty,
            op=nasty,
            evidence=(nasty,),
            remedy=(nasty,),
        ),
        details={nasty: nasty},
        seconds={nasty: 1.0},
    )
    bundle = RunDirectory(tmp_path).write_incident(incident)
    literal = NASTY[nasty]
    story, table = invoke("show", bundle, COLUMNS="1000").stdout, invoke("incidents", tmp_path).stdout
    assert story.count(literal) >= 14
    assert table.count(literal) == 2
    for text in (story, table):
        assert all(character.isprintable() or character == "\n" for character in text)


def test_in_a_colour_terminal_only_our_own_colours_are_sent(tmp_path):
    incident = full_incident(message="\x1b[31m[red]x", samples=(Sample(position=0, id="\x1b[2J"),))
    for renderable in (incident_story(incident, [("\x1b[2J.json", 1)]), incident_table([incident])):
        console = Console(force_terminal=True, color_system="standard", width=200)
        with console.capture() as capture:
            console.print(renderable)
        colours = re.findall(r"\x1b\[[\d;]*m", capture.get())
        assert colours
        assert "\x1b" not in re.sub(r"\x1b\[[\d;]*m", "", capture.get())
        assert "\\x1b[2J" in capture.get()


@given(st.text(st.characters()))
def test_printable_text_is_one_line_that_can_be_encoded(text):
    shown = printable(text)
    assert shown.isprintable()
    assert shown.encode().decode() == shown
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


def test_names_on_the_command_line_are_printed_literally_too(tmp_path):
    assert "\\x1b[31m[red]" in complaint(invoke("incidents", tmp_path / "\x1b[31m[red]"))


# -- terminals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [10, 20, 40, 60, 79, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(width):
    incidents = [full_incident(), full_incident(id="000124-nonfinite_parameter", severity=Severity.WARNING)]
    for renderable in (incident_table(incidents), incident_story(incidents[0], [("a" * 50, 1)])):
        lines = rendered(renderable, width).splitlines()
        assert lines
        assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (60, ["id", "where", "outcome"]),
        (80, ["id", "severity", "where", "cause", "outcome"]),
        (100, ["id", "severity", "where", "cause", "action", "outcome", "seconds"]),
        (140, TITLES),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns_and_whole_ids(width, titles):
    text = rendered(incident_table([full_incident()]), width)
    assert text.splitlines()[0].split() == titles
    assert "000123-nonfinite_gradient" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "gbk"},
        {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "60"},
    ],
    ids=["ascii", "C", "gbk", "dumb"],
)
def test_any_encoding_and_terminal_will_do(environment, tmp_path):
    bundle = RunDirectory(tmp_path).write_incident(full_incident(message="schlecht: 坏数据 ✗ é"))
    code = (
        "import sys\n"
        "from gradsentinel.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    sys.argv = ['gradsentinel', *line.split('|')]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        print('exit', end.code)\n"
    )
    lines = ["--help", f"incidents|{tmp_path}", f"show|{bundle}", "doctor", f"incidents|{tmp_path}/é✗"]
    done = process(*lines, code=code, **environment)
    encoding = environment.get("PYTHONIOENCODING", "ascii" if "LANG" in environment else "utf-8")
    out, err = done.stdout.decode(encoding), done.stderr.decode(encoding)
    assert [line for line in out.splitlines() if line.startswith("exit")] == ["exit 0"] * 4 + ["exit 2"]
    assert "schlecht" in out
    assert "\x1b" not in out
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_a_reader_that_has_enough_is_no_error(run_dir):
    for step in range(300):
        RunDirectory(run_dir).write_incident(full_incident(id=f"{step:06d}-spike", step=step))
    for arguments in (["incidents", str(run_dir)], ["incidents", str(run_dir), "--json"]):
        with subprocess.Popen(  # noqa: S603 - ours
            [sys.executable, "-m", "gradsentinel", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as writer:
            writer.stdout.close()
            assert writer.stderr.read() == b""
        assert writer.returncode == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk_is_one_line(run):
    for arguments in (["incidents", str(run)], ["show", str(run), "1", "--json"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(  # noqa: S603 - ours
                [sys.executable, "-m", "gradsentinel", *arguments],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == 2
        assert done.stderr.splitlines() == ["error: No space left on device"]


def test_numbers_for_people():
    assert [duration(s) for s in (0.00004, 0.0012, 0.031, 0.9996, 1.23, 95.4, math.nan)] == [
        *("0.0 ms", "1.2 ms", "31 ms", "1.0 s", "1.2 s", "95 s", "?")
    ]
    assert [size_of(b) for b in (0, 1023, 1536, 5 << 20, 2 << 30, 1 << 42)] == [
        *("0 B", "1023 B", "1.5 KiB", "5.0 MiB", "2.0 GiB", "4096.0 GiB")
    ]
