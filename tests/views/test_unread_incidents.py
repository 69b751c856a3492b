"""Where incidents cannot be read, no view says that all is well."""

import io
import json

import pytest
from rich.console import Console
from runs_on_disk import append, start, step, train, write_incident, write_steps
from typer.testing import CliRunner

from gradsentinel import cli
from gradsentinel.views import Views
from gradsentinel.views.live import Pace, frame
from gradsentinel.views.markdown import markdown
from gradsentinel.views.report import report
from gradsentinel.views.run_files import RunFiles

SOUND = "every step was made with sound gradients"


def spoil(run_dir, how):
    """Make the files of all incidents unreadable."""
    for directory in list((run_dir / "incidents").iterdir()):
        file = directory / "incident.json"
        text = file.read_text("utf-8")
        if how == "cut off":
            file.write_text(text[: len(text) // 2], "utf-8")
        elif how == "of another schema":
            file.write_text(json.dumps({**json.loads(text), "schema": 99}), "utf-8")
        elif how == "without parts":
            file.write_text(json.dumps({**json.loads(text), "diagnosis": "none"}), "utf-8")
        elif how == "missing":
            file.unlink()
        elif how == "a link":
            directory.rename(run_dir.parent / directory.name)
            directory.symlink_to(run_dir.parent / directory.name)
        else:
            file.unlink()
            (directory / "norms.json").unlink()
            directory.rmdir()


def watched(run_dir):
    result = CliRunner().invoke(cli.app, ["watch", str(run_dir), "--once"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.output


WAYS = ["cut off", "of another schema", "without parts", "missing", "a link", "removed"]


@pytest.mark.parametrize("how", WAYS)
def test_the_event_log_tells_of_incidents_whose_files_cannot_be_read(run_dir, how):
    train(run_dir, steps=10, bad=[3, 6])
    told = [(row["step"], row["outcome"], row["where"]) for row in Views(run_dir).incidents(".")]
    spoil(run_dir, how)
    views = Views(run_dir)
    rows, overview = views.incidents("."), views.run(".")
    assert [(row["step"], row["outcome"], row["where"]) for row in rows] == told
    assert [row["step"] for row in rows] == [3, 6]
    assert overview["numbers"]["incidents"] == overview["numbers"]["lost_batches"] == 2
    assert "2 incidents" in overview["headline"]
    assert len(overview["problems"]) == (1 if how == "removed" else 2)
    assert not any("TypeError" in problem for problem in overview["problems"])
    page = views.incident(".", rows[0]["id"])
    assert any("event log" in sentence for sentence in page["story"])
    assert "show" not in [command["what"] for command in page["commands"]]
    text = markdown(run_dir)
    assert "Step 6: non-finite gradient" in text
    assert SOUND not in text
    assert '"headline":"The run has ended; 10 steps attempted, 2 incidents' in report(run_dir)
    screen = watched(run_dir)
    assert "2 incidents" in screen
    assert "No incident" not in screen


def test_what_ended_the_run_is_the_gravest_in_the_log_too(run_dir):
    about = {"step": 1, "id": "000001-spike"}
    found = {"event": "incident", "kind": "spike", "severity": "warning", "action": "retry", "message": "x"}
    end = {"event": "recovery", "outcome": "aborted", "message": "nothing helped", "goes_on_from": None}
    append(run_dir / "events-rank0.jsonl", start(), step(0), {**found, **about}, {**end, **about})
    (row,) = Views(run_dir).incidents(".")
    assert (row["severity"], row["action"], row["outcome"]) == ("critical", "abort", "aborted")


@pytest.mark.parametrize("how", WAYS[:5])
def test_incidents_that_no_log_tells_of_are_counted(run_dir, how):
    write_incident(run_dir, 3)
    write_steps(run_dir, [1.0, 0.9])
    spoil(run_dir, how)
    overview = Views(run_dir).run(".")
    assert "1 incident that cannot be read" in overview["headline"]
    assert "有 1 起事故无法读取" in Views(run_dir).run(".", "zh")["headline"]
    assert overview["quiet"] == "unread"
    text = markdown(run_dir)
    assert SOUND not in text
    assert "that all is well cannot be said" in text
    assert "1 incident that cannot be read" in report(run_dir)
    assert "No incidents." not in watched(run_dir)


def test_readable_and_unreadable_incidents_together(run_dir):
    write_steps(run_dir, [1.0, 0.9])
    write_incident(run_dir, 0)
    lost = write_incident(run_dir, 1)
    (run_dir / "incidents" / lost.id / "incident.json").write_text("{")
    assert "1 incident and 1 that cannot be read" in Views(run_dir).run(".")["headline"]


@pytest.mark.parametrize(
    ("lines", "quiet"),
    [
        ([step(0), step(1)], "sound"),
        ([step(0), {**step(1), "applied": False}], "dropped"),
        ([step(0), {"event": "scaler_skip", "step": 1, "iteration": 1}], "dropped"),
        ([step(0), step(1), {"event": "run_end", "step": 2, "iteration": 2, "applied": 1}], "dropped"),
        ([step(0), step(1), {"event": "run_end", "step": 2, "iteration": 2, "applied": 2}], "sound"),
        ([step(0), {"schema": 99, "event": "step"}], "unread"),
        ([step(0), {"event": "incident", "step": 1, "id": "../../etc", "kind": "spike"}], "unread"),
        ([step(0), {"event": "incident", "step": 1, "id": "000001-x", "kind": 7}], "unread"),
    ],
)
def test_sound_is_said_only_of_a_run_whose_steps_all_were_made(run_dir, lines, quiet):
    append(run_dir / "events-rank0.jsonl", start(), *lines)
    assert Views(run_dir).run(".")["quiet"] == quiet
    assert (SOUND in markdown(run_dir)) == (quiet == "sound")
    assert ("No incidents." in watched(run_dir)) == (quiet != "unread")


def test_a_long_name_leaves_budgets_on_the_screen(run_dir):
    write_steps(run_dir, [1.0, 0.9])
    budget = {"name": "retries", "limit": 3, "window": 100, "spent": []}
    append(run_dir / "events-rank0.jsonl", {"event": "budgets", "step": 1, "budgets": [budget]})
    write_incident(run_dir, 1, tensors=["layer." * 1000])
    console = Console(width=100, height=30, record=True, file=io.StringIO())
    run = RunFiles(run_dir, "run")
    with run.looked_at():
        console.print(frame(run, Pace(), width=100, height=30))
    lines = console.export_text().splitlines()
    assert len(lines) <= 30
    assert any("retries" in line for line in lines)


def test_no_line_is_kept_free_for_marks_that_are_not_there(run_dir):
    write_steps(run_dir, [1.0, 0.9])
    lines = watched(run_dir).splitlines()
    (norm,) = [number for number, line in enumerate(lines) if line.startswith("gradient norm")]
    assert lines[norm + 1].startswith("learning rate")


@pytest.mark.parametrize("how", ["missing", "removed", "a whole directory gone"])
def test_a_report_on_one_incident_tells_what_the_log_knows_of_it(run_dir, how):
    train(run_dir, steps=10, bad=[3, 6])
    spoil(run_dir, how)
    if how == "a whole directory gone":
        (run_dir / "incidents").rmdir()
    for asked in ("6", "000006", "000006-nonfinite_gradient"):
        result = CliRunner().invoke(
            cli.app, ["report", str(run_dir), "--incident", asked, "--markdown", "--lang", "zh"]
        )
        assert result.exit_code == 0, result.output
        assert "第 6 步：梯度为 NaN/Inf" in result.stdout
        assert "只有事件日志提到它" in result.stdout
        assert "第 3 步" not in result.stdout
    result = CliRunner().invoke(cli.app, ["report", str(run_dir), "--incident", "7"])
    assert result.exit_code != 0
    assert "no incident matches '7'" in result.stderr
    assert "there is 000003-nonfinite_gradient, 000006-nonfinite_gradient" in result.stderr
    result = CliRunner().invoke(cli.app, ["report", str(run_dir), "--incident", "00000"])
    assert "several incidents match" in result.stderr
