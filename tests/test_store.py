"""The run directory: readable after kill -9, and clear about what it cannot read."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from gradsentinel import Action, Incident, Kind, NanCallback, Skip, StoreError, TrainingAborted
from gradsentinel.store import SCHEMA, EventFile, RunDirectory, read_incident, write_json
from gradsentinel.wording import id_order
from loops import Spoiler, build, finish, make_batches, train_watched


def incident(number=0, **fields):
    return Incident(
        id=f"{number:06d}-custom", step=number, kind=Kind.CUSTOM, action=Action.SKIP, message="m", **fields
    )


# -- json ------------------------------------------------------------------------------------------


def test_a_file_is_replaced_at_once(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_json(path, {"version": 1})

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"version": 2})
    assert json.loads(path.read_text()) == {"version": 1}


def test_nothing_is_left_of_a_file_that_could_not_be_made(tmp_path):
    with pytest.raises(TypeError):
        write_json(tmp_path / "file.json", {"what": object()})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "file.json", {"what": float("nan")})
    assert list(tmp_path.iterdir()) == []


WRITER = """
    import sys
    from pathlib import Path
    from gradsentinel.store import EventFile, write_json

    directory = Path(sys.argv[1])
    events = EventFile(directory / "events-rank0.jsonl")
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        write_json(directory / "state.json", {"number": number, "text": "x" * 20000, "again": number})
        events.write({"event": "step", "number": number, "text": "x" * 20000})
