"""Alerts arrive, are few, never hold up training, and tell no secret."""

import json
import logging
import socket
import sys
import threading
from contextlib import suppress

import pytest
import torch
from alert_server import alert_server
from torch import nn

from gradsentinel import (
    ConfigurationError,
    NanCallback,
    Notify,
    Sentinel,
    Skip,
    TensorBoardCallback,
    TrainingAborted,
)
from gradsentinel.callbacks import alert_delivery
from gradsentinel.callbacks.alert import Allowance
from gradsentinel.callbacks.alert_delivery import DeliveryError, Post, without_addresses
from gradsentinel.sinks.outbox import Outbox

SECRETS = ("secret-path", "hidden", "hunter2", "Bearer-of-bad-news")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(alert_delivery, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(alert_delivery, "_HURRIED_WAIT", 0.01)


def train(run_dir, *callbacks, steps=12, bad=(), drops=2, fail_at=None):
    """In a bad step the loss is NaN; more than `drops` of them end the run."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    base = [NanCallback(), Skip(max_skips=drops)]
    with Sentinel(model, optimizer, callbacks=[*base, *callbacks], run_dir=run_dir) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(steps)])):
            if number == fail_at:
                raise ValueError("the \x1b[31m[red] loader broke")
            sentinel.backward(model(batch).square().mean() * (float("nan") if number in bad else 1.0))
            sentinel.step(max_norm=1.0)
    return model.weight.detach().clone(), sentinel


def collected(**settings):
    found = []
    return found, Notify(fn=found.append, patience=30, **settings)


# -- what is told --------------------------------------------------------------------------------------


def test_the_alert_says_everything_that_is_documented(run_dir):
    found, notify = collected(on="warning", report="https://ci.example/{run}/{id}.html")
    _, sentinel = train(run_dir, notify, bad={3})
    (alert,) = found
    incident = sentinel.incidents[0]
    assert set(alert) == {
        *("schema", "event", "run", "run_dir", "host", "world_size", "step", "iteration", "time", "id"),
        *("severity", "kind", "cause", "confidence", "where", "who", "action", "outcome", "message"),
        *("recovery", "evidence", "remedy", "repeats", "report", "command", "text"),
    }
    assert alert["schema"] == 1
    assert (alert["event"], alert["step"], alert["kind"]) == ("incident", 3, "nonfinite_loss")
    assert (alert["action"], alert["outcome"], alert["severity"]) == ("skip", "skipped", "warning")
    assert alert["cause"] == incident.diagnosis.cause
    assert alert["run_dir"] == str(run_dir)
    assert alert["report"] == f"https://ci.example/run/{incident.id}.html"
    assert alert["command"] == f"gradsentinel show {run_dir} {incident.id}"
    assert alert["text"].startswith("[warning] run step 3: ")
    json.dumps(alert, allow_nan=False)


@pytest.mark.parametrize(("on", "told"), [("warning", 3), ("error", 1), ("critical", 1)])
def test_only_what_is_bad_enough_is_told_and_an_abort_always(on, told, run_dir):
    found, notify = collected(on=on)
    with pytest.raises(TrainingAborted):
        train(run_dir, notify, bad={2, 5, 8})
    assert len([alert for alert in found if alert["outcome"] == "aborted"]) == 1
    assert len(found) >= told
    order = ("warning", "error", "critical")
    assert all(order.index(alert["severity"]) >= order.index(on) for alert in found)


def test_a_run_that_ends_by_its_own_exception_is_told(run_dir):
    found, notify = collected()
    with pytest.raises(ValueError, match="loader"):
        train(run_dir, notify, fail_at=4)
    (alert,) = found
    assert (alert["event"], alert["kind"], alert["severity"]) == ("run_failed", "run_failed", "critical")
    assert alert["message"] == "ValueError: the \\x1b[31m[red] loader broke"
    assert alert["step"] == 4


def test_a_healthy_run_and_ctrl_c_tell_nothing(run_dir):
    found, notify = collected(on="warning")
    train(run_dir, notify)
    assert found == []
    found, notify = collected(on="warning")
    model = nn.Linear(2, 1)
    with (
        suppress(KeyboardInterrupt),
        Sentinel(model, torch.optim.SGD(model.parameters(), 0.1), callbacks=[notify], run_dir=run_dir / "b"),
    ):
        raise KeyboardInterrupt
    assert found == []


def test_training_is_bit_identical_with_alerts(run_dir):
    plain, _ = train(run_dir / "a", bad={2})
    with alert_server(500, 200) as server:
        told, _ = train(run_dir / "b", Notify(on="warning", url=server.url, patience=30), bad={2})
    assert torch.equal(plain, told)
    assert len(server.bodies) == 2


def test_another_body_for_another_service(run_dir):
    found = []
    shape = lambda alert: {"msg_type": "text", "content": {"text": alert["text"]}}  # noqa: E731
    train(run_dir, Notify(on="warning", fn=found.append, shape=shape, patience=30), bad={1})
    assert found[0]["content"]["text"].startswith("[warning] run step 1")


# -- how many ------------------------------------------------------------------------------------------


def test_what_happens_again_and_again_is_folded(run_dir):
    found, notify = collected(on="warning", burst=2, per_hour=0.001)
    train(run_dir, notify, steps=30, bad=set(range(2, 20, 2)), drops=20)
    assert [(alert["step"], alert["repeats"]) for alert in found] == [(2, 0), (4, 0), (18, 6)]
    assert found[-1]["text"].endswith("(6 more like this)")


def test_an_abort_is_told_though_the_allowance_is_used_up_and_says_what_was_held_back(run_dir):
    found, notify = collected(on="warning", burst=1, per_hour=0.001)
    with pytest.raises(TrainingAborted):
        train(run_dir, notify, bad={2, 4, 6}, drops=2)
    assert [(alert["outcome"], alert["repeats"]) for alert in found] == [("skipped", 0), ("aborted", 1)]


def test_the_bucket_fills_again_and_each_kind_has_its_own():
    now = [0.0]
    allowance = Allowance(burst=2, per_hour=60.0, clock=lambda: now[0])
    assert [allowance.take("a") for _ in range(3)] == [True, True, False]
    assert allowance.take("b")
    now[0] = 59.0
    assert not allowance.take("a")
    now[0] = 61.0
    assert [allowance.take("a") for _ in range(2)] == [True, False]
    now[0] = 1e6
    assert [allowance.take("a") for _ in range(3)] == [True, True, False]


# -- servers that misbehave ----------------------------------------------------------------------------


def deliver(server, *, retries=4, timeout=5.0, headers=None):
    Post(server.url, headers or {}, timeout, retries).deliver({"n": 1}, threading.Event())


def test_a_post_is_json_with_our_headers():
    with alert_server() as server:
        deliver(server, headers={"Authorization": "Bearer hunter2"})
    ((path, headers),) = server.requests
    assert path == "/secret-path?token=hidden"
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Bearer hunter2"
    assert server.bodies == [{"n": 1}]


def test_name_and_password_of_an_address_become_a_header():
    with alert_server() as server:
        url = server.url.replace("127.0.0.1", "me:hunter2%21@127.0.0.1")
        post = Post(url, {}, 5.0, 0)
        post.deliver({}, threading.Event())
    assert server.requests[0][1]["Authorization"] == "Basic bWU6aHVudGVyMiE="
    assert post.target == f"http://127.0.0.1:{server.port}"


@pytest.mark.parametrize("name", ["Authorization", "authorization"])
def test_two_passwords_for_one_address_are_refused(name):
    with pytest.raises(ConfigurationError, match="give one of the two") as refused:
        Notify(url="https://me:hunter2@host/path", headers={name: "Bearer hunter3"})
    assert "hunter" not in str(refused.value)


def test_a_failed_delivery_is_told_as_a_sentence():
    assert without_addresses(DeliveryError("http://host:8080: it answered 500")) == (
        "http://host:8080: it answered 500"
    )


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_what_may_pass_is_tried_again(status):
    with alert_server(status, status, 204) as server:
        deliver(server)
    assert len(server.bodies) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 301, 307])
def test_what_will_not_pass_is_not_tried_again_and_no_redirection_followed(status):
    with alert_server() as other, alert_server(status, headers={"Location": other.url}) as server:
        with pytest.raises(DeliveryError, match=f"127.0.0.1:{server.port}: it answered {status}") as failed:
            deliver(server)
        assert len(server.bodies) == 1
        assert other.requests == []
    assert not any(secret in str(failed.value) for secret in SECRETS)


def test_it_gives_up_in_the_end():
    with alert_server(500) as server:
        with pytest.raises(DeliveryError, match="it answered 500"):
            deliver(server, retries=2)
        assert len(server.bodies) == 3


def test_a_server_that_hangs_is_left_after_the_timeout():
    with alert_server("hang") as server:
        with pytest.raises(DeliveryError, match="no answer in time"):
            deliver(server, retries=1, timeout=0.2)
        assert len(server.bodies) == 2


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DeliveryError, match="refused"):
        Post(f"http://127.0.0.1:{port}/secret-path", {}, 1.0, 1).deliver({}, threading.Event())


def test_a_server_that_hangs_holds_up_no_step_and_the_abort_but_briefly(run_dir, caplog):
    """The server answers nothing before the test is over: were a step to wait for it, this would not end."""
    with alert_server("hang") as server:
        notify = Notify(on="warning", url=server.url, timeout=60, patience=0.2)
        with pytest.raises(TrainingAborted):
            train(run_dir, notify, bad={2, 4, 6})
        server.wait_for(1)
    assert "alerts were not sent" in caplog.text


def test_a_full_queue_drops_the_oldest_and_counts():
    gate, seen = threading.Event(), []

    def work(thing):
        gate.wait(30)
        seen.append(thing)

    outbox = Outbox("test", work, most=3)
    outbox.put("first")
    while outbox._waiting:  # until the thread has taken it
        outbox.wait(0.01)
    for thing in range(5):
        outbox.put(thing)
    outbox.put("urgent", first=True)
    gate.set()
    assert outbox.close(30) == 0
    assert seen == ["first", "urgent", 3, 4]
    assert outbox.dropped == 3


# -- commands and functions ----------------------------------------------------------------------------


def test_a_command_gets_the_alert_on_its_standard_input_and_no_shell(run_dir, tmp_path):
    place = tmp_path / "it's $(here); ok"
    code = f"import sys; open({str(place)!r}, 'w').write(sys.stdin.read())"
    train(
        run_dir, Notify(on="warning", command=[sys.executable, "-c", code], timeout=60, patience=60), bad={1}
    )
    assert json.loads(place.read_text())["step"] == 1


def test_a_command_that_fails_or_hangs_is_logged_without_its_arguments(run_dir, caplog):
    for code, why in (
        ("raise SystemExit(7)", "exit code 7"),
        ("import time; time.sleep(60)", "killed after"),
    ):
        command = [sys.executable, "-c", f"{code} # hunter2"]
        timeout = 60 if "Exit" in code else 0.5
        train(run_dir / why[0], Notify(on="warning", command=command, timeout=timeout, patience=60), bad={1})
        assert why in caplog.text
    assert not any(secret in caplog.text for secret in SECRETS)


def test_a_function_that_raises_is_logged_and_the_next_alert_follows(run_dir, caplog):
    found = []

    def broken(alert):
        found.append(alert["step"])
        raise RuntimeError("Max retries exceeded with url: /services/hunter2 (https://h.example/secret-path)")

    train(run_dir, Notify(on="warning", fn=broken, patience=30), bad={1, 3})
    assert found == [1, 3]
    assert "broken: RuntimeError: Max retries exceeded with url: ..." in caplog.text
    assert not any(secret in caplog.text for secret in SECRETS)


# -- secrets -------------------------------------------------------------------------------------------


def test_secrets_are_nowhere(run_dir, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    with alert_server(403) as server:
        url = server.url.replace("127.0.0.1", "me:hunter2@127.0.0.1")
        notify = Notify(on="warning", url=url, headers={"X-Key": "Bearer-of-bad-news"}, patience=30)
        train(run_dir, notify, TensorBoardCallback(), bad={1})
        assert server.bodies
    written = [path.read_bytes() for path in run_dir.rglob("*") if path.is_file()]
    said = "".join([repr(notify), caplog.text, *capfd.readouterr()]).encode()
    assert b"it answered 403" in said
    log = (run_dir / "events-rank0.jsonl").read_text()
    assert '"alert_failed"' in log
    for secret in SECRETS:
        assert all(secret.encode() not in text for text in [said, *written])


def test_addresses_in_messages_are_cut():
    error = ValueError("POST https://me:hunter2@h.example/secret-path?x=hidden failed; url: /secret-path")
    assert without_addresses(error) == "ValueError: POST https://... failed; url: ..."


# -- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "one of url=, command= and fn=, not none"),
        ({"url": "http://a", "fn": print}, "not url and fn"),
        ({"fn": print, "on": "loud"}, "on='loud' is no severity"),
        ({"fn": "print"}, "fn= must be a function"),
        ({"fn": print, "burst": 0}, "burst=0"),
        ({"fn": print, "timeout": 0}, "timeout=0"),
        ({"fn": print, "headers": {"a": "b"}}, "headers= go with url="),
        ({"command": ""}, "command= is empty"),
        ({"command": "no-such-program-here --token hunter2"}, "no program no-such-program-here"),
        ({"url": "ftp://hunter2"}, "url= must be an address"),
        ({"url": "https://h:hunter2/secret-path"}, "url= must be an address"),
        ({"url": "https://h/hidden\r\nX: y"}, "url= must be an address"),
        ({"url": "https://h", "headers": {"X": "hunter2\nY: z"}}, "the value of X"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_without_telling_a_secret(settings, complaint):
    with pytest.raises(ConfigurationError, match=complaint) as refused:
        Notify(**settings)
    assert not any(secret in str(refused.value) for secret in SECRETS)
