"""One frame of `gradsentinel watch`, and what draws it."""

import io
import json
import os
import re

import pytest
import runs_on_disk as disk
from rich.console import Console

from gradsentinel.decision import Severity
from gradsentinel.incident import Outcome
from gradsentinel.ranks.topology import Rank
from gradsentinel.views import live
from gradsentinel.views.history import History
from gradsentinel.views.run_files import RunFiles
from gradsentinel.views.sparkline import mark_line, sparkline

NASTY = "a[red]b\x1b[31mc\x1b]0;t\x07<script>"
CROSS = "\u00d7"
LITERAL = "a[red]b\\x1b[31mc\\x1b]0;t\\x07<script>"


def drawn(run_dir, *, width=120, height=None, colour=False, ascii_only=False, run=None, pace=None):
    run = run or RunFiles(run_dir, "run")
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        markup=False,
        highlight=False,
        force_terminal=colour,
        color_system="standard" if colour else None,
    )
    with run.looked_at():
        console.print(live.frame(run, pace or live.Pace(), width=width, height=height, ascii_only=ascii_only))
    return out.getvalue()


def test_a_frame_says_what_there_is_to_know(run_dir):
    disk.train(run_dir, steps=60, bad={20, 41})
    text = drawn(run_dir)
    assert " ended " in text
    assert str(run_dir) in text
    assert re.search(r"^step +60 60 attempted, 2 lost \(96.67% useful\)", text, re.MULTILINE)
    assert re.search(r"^loss +[\d.]+ \S{50,}$", text, re.MULTILINE)
    assert "2 incidents" in text
    assert text.index("000041-") < text.index("000020-")  # the newest first
    assert re.search(r"Skip +[█░]{10} +8 of 10 +200 steps", text)


def test_a_gradient_that_is_nan_is_a_cross_and_has_a_mark_below(run_dir):
    disk.write_steps(run_dir, [1.0] * 10 + ["nan"] + [1.0] * 9)
    disk.write_incident(run_dir, 10)
    lines = drawn(run_dir).splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("loss"))
    assert lines[place].index(CROSS) == lines[place + 2].index("▲")


def test_many_ranks_are_folded(run_dir):
    for rank in range(96):
        disk.append(run_dir / f"events-rank{rank}.jsonl", disk.start(rank, world_size=128))
    disk.write_incident(run_dir, 3, ranks=[Rank(rank=n, host="h", device="d") for n in range(64)])
    text = drawn(run_dir)
    assert "ranks 0-95 of 128 on 12 hosts" in text
    disk.append(run_dir / "events-rank96.jsonl", disk.start(96, world_size=97))
    assert len(text.splitlines()) < 30


def test_a_log_that_grows_is_replaced_or_appears_is_followed(run_dir):
    run, pace = None, live.Pace()
    run_dir.mkdir()
    run = RunFiles(run_dir, "run")
    assert "Waiting for a run to begin" in drawn(run_dir, run=run, pace=pace)
    log = disk.write_steps(run_dir, [1.0] * 5)
    assert re.search(r"^step +4 5 attempted", drawn(run_dir, run=run, pace=pace), re.MULTILINE)
    disk.append(log, disk.step(5, 3.25))
    assert "3.25" in drawn(run_dir, run=run, pace=pace)
    log.rename(run_dir / "events-rank0.jsonl.1")
    disk.write_steps(run_dir, [7.5] * 3)
    text = drawn(run_dir, run=run, pace=pace)
    assert "7.5" in text
    assert re.search(r"^step +2 3 attempted", text, re.MULTILINE)
    disk.append(run_dir / "events-rank1.jsonl", disk.start(1, world_size=2))
    disk.append(log, disk.start(0, world_size=2))
    assert "all 2 ranks" in drawn(run_dir, run=run, pace=pace)


def test_half_a_line_is_waited_for_and_a_damaged_one_said(run_dir):
    log = disk.write_steps(run_dir, [1.0, 2.0])
    run = RunFiles(run_dir, "run")
    line = json.dumps({"schema": 1, "time": disk.TIME, **disk.step(2, 9.5)})
    with log.open("a") as file:
        file.write(line[:40])
    assert "9.5" not in drawn(run_dir, run=run)
    with log.open("a") as file:
        file.write(line[40:] + "\nnot json\n")
    text = drawn(run_dir, run=run)
    assert "9.5" in text
    assert "! 1 line of the event log cannot be read" in text


def test_why_a_run_was_stopped_is_shown(run_dir):
    log = disk.write_steps(run_dir, [1.0])
    disk.append(log, {"event": "run_end", "step": 1, "error": f"TrainingAborted: {NASTY}"})
    text = drawn(run_dir)
    assert " aborted " in text
    assert f"TrainingAborted: {LITERAL}" in text


