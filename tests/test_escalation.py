"""Budgets over all the processes of a run: what is used up is not used again, and a crash loop ends."""

import json

import pytest
import torch

from gradsentinel import (
    Action,
    BeforeClip,
    ConfigurationError,
    Escalation,
    Finding,
    Kind,
    NanCallback,
    Rollback,
    Severity,
    Skip,
    TrainingAborted,
)
from gradsentinel.evidence import Evidence
from loops import Spoiler, build, finish, make_batches, train_watched


def train(run_dir, callbacks, *, bad=(), count=12, **settings):
    """One process's life; returns its sentinel and why it ended."""
    run = build()
    error = None
    sentinel = run.sentinel([NanCallback(), *callbacks], run_dir=run_dir, **settings)
    try:
        with sentinel:
            finish(train_watched(run, sentinel, make_batches(count), spoil=Spoiler("loss", frozenset(bad))))
    except TrainingAborted as aborted:
        error = aborted
    return sentinel, error


def outcomes(sentinel):
    return [str(incident.outcome) for incident in sentinel.incidents]


def account(run_dir):
    return json.loads((run_dir / "escalation.json").read_text())


# -- budgets ---------------------------------------------------------------------------------------


def test_used_up_skips_become_rollbacks_and_used_up_rollbacks_the_end(run_dir):
    callbacks = [Rollback(every=2, confirm_after=0), Escalation(max_skips=1, max_rollbacks=1)]
    sentinel, error = train(run_dir, callbacks, bad={2, 5, 8})
    assert outcomes(sentinel) == ["skipped", "rolled_back", "aborted"]
    assert "the budget of 1 dropped steps in 10000 steps, over all restarts, is used up" in str(error)
    assert "the budget of 1 rollbacks in 10000 steps, over all restarts, is used up" in str(error)


def test_what_was_spent_before_a_restart_stays_spent(run_dir):
    for life in range(3):
        sentinel, error = train(run_dir, [Escalation(max_skips=2)], bad={3})
        if life < 2:
            assert (outcomes(sentinel), error) == (["skipped"], None)
    assert outcomes(sentinel) == ["aborted"]
    assert "over all restarts" in str(error)


@pytest.mark.slow
def test_what_was_spent_long_ago_is_forgotten(run_dir):
    for life in range(6):
        sentinel, error = train(run_dir, [Escalation(max_skips=1, window=12)], bad={3 + life})
        assert (outcomes(sentinel), error) == (["skipped"], None)
    for _ in range(2):
        sentinel, error = train(run_dir, [Escalation(max_skips=1, window=13)], bad={3})
    assert outcomes(sentinel) == ["aborted"]


def test_the_window_counts_the_steps_of_all_processes(run_dir):
    train(run_dir, [Escalation()], count=12)
    train(run_dir, [Escalation()], count=5, bad={1})
    assert account(run_dir)["attempted"] == 12 + 5
    assert account(run_dir)["skip"] == [12 + 1]


def test_retries_cost_nothing_of_it(run_dir):
    sentinel, error = train(run_dir, [Escalation(max_skips=0, max_rollbacks=0)], count=5)
    assert (outcomes(sentinel), error) == ([], None)


# -- crash loops -----------------------------------------------------------------------------------


def crash(run_dir, callbacks, *, after, resume="auto", error=RuntimeError, bad=()):
    """A life that ends by an exception of the program after so many steps."""
    run = build()
    with run.sentinel([NanCallback(), *callbacks], run_dir=run_dir, resume=resume) as sentinel:
        first = sentinel.step_count
        spoiler = Spoiler("loss", frozenset(number - first for number in bad))
        steps = train_watched(run, sentinel, make_batches(1000), spoil=spoiler)
        for number, _ in enumerate(steps, start=1):
            if number == after:
                raise error("the device is gone")
    return first


def test_a_crash_loop_ends(run_dir):
    """The run gets to step 6 again and again, and never further."""
    for _ in range(4):
        with pytest.raises(RuntimeError, match="the device is gone"):
            crash(run_dir, [Rollback(every=6, confirm_after=1, on_disk=1), Escalation()], after=5)
    with pytest.raises(TrainingAborted, match="restarted 4 times without getting further than step 0") as end:
        crash(run_dir, [Rollback(every=6, confirm_after=1, on_disk=1), Escalation()], after=5)
    assert end.value.exit_code == 75
    with pytest.raises(TrainingAborted, match="restarted 5 times"):
        crash(run_dir, [Escalation()], after=5)
    (run_dir / "escalation.json").unlink()
    with pytest.raises(RuntimeError, match="the device is gone"):
        crash(run_dir, [Escalation()], after=5)


def test_a_job_that_is_ended_again_and_again_but_gets_further_goes_on(run_dir):
    for life in range(8):
        with pytest.raises(RuntimeError, match="the device is gone"):
            crash(
                run_dir, [Rollback(every=3, confirm_after=1, on_disk=1), Escalation(max_restarts=0)], after=5
            )
        assert account(run_dir)["restarts"] == 0, life


