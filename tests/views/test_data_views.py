"""The views of runs: empty, half-written, damaged, hostile, growing, trained."""

import json
import math
import os
from pathlib import Path

import pytest
from runs_on_disk import append, start, step, train, write_incident, write_steps

from gradsentinel import EventLog, Rollback, TensorBoardCallback
from gradsentinel.decision import Kind
from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import Outcome
from gradsentinel.store import RunDirectory
from gradsentinel.views import ViewError, Views

HOSTILE = '<script>alert("x")</script> & ../../etc \u202e'


def everything(views: Views, name: str = ".") -> dict:
    """Ask for all there is; it must be JSON without NaN."""
    seen = {
        "runs": views.runs(),
        "run": [views.run(name, lang) for lang in ("en", "zh")],
        "timeline": views.timeline(name),
        "incidents": views.incidents(name, "zh"),
        "compare": views.compare([name], "loss"),
    }
    seen["each"] = [
        views.incident(name, one["id"], lang) for one in seen["incidents"] for lang in ("en", "zh")
    ]
    json.dumps(seen, allow_nan=False)
    return seen


def test_a_trained_run_is_seen_whole(run_dir):
    train(run_dir, steps=45, bad=(20,), callbacks=[Rollback(every=10, confirm_after=5)])
    views = Views(run_dir)
    seen = everything(views)
    run = seen["run"][0]
    assert (run["state"], run["iterations"], run["steps"], run["starts"]) == ("ended", 45, 45, 1)
    assert run["numbers"]["by_outcome"] == {"skipped": 1}
    assert (run["numbers"]["applied"], run["numbers"]["lost_batches"]) == (44, 1)
    assert run["headline"] == "The run has ended; 45 steps attempted, 1 incident, 1 step lost."
    budgets = {one["name"]: (one["used"], one["left"], one["limit"]) for one in run["budgets"]}
    assert budgets == {"Skip": (1, 9, 10), "Rollback": (0, 3, 3)}
    snapshots = [(one["step"], one["state"], one["where"], one["gone"]) for one in run["snapshots"]]
    assert snapshots == [(at, "good", "memory", True) for at in (40, 30, 20)]
    series = {one["tag"]: one["points"] for one in seen["timeline"]["series"]}
    assert [point[0] for point in series["loss"]] == list(range(45))
    assert series["grad_norm"][20][3] == "nan"
    (mark,) = (mark for mark in seen["timeline"]["marks"] if mark["incident"])
    assert (mark["iteration"], mark["what"], mark["kind"]) == (20, "incident", "nonfinite_gradient")


def test_every_step_is_recorded_although_few_lines_are_written(run_dir):
    train(run_dir, steps=101)
    lines = (run_dir / "events-rank0.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["event"] == "step" for line in lines) == 11
    points = Views(run_dir).timeline(".", ["loss"])["series"][0]["points"]
    assert [point[0] for point in points] == list(range(101))


def test_a_rollback_is_a_mark_and_its_steps_count_as_lost(run_dir):
    train(run_dir, steps=40, bad=(25, 26, 27), callbacks=[Rollback(every=10, confirm_after=0, after=3)])
    views = Views(run_dir)
    marks = [
        (mark["iteration"], mark["step"], mark["what"])
        for mark in views.timeline(".")["marks"]
        if mark["incident"]
    ]
    assert marks == [(25, 25, "incident"), (26, 26, "incident"), (27, 27, "rollback")]
    run = views.run(".")
    assert run["numbers"]["by_outcome"] == {"skipped": 2, "rolled_back": 1}
    assert run["numbers"]["lost_batches"] == 2 + (27 - 20 + 1)
    assert run["iterations"] == 40


@pytest.mark.parametrize(
    "make",
    [
        lambda path: (path / "incidents").mkdir(parents=True),
        lambda path: (path.mkdir(), (path / "events-rank0.jsonl").touch()),
    ],
)
def test_an_empty_run(run_dir, make):
    make(run_dir)
    seen = everything(Views(run_dir))
    assert seen["runs"][0]["state"] == "empty"
    assert seen["timeline"]["series"] == []
    assert seen["incidents"] == []


def test_a_run_that_was_killed_and_one_that_is_going_on(run_dir):
    path = write_steps(run_dir, [1.0, 2.0])
    assert Views(run_dir).run(".")["state"] == "running"
    os.utime(path, (1_700_000_000, 1_700_000_000))
    run = Views(run_dir).run(".")
    assert (run["state"], run["updated"]) == ("unknown", "2023-11-14T22:13:20Z")


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (None, "ended"),
        ("ValueError: no", "failed"),
        ("TrainingAborted: step 3", "aborted"),
        ("KeyboardInterrupt: ", "failed"),
    ],
)
def test_how_a_run_ended(run_dir, error, state):
    path = write_steps(run_dir, [1.0])
    append(
        path, {"event": "run_end", "step": 1, "error": error}, {"event": "incident", "id": "late", "step": 1}
    )
    assert (Views(run_dir).runs()[0]["state"], Views(run_dir).run(".")["state"]) == (state, state)
    append(path, start())
    assert (Views(run_dir).runs()[0]["state"], Views(run_dir).run(".")["state"]) == ("running", "running")