"""


def test_kill_9_leaves_whole_files(tmp_path):
    """The reader sees an old or a new state, and every line that was written before the end."""
    for round_ in range(3):
        process = subprocess.Popen(  # noqa: S603 - this very interpreter
            [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        state = tmp_path / "state.json"
        while not state.exists() or json.loads(state.read_text())["number"] <= round_:
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        written = json.loads(state.read_text())
        assert written["number"] == written["again"]
        # The first state may be there before the first event is.
        numbers = [0, *(event["number"] for event in RunDirectory(tmp_path).read_events())]
        assert numbers[-1] in {written["number"], written["number"] - 1}


# -- events ----------------------------------------------------------------------------------------


@pytest.fixture
def log(run_dir):
    file = EventFile(RunDirectory(run_dir).events_file(0))
    for number in range(3):
        file.write({"event": "step", "step": number})
    file.close()
    return RunDirectory(run_dir).events_file(0)


def steps_in(log):
    return [event["step"] for event in RunDirectory(log.parent).read_events()]


def test_events_come_back_in_order_with_the_schema(log):
    assert steps_in(log) == [0, 1, 2]
    assert all(event["schema"] == SCHEMA for event in RunDirectory(log.parent).read_events())


def test_an_event_is_with_the_system_when_the_call_returns(run_dir):
    file = EventFile(RunDirectory(run_dir).events_file(0))
    file.write({"event": "step", "step": 7})
    assert steps_in(RunDirectory(run_dir).events_file(0)) == [7]
    file.close()
    file.close()
    file.write({"event": "too late"})


@pytest.mark.parametrize("cut", [1, 2, 10, 30])
def test_a_torn_last_line_is_left_out(log, cut):
    content = log.read_bytes()
    log.write_bytes(content[:-cut])
    assert steps_in(log) == ([0, 1, 2] if cut == 1 else [0, 1])


def test_a_line_torn_inside_of_a_character_is_left_out(log):
    line = json.dumps({"schema": 1, "event": "incident", "where": "données"}, ensure_ascii=False).encode()
    with log.open("ab") as file:
        file.write(line[: line.index("é".encode()) + 1])
    assert steps_in(log) == [0, 1, 2]


def test_after_a_torn_line_the_next_run_begins_a_new_one(log):
    log.write_bytes(log.read_bytes()[:-5])
    file = EventFile(log)
    file.write({"event": "step", "step": 9})
    file.close()
    assert steps_in(log) == [0, 1, 9]


def test_a_first_line_that_was_torn_does_not_hide_the_rest(run_dir):
    """The first start was killed while it wrote its very first line; the second went on."""
    log = RunDirectory(run_dir).events_file(0)
    file = EventFile(log)
    os.write(file._descriptor, b'{"schema": 1, "eve')
    file.close()
    file = EventFile(log)
    file.write({"event": "step", "step": 5})
    file.close()
    assert steps_in(log) == [5]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r", "\n"])
def test_a_message_may_hold_any_line_break(separator, run_dir):
    file = EventFile(RunDirectory(run_dir).events_file(0))
    message = f"one{separator}two"
    file.write({"event": "incident", "message": message})
    file.close()
    assert [event["message"] for event in RunDirectory(run_dir).read_events()] == [message]


def test_a_newer_log_is_refused(log):
    with log.open("a") as file:
        file.write(json.dumps({"schema": SCHEMA + 1, "event": "step", "step": 3}) + "\n")
    with pytest.raises(
        StoreError, match=r"events-rank0.jsonl was written by a newer GradSentinel \(schema 2"
    ):
        steps_in(log)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a log of\nanother program\n", "is not an event log"),
        (b'{"event": "step"}\n', "was not written by GradSentinel"),
        (b"[1, 2]\n", "was not written by GradSentinel"),
        (b"\x80\x02}q\x00.\n\x00\x01\n", "is not an event log"),
    ],
    ids=["text", "no schema", "a list", "binary"],
)
def test_a_foreign_log_is_refused(content, words, run_dir):
    run_dir.mkdir()
    log = RunDirectory(run_dir).events_file(0)
    log.write_bytes(content)
    with pytest.raises(StoreError, match=f"{log}.* {words}"):
        steps_in(log)


def test_a_log_that_is_not_there(run_dir):
    with pytest.raises(StoreError, match=r"cannot read .*events-rank3.jsonl"):
        list(RunDirectory(run_dir).read_events(3))


# -- incidents -------------------------------------------------------------------------------------


def test_incidents_come_back_in_the_order_they_happened(run_dir):
    directory = RunDirectory(run_dir)
    later = incident(3, time="2026-01-31T08:15:02Z")
    first, second = incident(9, time="2026-01-31T08:15:00Z"), incident(1, time="2026-01-31T08:15:01Z")
    for entry in (later, first, second):
        directory.write_incident(entry)
    assert directory.read_incidents() == [first, second, later]


def test_an_incident_is_written_over_itself(run_dir):
    directory, entry = RunDirectory(run_dir), incident()
    directory.write_incident(entry)
    entry.recovery = "step dropped"
    directory.write_incident(entry)
    assert directory.read_incidents() == [entry]


def test_ids_sort_by_step_and_number_not_by_letter():
    ids = ["000007-spike-10", "1000000-spike", "000007-spike-2", "000007-spike", "000006-spike-3"]
    wanted = ["000006-spike-3", "000007-spike", "000007-spike-2", "000007-spike-10", "1000000-spike"]
    assert sorted(ids, key=id_order) == wanted


def test_incidents_of_one_second_and_one_step_come_in_the_order_of_their_numbers(run_dir):
    directory = RunDirectory(run_dir)
    for _ in range(11):
        name = directory.new_incident_id(7, "spike")
        entry = incident(7, time="2026-01-31T08:15:00Z", iteration=7)
        entry.id = name
        directory.write_incident(entry)
    read = [one.id for one in directory.read_incidents()]
    assert read == ["000007-spike", *(f"000007-spike-{number}" for number in range(2, 12))]


def test_an_id_is_never_taken_twice(run_dir):
    directory = RunDirectory(run_dir)
    ids = []
    for _ in range(3):
        name = directory.new_incident_id(12, "magnitude")
        ids.append(name)
        entry = incident()
        entry.id = name
        directory.write_incident(entry)
    assert ids == ["000012-magnitude", "000012-magnitude-2", "000012-magnitude-3"]


GOOD = incident().as_dict()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps({**GOOD, "schema": SCHEMA + 1}), "written by a newer GradSentinel"),
        (json.dumps({**GOOD, "schema": None}), "no schema version"),
        (json.dumps({key: value for key, value in GOOD.items() if key != "kind"}), "not a complete incident"),
        (json.dumps({**GOOD, "kind": "sunspots"}), "not a complete incident"),
        (json.dumps({**GOOD, "parameters": [{}]}), "not a complete incident"),
        (json.dumps({"schema": 1}), "not a complete incident"),
        (json.dumps(GOOD)[:-20], "truncated or not JSON"),
        ("", "truncated or not JSON"),
        ("[]", "it holds a list"),
        ("null", "it holds a NoneType"),
    ],
    ids=[
        "newer",
        "no schema",
        "a part missing",
        "unknown kind",
        "a part empty",
        "almost nothing",
        "cut",
        "empty",
        "list",
        "null",
    ],
)
def test_an_incident_that_cannot_be_used_says_why(content, words, run_dir):
    directory = RunDirectory(run_dir)
    directory.write_incident(incident(1))
    path = directory.incidents / "000001-custom" / "incident.json"
    path.write_text(content)
    with pytest.raises(StoreError, match=words) as caught:
        read_incident(path.parent)
    assert str(path) in str(caught.value)
    with pytest.raises(StoreError, match=words):
        directory.read_incidents()


def test_an_incident_may_be_named_by_its_directory_or_its_file(run_dir):
    directory, entry = RunDirectory(run_dir), incident(2)
    where = directory.write_incident(entry)
    assert read_incident(where) == read_incident(where / "incident.json") == entry
    with pytest.raises(StoreError, match="does not exist"):
        read_incident(run_dir / "nowhere")
    (where / "incident.json").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(StoreError, match=r"incident\.json"):
        read_incident(where)


# -- the directory itself --------------------------------------------------------------------------


def test_a_file_is_no_run_directory(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(StoreError, match="is a file; give a directory"):
        RunDirectory(path)


def test_a_directory_that_is_not_there_is_not_made_by_reading(run_dir):
    with pytest.raises(StoreError, match="does not exist"):
        RunDirectory(run_dir).read_incidents()
    assert not run_dir.exists()


def test_another_directory_is_no_run_directory(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(StoreError, match="is not a run directory"):
        RunDirectory(tmp_path).read_incidents()


def test_a_run_without_incidents(log):
    assert RunDirectory(log.parent).read_incidents() == []


# -- whole runs ------------------------------------------------------------------------------------


def test_what_a_run_leaves(run_dir):
    run = build()
    with (
        run.sentinel([NanCallback(), Skip(max_skips=1)], run_dir=run_dir) as sentinel,
        pytest.raises(TrainingAborted),
    ):
        finish(train_watched(run, sentinel, make_batches(6), spoil=Spoiler("loss", frozenset({1, 3}))))
    directory = RunDirectory(run_dir)
    assert [entry.as_dict() for entry in directory.read_incidents()] == [
        entry.as_dict() for entry in sentinel.incidents
    ]
    told = [(event["event"], event["step"]) for event in directory.read_events()]
    assert told[0] == ("run_start", 0)
    assert [entry for entry in told if entry[0] == "incident"] == [("incident", 1), ("incident", 3)]
    assert told[-1] == ("run_end", 3)


def test_a_healthy_run_without_a_name_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = build()
    with run.sentinel([NanCallback()]) as sentinel:
        finish(train_watched(run, sentinel, make_batches(3)))
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_name_is_kept_when_there_is_something_to_keep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = build()
    with run.sentinel([NanCallback()]) as sentinel:
        finish(train_watched(run, sentinel, make_batches(3), spoil=Spoiler("loss", frozenset({1}))))
    (directory,) = (tmp_path / "gradsentinel-runs").iterdir()
    assert directory == Path.cwd() / sentinel.run_dir
    assert len(RunDirectory(directory).read_incidents()) == 1
    assert next(RunDirectory(directory).read_events())["event"] == "run_start"


@pytest.mark.expects_swallowed
def test_a_directory_that_cannot_be_made_does_not_stop_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    run = build()
    with run.sentinel([NanCallback()], run_dir=tmp_path / "file" / "run") as sentinel:
        finish(train_watched(run, sentinel, make_batches(3), spoil=Spoiler("loss", frozenset({1}))))
    assert sentinel.applied_steps == 2
    assert "could not be written" in caplog.text


@pytest.mark.expects_swallowed
def test_a_disk_that_fails_does_not_stop_the_run(run_dir, monkeypatch, caplog):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    run = build()
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        monkeypatch.setattr(os, "fsync", fail)
        monkeypatch.setattr(os, "write", fail)
        finish(train_watched(run, sentinel, make_batches(4), spoil=Spoiler("loss", frozenset({1}))))
        monkeypatch.undo()
    assert sentinel.applied_steps == 3
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
    assert "could not be written: " in caplog.text