@pytest.mark.slow
def test_without_resume_a_hundred_steps_are_progress(run_dir):
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the device is gone"):
            crash(run_dir, [Escalation(max_restarts=1)], after=101, resume=None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the device is gone"):
            crash(run_dir, [Escalation(max_restarts=1)], after=99, resume=None)
    with pytest.raises(TrainingAborted, match="restarted 2 times"):
        crash(run_dir, [Escalation(max_restarts=1)], after=99, resume=None)


def test_an_end_that_the_user_wished_is_no_crash(run_dir):
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            crash(run_dir, [Escalation(max_restarts=0)], after=2, error=KeyboardInterrupt)
    for _ in range(3):
        train(run_dir, [Escalation(max_restarts=0)], count=3)
    assert account(run_dir)["restarts"] == 0


def test_an_abort_that_comes_back_ends_too(run_dir):
    """Every life comes to the same fault and aborts there, and then none starts any more."""
    ends = []
    for _ in range(6):
        with pytest.raises(TrainingAborted) as end:
            crash(run_dir, [Skip(max_skips=0), Escalation(max_restarts=2)], after=9, bad={4})
        ends.append(str(end.value))
    # the first restart is from a newer state than the first start, the two after it are from the same
    assert [("restarted" in end) for end in ends] == [False, False, False, False, True, True]
    states = [path.name for path in (run_dir / "snapshots").iterdir()]
    assert states == ["step-000000004-rank0"], "an aborted start must not leave its untrained state"


# -- severity --------------------------------------------------------------------------------------


def test_an_error_has_the_good_state_written_even_if_nobody_asked_for_it(run_dir):
    callbacks = [Rollback(every=2, confirm_after=1, after=9), Escalation()]
    train(run_dir, callbacks, bad={5}, count=7)
    assert not (run_dir / "snapshots").exists(), "one transient fault is no reason"
    train(
        run_dir / "persists", [Rollback(every=2, confirm_after=1, after=9), Escalation()], bad={5, 6}, count=8
    )
    (path,) = (run_dir / "persists" / "snapshots").iterdir()
    assert path.name == "step-000000004-rank0"


class Drift(Finding):
    """Replicas that differ, as a comparer reports them."""


def drifting(run_dir, **settings):
    run = build()
    with run.sentinel(
        [NanCallback(), Rollback(every=2, confirm_after=0), Escalation(**settings)], run_dir=run_dir
    ) as sentinel:
        seen = iter([False] * 3 + [True])
        evidence = Evidence(kind=Kind.RANK_DIVERGENCE, action=Action.SKIP, message="replicas differ")
        sentinel.on(
            BeforeClip,
            lambda event: Finding(
                kind=Kind.RANK_DIVERGENCE,
                value=torch.tensor(next(seen, False)),
                action=Action.SKIP,
                confirm=lambda: evidence,
            ),
        )
        finish(train_watched(run, sentinel, make_batches(6)))
    return sentinel


def test_a_critical_incident_stops_the_run_and_raises_the_alarm(run_dir, caplog):
    told = []
    with pytest.raises(TrainingAborted, match="the incident is critical") as end:
        drifting(run_dir, alarm=told.append)
    assert [(one.severity, str(one.outcome)) for one in told] == [(Severity.CRITICAL, "aborted")]
    assert told[0] is end.value.incident
    assert any(record.levelname == "CRITICAL" for record in caplog.records)


@pytest.mark.parametrize(("critical", "outcome"), [("rollback", "rolled_back"), ("warn", "skipped")])
def test_or_whatever_is_asked_for(run_dir, critical, outcome):
    assert outcomes(drifting(run_dir, critical=critical)) == [outcome]


@pytest.mark.expects_swallowed
def test_an_alarm_that_fails_stops_nothing(run_dir, caplog):
    def alarm(incident):
        raise OSError("no network")

    sentinel = drifting(run_dir, critical="rollback", alarm=alarm)
    assert outcomes(sentinel) == ["rolled_back"]
    assert "the alarm failed" in caplog.text


def test_a_used_up_budget_is_critical(run_dir):
    told = []
    train(run_dir, [Skip(max_skips=0), Escalation(alarm=told.append)], bad={2})
    assert [(one.severity, one.step) for one in told] == [(Severity.CRITICAL, 2)]


# -- the file --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"schema": 1}', b'{"schema": 1, "attempted": "x"}', b"\xff\xfe"]
)
def test_a_broken_file_is_told_and_the_account_begins_anew(run_dir, content, caplog):
    run_dir.mkdir()
    (run_dir / "escalation.json").write_bytes(content)
    sentinel, error = train(run_dir, [Escalation()], bad={2})
    assert (outcomes(sentinel), error) == (["skipped"], None)
    assert "so the budgets begin anew" in caplog.text
    assert account(run_dir)["skip"] == [2]


@pytest.mark.expects_swallowed
def test_a_file_of_a_newer_version_is_not_overwritten(run_dir, caplog):
    run_dir.mkdir()
    (run_dir / "escalation.json").write_text('{"schema": 99}')
    train(run_dir, [Escalation()], bad={2})
    assert "upgrade" in caplog.text
    assert account(run_dir) == {"schema": 99}


def test_a_disk_that_refuses_the_file_stops_nothing(run_dir, caplog, monkeypatch):
    def refuse(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gradsentinel.callbacks.escalation.write_json", refuse)
    sentinel, error = train(run_dir, [Escalation()], bad={2})
    assert (outcomes(sentinel), error) == (["skipped"], None)
    assert "a restart will not know what was spent" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_skips", -1), ("max_rollbacks", -1), ("max_restarts", -1), ("window", 0), ("alarm", 3)],
)
def test_settings_that_cannot_work(name, value):
    with pytest.raises(ConfigurationError, match=name):
        Escalation(**{name: value})


def test_an_action_that_does_not_exist():
    with pytest.raises(ConfigurationError, match="choose one of"):
        Escalation(critical="panic")