def test_the_list_of_runs_does_not_read_their_logs(run_dir, monkeypatch):
    """There may be hundreds of them."""
    path = write_steps(run_dir, [1.0] * 20_000)
    append(path, {"event": "run_end", "step": 1, "error": None}, end="")
    monkeypatch.setattr("gradsentinel.views.event_lines.EventLines.new", None)
    assert Views(run_dir).runs()[0]["state"] == "ended"


def test_what_is_damaged_is_named_and_the_rest_is_shown(run_dir):
    write_steps(run_dir, [1.0])
    whole = write_incident(run_dir, 1)
    for name, text in (
        ("000002-cut", '{"schema": 1, "id'),
        ("000003-foreign", "[]"),
        ("000004-new", '{"schema": 99}'),
    ):
        (run_dir / "incidents" / name).mkdir()
        (run_dir / "incidents" / name / "incident.json").write_text(text)
    (run_dir / "incidents" / "000005-none").mkdir()
    (run_dir / "incidents" / "stray").write_text("x")
    seen = everything(Views(run_dir))
    assert [one["id"] for one in seen["incidents"]] == [whole.id]
    problems = "\n".join(seen["run"][0]["problems"])
    for part in (
        "000002-cut",
        "000003-foreign",
        "000004-new",
        "newer GradSentinel",
        "000005-none has no incident.json",
    ):
        assert part in problems
    assert str(run_dir) not in problems
    with pytest.raises(ViewError, match="no such incident"):
        Views(run_dir).incident(".", "000002-cut")


def test_a_run_that_grows_while_it_is_looked_at(run_dir):
    views = Views(run_dir)
    with pytest.raises(ViewError, match="no run"):
        views.run(".")
    path = write_steps(run_dir, [1.0])
    assert views.run(".")["iterations"] == 1
    append(path, step(1, 9.0))
    assert views.timeline(".")["series"][0]["points"] == [[0, 1.0, 1.0, 1.0], [1, 9.0, 9.0, 9.0]]
    incident = write_incident(run_dir, 1)
    assert [one["id"] for one in views.incidents(".")] == [incident.id]
    incident.outcome = Outcome.ROLLED_BACK
    incident.recovery = "rolled back"
    RunDirectory(run_dir).write_incident(incident)
    assert views.incidents(".")[0]["outcome"] == "rolled_back"


def test_hostile_names_are_passed_on_as_text(run_dir):
    path = write_steps(run_dir, [1.0])
    append(
        path,
        start(host=HOSTILE, **{HOSTILE: 3}),
        {"event": "budgets", "budgets": [{"name": HOSTILE, "limit": 1, "window": 2, "spent": [0]}]},
    )
    cause = Diagnosis(
        cause=HOSTILE,
        confidence=math.nan,
        module=HOSTILE,
        op=HOSTILE,
        evidence=(f"spread: {HOSTILE} > {HOSTILE}",),
        remedy=(HOSTILE,),
    )
    write_incident(run_dir, 1, tensors=[HOSTILE], diagnosis=cause, message=HOSTILE, detector=HOSTILE)
    seen = everything(Views(run_dir))
    page = seen["each"][0]
    assert page["todo"] == [HOSTILE]
    assert page["incident"]["message"] == HOSTILE
    assert seen["run"][0]["budgets"][0]["name"] == HOSTILE