def test_a_run_that_says_nothing_any_more_is_pointed_out(run_dir):
    log = disk.write_steps(run_dir, [1.0])
    os.utime(log, (1e9, 1e9))
    assert " unknown " in drawn(run_dir)
    assert re.search(r"last sign of life \d+ d \d+ h ago", drawn(run_dir))


@pytest.mark.parametrize("colour", [False, True])
def test_nothing_from_a_file_is_obeyed_by_the_terminal(run_dir, colour):
    log = run_dir / "events-rank0.jsonl"
    disk.append(log, {**disk.start(0, host=NASTY), "version": NASTY}, disk.step(0))
    disk.append(
        log,
        {"event": "budgets", "step": 0, "budgets": [{"name": NASTY, "limit": 3, "window": 5, "spent": []}]},
    )
    disk.append(log, {"event": "run_end", "step": 1, "error": NASTY})
    disk.write_incident(run_dir, 0, tensors=[NASTY], message=NASTY)
    (run_dir / "incidents" / NASTY.replace("/", "")).mkdir()
    text = drawn(run_dir, width=300, colour=colour)
    assert text.count(LITERAL) >= 5
    if colour:
        assert "\x1b" not in re.sub(r"\x1b\[[\d;]*m", "", text)
    assert all(character.isprintable() or character in "\n\x1b" for character in text)


@pytest.mark.parametrize(("width", "height"), [(20, 10), (40, 12), (60, 20), (80, 24), (120, 36), (200, 60)])
def test_a_frame_fits_the_terminal(run_dir, width, height):
    disk.write_steps(run_dir, [float(n % 7 + 1) for n in range(500)])
    for at in range(0, 500, 10):
        severity = Severity.CRITICAL if at % 20 else Severity.WARNING
        disk.write_incident(run_dir, at, severity=severity, outcome=Outcome.ROLLED_BACK)
    lines = drawn(run_dir, width=width, height=height).splitlines()
    assert max(map(len, lines)) <= width
    if width >= 80:
        assert len(lines) <= height


def test_ascii_only_is_ascii(run_dir):
    disk.write_steps(run_dir, [1.0, 2.0, "inf", 4.0])
    text = drawn(run_dir, ascii_only=True)
    assert re.search(r"^loss +4 [_.\-:=+*#]{2}x# *$", text, re.MULTILINE)
    assert text.isascii()


# -- what it is made of ----------------------------------------------------------------------------------


def test_heights_are_of_the_largest_and_logarithmic_where_they_differ_much():
    assert sparkline([[0, 0, 0, 0], [1, 0, 7, 0], [2, 3, 4, 3]]).plain == "▁█▅"
    assert sparkline([[n, 1, 10.0**n, 1] for n in range(8)]).plain == "▁▂▃▄▅▆▇█"
    assert sparkline([[0, 5, 5, 5], [1, 5, 5, 5]]).plain == "▁▁"
    assert sparkline([[0, "nan", "nan", "nan"], [1, 1, 2, 2, ["inf"]]]).plain == CROSS * 2
    assert sparkline([]).plain == ""
    assert sparkline([[0, -1e308, -1e308, 0], [1, 1e308, 1e308, 0]]).plain == "▁▁"


def test_the_gravest_of_several_incidents_in_one_place_gives_the_colour():
    marks = [
        {"iteration": 3, "severity": "critical"},
        {"iteration": 4, "severity": "warning"},
        {"iteration": 99, "severity": "error"},
        {"iteration": 0, "severity": None},
    ]
    line = mark_line([[0], [5], [10]], marks, live.SEVERITIES)
    assert line.plain == " ▲▲"
    assert [span.style for span in line.spans if span.style] == ["bold red", "red"]


def at(seconds):
    return f"2026-01-31T08:{seconds // 60:02d}:{seconds % 60:02d}Z"


def test_the_pace_is_that_of_the_last_minute():
    history, pace = History.of(None, "x"), live.Pace(window=60)
    history._take({"event": "run_start", "step": 0, "iteration": 0, "time": at(0)})
    assert pace.look(history) is None
    for second in range(0, 300, 10):
        x = second * 2 if second < 200 else 400 + (second - 200) // 2
        history._take({**disk.step(x), "time": at(second)})
        rate = pace.look(history)
        if second in {10, 100, 190}:
            assert rate == pytest.approx(2.0)
    assert rate == pytest.approx(0.5)


def test_spans_of_time():
    assert [live._span(s) for s in (-1, 0.9, 59, 185, 9600, 442_800)] == [
        *("0 s", "0 s", "59 s", "3 min 5 s", "2 h 40 min", "5 d 3 h")
    ]
