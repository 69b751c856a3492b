"""The launcher: a script that knows nothing of it runs as it is, watched."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradsentinel import NanCallback, Retry, Rollback
from gradsentinel.errors import ConfigurationError
from gradsentinel.integrations.megatron.by_name import make_callbacks
from gradsentinel.integrations.megatron.launch import Launch, main
from gradsentinel.integrations.megatron.options import MODULES, parse
from gradsentinel.store import RunDirectory

HERE = Path(__file__).resolve().parent


def test_the_launchers_options_may_stand_anywhere_and_the_rest_is_the_scripts():
    line = [
        "--gs-run-dir",
        "runs/a",
        "pretrain.py",
        "--lr",
        "1",
        "--gs-timeout=5",
        "--gs-module",
        "mine.loop",
        "x",
    ]
    found = parse(line)
    assert (found.script, found.arguments) == ("pretrain.py", ("--lr", "1", "x"))
    assert (found.run_dir, found.timeout, found.keep_nan_checks) == ("runs/a", 5.0, False)
    assert found.modules == (*MODULES, "mine.loop")
    assert parse(["a.py", "--gs-keep-nan-checks"]).keep_nan_checks


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ([], "the script to run is missing"),
        (["--lr", "a.py"], "the script to run is missing"),
        (["a.py", "--gs-rundir", "x"], "there is no option --gs-rundir"),
        (["a.py", "--gs-run-dir"], "--gs-run-dir needs a value"),
        (["a.py", "--gs-timeout", "soon"], "no number of seconds"),
        (["a.py", "--gs-timeout", "-5"], "--gs-timeout: timeout=-5.0 must be above 0 seconds"),
        (["a.py", "--gs-timeout=nan"], "must be above 0 seconds"),
        (["a.py", "--gs-timeout=inf"], "must be above 0 seconds"),
        (["a.py", "--gs-keep-nan-checks=no"], "there is no option --gs-keep-nan-checks=no"),
    ],
)
def test_a_wrong_line_is_refused(line, says):
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        parse(line)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["--gs-rundir", "x", "a.py"], "there is no option --gs-rundir"),
        (["--gs-callbacks", "Nothing", __file__], "no callback is 'Nothing'"),
        (["nowhere.py"], "there is no script nowhere.py"),
        ([], "the script to run is missing"),
    ],
)
def test_a_wrong_line_ends_with_the_reason_and_a_status(capsys, line, says):
    with pytest.raises(SystemExit) as ended:
        main(line)
    told = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert ended.value.__suppress_context__
    assert len(told) == 2
    assert told[1].startswith("error: ")
    assert says in told[1]


def test_callbacks_are_named_with_literal_arguments():
    nan, retry, rollback = make_callbacks("NanCallback, Retry(attempts=1), Rollback(every=50, keep=2)")
    assert isinstance(nan, NanCallback)
    assert isinstance(retry, Retry)
    assert retry.attempts == 1
    assert isinstance(rollback, Rollback)
    assert (rollback.every, rollback.keep) == (50, 2)
    assert make_callbacks("") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Nothing", "no callback is 'Nothing'"),
        ("NanCallback(", "no list of callbacks"),
        ("Retry(1)", "needs the names of its arguments"),
        ("Retry(attempt=1)", "Retry has no field 'attempt'; did you mean attempts?"),
        ("Retry(attempts=1, attempts=2)", "says attempts twice"),
        ("Retry(**{'attempts': 1})", "needs the names of its arguments"),
        ("Retry(attempts='1')", "attempts='1' must be a whole number"),
        ("Retri", "no callback is 'Retri'; did you mean Retry?"),
        ("NanCallback] + [Retry", "is no list of callbacks"),
        ("Nan\0Callback", "is no list of callbacks"),
        ("Retry(attempts=0)", "attempts at least 1"),
        ("Retry(attempts=open('x'))", "malformed node"),
        ("__import__('os').abort()", "no callback is"),
    ],
)
def test_wrong_callbacks_are_refused_and_nothing_is_run(text, says):
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        make_callbacks(text)


def test_a_script_that_trains_nothing_is_told_that_nothing_was_watched(tmp_path, caplog):
    script = tmp_path / "empty.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['x']\n")
    Launch(parse([str(script), "x"])).run()
    assert "nothing was watched" in caplog.text
    assert "--gs-module" in caplog.text


def launch(folder: Path, *words: str, watched: bool = True) -> str:
    if importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    start = ["-m", "gradsentinel.integrations.megatron", "--gs-module", "loop"] if watched else []
    done = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-W", "ignore", *start, HERE / "script.py", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("weights "))


@pytest.mark.multiprocess
@pytest.mark.xdist_group("megatron")
def test_a_script_runs_as_it_is_and_a_fault_leaves_no_trace(tmp_path):
    alone = launch(tmp_path, watched=False)
    healthy = launch(tmp_path, "--gs-run-dir", "healthy")
    cured = launch(tmp_path, "--gs-run-dir", "cured", "--fault")
    assert healthy == alone
    assert cured == alone.replace("arguments []", "arguments ['--fault']")
    assert "checked True" in alone  # Megatron's own check is on again after the run
    assert RunDirectory(tmp_path / "healthy").read_incidents() == []
    [incident] = RunDirectory(tmp_path / "cured").read_incidents()
    assert (incident.step, incident.outcome, incident.rank_count) == (2, "retried", 1)
    assert incident.tensors[0].name == "decoder.layers.0.mlp.linear_fc1.weight"
    events = [event["event"] for event in RunDirectory(tmp_path / "cured").read_events(0)]
    assert events[-1] == "run_end"


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.xdist_group("megatron")
def test_a_persistent_fault_is_skipped_by_the_script_itself(tmp_path):
    said = {"run_dir": "here", "callbacks": {"NanCallback": {}}, "module": ["nothing.there"]}
    (tmp_path / "gs.json").write_text(json.dumps(said))
    skipped = launch(tmp_path, "--gs-config", "gs.json", "--fault", "--persistent")
    assert "skipped [2]" in skipped
    [incident] = RunDirectory(tmp_path / "here").read_incidents()
    assert (incident.step, incident.outcome) == (2, "skipped")
