"""The event log: what is new is read once, and whatever was done to the file is survived."""

import json

from runs_on_disk import append, start, step, write_steps

from gradsentinel.views.event_lines import EventLines
from gradsentinel.views.files import Files
from gradsentinel.views.history import History


def history(run_dir):
    return History.of(Files(run_dir), "events-rank0.jsonl")


def losses(found):
    return [point[3] for point in found.series["loss"].points(0, 10**9, 10**6)]


def test_only_what_is_new_is_read(tmp_path):
    path = write_steps(tmp_path, [1.0, 2.0])
    lines = EventLines(Files(tmp_path), path.name)
    assert [entry["event"] for entry in lines.new()] == ["run_start", "step", "step"]
    assert list(lines.new()) == []
    append(path, step(2, 3.0))
    assert [entry["loss"] for entry in lines.new()] == [3.0]


def test_a_line_counts_when_it_is_complete(tmp_path):
    path = write_steps(tmp_path, [1.0])
    found = history(tmp_path)
    found.refresh()
    text = json.dumps({"schema": 1, **step(1, "nan")}) + "\n"
    for part in (text[:9], text[9:-1]):
        with path.open("a") as file:
            file.write(part)
        found.refresh()
        assert losses(found) == [1.0]
    with path.open("a") as file:
        file.write(text[-1])
    found.refresh()
    assert losses(found) == [1.0, "nan"]
    assert found.lines.damaged == 0


def test_damaged_lines_are_counted_and_the_rest_is_read(tmp_path):
    path = write_steps(tmp_path, [1.0])
    with path.open("ab") as file:
        file.write(b'{"schema": 1, "event": "st\n\xff\xfe\n[1, 2]\n{"event": "step"}\n\n')
    append(path, {**step(1, 5.0), "schema": 99}, step(2, 7.0))
    found = history(tmp_path)
    found.refresh()
    assert losses(found) == [1.0, 7.0]
    assert (found.lines.damaged, found.lines.too_new) == (4, 1)


def test_values_of_any_kind_are_survived(tmp_path):
    path = write_steps(tmp_path, [1.0])
    odd = [None, [], {}, "x", True, 10**400, -1]
    for name in (
        "step",
        "iteration",
        "loss",
        "grad_norm",
        "learning_rates",
        "before",
        "time",
        "event",
        "id",
        "applied",
    ):
        append(path, *({**step(1), name: value} for value in odd))
        append(path, *({**start(), name: value} for value in odd))
        append(path, *({"event": "incident", "step": 1, "id": "a", name: value} for value in odd))
        append(path, *({"event": "run_end", "step": 1, "error": None, name: value} for value in odd))
    append(path, *({"event": "budgets", "budgets": value} for value in odd))
    append(path, *({"event": "snapshots", "good": value} for value in odd))
    append(path, {**step(9), "before": {"iterations": [1, None, "x"], "loss": [1.0], "grad_norm": "no"}})
    found = history(tmp_path)
    found.refresh()
    assert found.lines.damaged == 0
    assert losses(found)[0] == 1.0


def test_a_file_that_became_shorter_is_read_anew(tmp_path):
    path = write_steps(tmp_path, [1.0, 2.0, 3.0])
    found = history(tmp_path)
    found.refresh()
    path.unlink()
    write_steps(tmp_path, [4.0])
    found.refresh()
    assert losses(found) == [4.0]
    assert len(found.starts) == 1


def test_a_large_log_is_read_in_slices(tmp_path):
    write_steps(tmp_path, [float(number) for number in range(20_000)])
    found = history(tmp_path)
    found.refresh(patience=0.0)
    first = found.lines.share
    assert 0.0 < first < 1.0
    while found.lines.share < 1.0:
        found.refresh(patience=0.0)
    assert losses(found) == [float(number) for number in range(20_000)]


def test_the_steps_between_two_lines_are_there_too(tmp_path):
    before = {"iterations": [1, 2], "loss": [5.0, "inf"], "grad_norm": [0.5, None]}
    append(tmp_path / "events-rank0.jsonl", start(), step(0, 9.0), {**step(3, 4.0), "before": before})
    found = history(tmp_path)
    found.refresh()
    assert losses(found) == [9.0, 5.0, "inf", 4.0]
    assert list(found.series["grad_norm"].x) == [0, 1, 3]


def test_the_axis_never_goes_back_over_restarts(tmp_path):
    path = write_steps(tmp_path, [1.0, 2.0, 3.0])
    append(path, {"event": "incident", "step": 2, "iteration": 2, "id": "first"})
    append(path, start(step=1, iteration=1), step(1, 20.0), step(2, 30.0))
    append(path, {"event": "incident", "step": 2, "iteration": 2, "id": "second"})
    found = history(tmp_path)
    found.refresh()
    assert losses(found) == [1.0, 2.0, 3.0, 20.0, 30.0]
    assert list(found.series["loss"].x) == [0, 1, 2, 3, 4]
    assert [one.x for one in found.starts] == [0, 3]
    assert {name: known["x"] for name, known in found.incidents.items()} == {"first": 2, "second": 4}
    assert found.attempted == 5


def test_a_rollback_does_not_move_the_axis(tmp_path):
    lines = [step(number, iteration=iteration) for iteration, number in enumerate([0, 1, 2, 1, 2, 3])]
    append(tmp_path / "events-rank0.jsonl", start(), *lines)
    found = history(tmp_path)
    found.refresh()
    assert list(found.series["loss"].x) == list(range(6))
    assert (found.step, found.attempted) == (3, 6)


def test_a_start_whose_state_is_restored_later_is_where_its_first_step_is(tmp_path):
    path = write_steps(tmp_path, [1.0] * 9)
    before = {"iterations": [9, 10], "loss": [1.0, 1.0], "grad_norm": [1.0, 1.0]}
    append(
        path, start(step=0, iteration=9), {**step(7, iteration=11), "before": before}, step(8, iteration=12)
    )
    found = history(tmp_path)
    found.refresh()
    assert [(one.x, one.step) for one in found.starts] == [(0, 0), (9, 5)]