def test_several_runs_are_found_and_compared(tmp_path):
    for name, losses in (
        ("a", [1.0, 2.0]),
        ("deep/er/b", [3.0]),
        ("deep/er/b/incidents/c", [4.0]),
        (".hidden/d", [5.0]),
    ):
        write_steps(tmp_path / name, losses)
    views = Views(tmp_path)
    assert {one["name"] for one in views.runs()} == {"a", "deep/er/b"}
    compared = views.compare(["deep/er/b", "a", "a"], "loss")
    assert [(one["name"], [point[3] for point in one["points"]]) for one in compared["runs"]] == [
        ("deep/er/b", [3.0]),
        ("a", [1.0, 2.0]),
    ]
    assert views.compare(["a"], "no such tag")["runs"][0]["points"] == []


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../other",
        "a/../../other",
        "/etc",
        "link",
        "link/run",
        "a/link",
        "\0",
        "",
        "missing",
        "a/incidents/x",
    ],
)
def test_nothing_outside_of_the_directory_is_seen(tmp_path, name):
    inside, outside = tmp_path / "logs", tmp_path / "other"
    write_steps(outside, [1.0])
    write_steps(outside / "run", [1.0])
    write_steps(inside / "a", [1.0])
    (inside / "link").symlink_to(outside)
    (inside / "a" / "link").symlink_to(outside)
    views = Views(inside)
    assert [one["name"] for one in views.runs()] == ["a"]
    for ask in (
        views.run,
        views.timeline,
        views.incidents,
        lambda name: views.incident(name, "x"),
        lambda name: views.compare([name]),
    ):
        with pytest.raises(ViewError):
            ask(name)


def test_links_inside_a_run_that_lead_out_of_it_are_not_followed(tmp_path):
    inside, outside = tmp_path / "logs", tmp_path / "other"
    secret = write_incident(outside, 7, message="secret")
    write_steps(outside, [42.0])
    write_incident(inside, 1)
    (inside / "events-rank0.jsonl").symlink_to(outside / "events-rank0.jsonl")
    (inside / "incidents" / "linked").symlink_to(outside / "incidents" / secret.id)
    half = inside / "incidents" / "half"
    half.mkdir()
    (half / "incident.json").symlink_to(outside / "incidents" / secret.id / "incident.json")
    (inside / "escalation.json").symlink_to(outside / "incidents" / secret.id / "incident.json")
    seen = everything(Views(inside))
    assert "secret" not in json.dumps(seen)
    assert seen["timeline"]["series"] == []
    assert len(seen["incidents"]) == 1


def test_a_pipe_where_a_file_should_be_does_not_hang(run_dir):
    run_dir.mkdir()
    os.mkfifo(run_dir / "events-rank0.jsonl")
    (run_dir / "incidents" / "a").mkdir(parents=True)
    os.mkfifo(run_dir / "incidents" / "a" / "incident.json")
    assert everything(Views(run_dir))["incidents"] == []


def test_reading_changes_nothing(run_dir):
    train(run_dir, steps=12, bad=(5,), callbacks=[EventLog(every=1)])

    def state() -> dict[str, tuple[int, int]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_size)
            for path in sorted(Path(run_dir).rglob("*"))
        }

    before = state()
    everything(Views(run_dir))
    assert state() == before


def test_numbers_come_from_tensorboard_where_the_log_has_none(run_dir):
    pytest.importorskip("tensorboard")
    train(run_dir, steps=12, callbacks=[EventLog(every=None), TensorBoardCallback()])
    timeline = Views(run_dir).timeline(".")
    assert timeline["source"] == "tensorboard"
    assert [point[0] for point in timeline["series"][0]["points"]] == list(range(12))
    assert {"loss", "grad_norm", "learning_rate"} <= set(timeline["tags"])


def test_snapshots_on_disk_are_told_from_damaged_ones(run_dir):
    train(run_dir, steps=30, callbacks=[Rollback(every=10, confirm_after=2, on_disk=2)])
    (run_dir / "snapshots" / "damaged-step-5-rank0").mkdir()
    (run_dir / "snapshots" / "step-7-rank0").mkdir()
    found = {
        (one["step"], one["state"]) for one in Views(run_dir).run(".")["snapshots"] if one["where"] == "disk"
    }
    assert {(5, "damaged"), (7, "damaged")} < found
    good = [
        one
        for one in Views(run_dir).run(".")["snapshots"]
        if one["where"] == "disk" and one["state"] == "good"
    ]
    assert good
    assert all(one["bytes"] > 100 and one["ranks"] == 1 for one in good)


def test_a_bad_loss_is_of_the_kind_it_says(run_dir):
    write_steps(run_dir, [1.0])
    write_incident(run_dir, 1, kind=Kind.SPIKE)
    views = Views(run_dir)
    assert views.incidents(".", "zh")[0]["kind_label"] == "尖峰"
    assert views.incidents(".", "fr")[0]["kind_label"] == "spike"
