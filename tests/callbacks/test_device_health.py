"""The health of the cards in a run: told in incidents, warned of, and never in the way."""

import json
import logging
import sys
import threading
import types

import pytest
import torch
from torch import nn

from gradsentinel import (
    Action,
    ConfigurationError,
    Detector,
    DeviceHealthCallback,
    Evidence,
    Finding,
    Kind,
    NanCallback,
    Sentinel,
    SnapshotSaver,
)
from gradsentinel.callbacks.silent_check import LOGGER
from gradsentinel.callbacks.suspicion import Seat, Suspicion
from gradsentinel.devices.health import HealthUnavailable, Reading
from gradsentinel.diagnosis.self_test import run_self_test

NAN = float("nan")
CHECKSUM = "[Warning][Rank 0]: The result of Matmul checksum is abnormal!"
SPIKE = "[Warning][2026-01-31 08:15:00] [Rank 0]: feature detection detects abnormal results!"


class Card:
    """A card that answers as it is told, one answer per step: the step waits until it was heard."""

    card = "card 0"

    def __init__(self, *answers):
        self.answers = list(answers)
        self.turn = threading.Semaphore(0)

    def read(self):
        if self.turn is not None:
            self.turn.acquire()
        answer = self.answers.pop(0) if self.answers else HealthUnavailable("the test is over")
        if isinstance(answer, BaseException):
            raise answer
        return Reading(**{"card": self.card, "health": "OK", **answer})

    def answer(self, callback):
        """Have the thread hear the next answer, and wait until it has."""
        heard = callback._poller.count
        self.turn.release()
        for _ in range(60_000):
            if callback._poller.count > heard:
                return
            threading.Event().wait(0.001)
        pytest.fail("the thread did not ask")


def run(folder, *answers, steps=None, bad=(), more=(), every_step=None, **settings):
    """Train for a few steps; the card answers before each of them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    card = Card(*answers)
    settings = {"source": card, "every": 1e-4, **settings}
    health = DeviceHealthCallback(**settings)
    batches = [torch.randn(8, 4) for _ in range(len(answers) if steps is None else steps)]
    with Sentinel(model, optimizer, callbacks=[NanCallback(), health, *more], run_dir=folder) as sentinel:
        for step, batch in enumerate(sentinel.steps(batches)):
            if settings["source"] is card and card.answers:
                card.answer(health)
            if every_step is not None:
                every_step(step)
            loss = model(batch).square().mean()
            sentinel.backward(loss * NAN if step in bad else loss)
            sentinel.step()
        turn, card.turn = card.turn, None
        turn.release()  # the thread must not wait for ever
    return sentinel, health


def told(sentinel, kind=Kind.DEVICE_HEALTH):
    return [(i.step, i.message) for i in sentinel.incidents if i.kind is kind]


# -- warnings ----------------------------------------------------------------------------------------


def test_a_card_that_is_well_is_not_spoken_of(tmp_path):
    well = {"temperature": 61, "power": 300, "counters": {"HBM Double Bit Error Count": 7}}
    sentinel, health = run(tmp_path, *[well] * 5)
    assert sentinel.incidents == ()
    assert len(health.readings()) == 5


def test_a_hot_card_is_told_once_until_it_has_cooled_down(tmp_path):
    answers = [{"temperature": t} for t in (60, 89, 90, 95, 91, 86, 92, 84, 90)]
    sentinel, _ = run(tmp_path, *answers)
    assert [step for step, _ in told(sentinel)] == [2]  # the one in step 8 is the same warning going on
    assert sentinel.incidents[0].details["repeated"] == 1
    assert "90 C, the limit is 90 C" in sentinel.incidents[0].message


@pytest.mark.parametrize(
    ("answer", "limit", "warned"),
    [
        ({"temperature": 85, "hottest": 84}, None, True),
        ({"temperature": 95, "hottest": 100}, None, False),
        ({"temperature": 71}, 70.0, True),
        ({"temperature": 95, "hottest": 84}, 96.0, False),
        ({"temperature": None}, 1.0, False),
    ],
)
def test_the_limit_is_ours_or_the_cards_or_the_usual_one(tmp_path, answer, limit, warned):
    sentinel, _ = run(tmp_path, answer, max_temperature=limit)
    assert bool(told(sentinel)) is warned


def test_a_word_for_bad_health_is_told_when_it_changes(tmp_path):
    words = ("OK", "NA", "Warning", "Warning", "NA", "Alarm", "OK")
    sentinel, _ = run(tmp_path, *[{"health": word} for word in words])
    (incident,) = sentinel.incidents
    assert (incident.step, incident.message) == (2, "card 0: health Warning")
    assert incident.details["repeated"] == 1
    assert incident.details["last_step"] == 5
    assert (incident.action, incident.diagnosis.cause, sentinel.applied) == (Action.WARN, "hardware", True)


def test_errors_that_could_not_be_corrected_are_told_at_once_corrected_ones_in_numbers(tmp_path):
    single, double = "HBM Single Bit Error Count", "HBM Double Bit Error Count"
    counts = [(50, 1), (80, 1), (149, 1), (150, 1), (150, 2)]
    sentinel, _ = run(tmp_path, *[{"counters": {single: s, double: d}} for s, d in counts])
    assert told(sentinel) == [
        (3, f"card 0: {single} grew by 100 to 150"),
        (4, f"card 0: {double} grew by 1 to 2"),
    ]
    assert sentinel.incidents[0].diagnosis.confidence < sentinel.incidents[1].diagnosis.confidence


def test_counters_may_be_set_back_or_be_missing_for_a_while(tmp_path):
    double = "HBM Double Bit Error Count"
    answers = [{"counters": c} for c in ({double: 5}, {}, {double: 5}, {double: 0}, {double: 0}, {double: 1})]
    sentinel, _ = run(tmp_path, *answers)
    assert told(sentinel) == [(5, f"card 0: {double} grew by 1 to 1")]


def test_a_card_that_was_slowed_down(tmp_path):
    slow = {"notes": ("slowed down: hot",)}
    sentinel, _ = run(tmp_path, {}, slow, slow)
    assert told(sentinel) == [(1, "card 0: slowed down: hot")]


# -- in incidents ------------------------------------------------------------------------------------


def test_each_incident_tells_the_cards_last_reading(tmp_path):
    answers = [{"temperature": 40 + n, "counters": {"HBM Single Bit Error Count": 3}} for n in range(4)]
    sentinel, _ = run(tmp_path, *answers, bad=(2,), more=[SnapshotSaver()], keep=2)
    (incident,) = sentinel.incidents
    reading = incident.details["device_health"]["rank 0"]
    assert (reading["temperature"], reading["card"]) == (42, "card 0")
    folder = tmp_path / "incidents" / incident.id
    written = json.loads((folder / "incident.json").read_text())
    assert written["details"]["device_health"]["rank 0"]["temperature"] == 42
    beside = json.loads((folder / "device-health.json").read_text())
    assert [r["temperature"] for r in beside["readings"]] == [41, 42]
    assert (folder / "bundle.json").exists()


def test_a_card_that_cannot_be_asked_is_told_as_such(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "gradsentinel"):
        failing = HealthUnavailable("npu-smi did not answer within 20 s")
        sentinel, _ = run(tmp_path, failing, failing, failing, bad=(1,))
    (incident,) = sentinel.incidents
    assert incident.details["device_health"]["rank 0"]["failure"] == "npu-smi did not answer within 20 s"
    assert caplog.text.count("no health of card 0") == 1


def test_on_a_device_nobody_can_ask_incidents_stay_as_they_are(tmp_path):
    sentinel, health = run(tmp_path, steps=3, bad=(1,), source=None)
    (incident,) = sentinel.incidents
    assert "device_health" not in incident.details
    assert health.readings() == []
    assert health._poller is None
    assert not (tmp_path / "incidents" / incident.id / "device-health.json").exists()


def test_the_numbers_are_published_for_tensorboard(tmp_path):
    class Look(Detector):
        seen = ()

        def on_run_start(self, event):
            self.run = event.run

        def on_run_end(self, event):
            self.seen = dict(self.run.metrics)

    look = Look()
    run(tmp_path, {"temperature": 55, "power": 301.5}, {"temperature": 56, "power": 302.5}, more=[look])
    assert look.seen["device/temperature"] == (1, 56)
    assert look.seen["device/power"] == (1, 302.5)


# -- a suspect ----------------------------------------------------------------------------------------


class Seats(Detector):
    """Has the run believe that its one rank is one of many, and its card the one with the incidents."""

    def __init__(self, health):
        self.health = health

    def on_run_start(self, event):
        before = self.health._suspicion.as_dict()
        self.health._suspicion = Suspicion(
            [Seat(self.health._card, ""), *(Seat(f"b{n}", "") for n in range(7))]
        )
        self.health._suspicion.take_up(before)


def accuse(folder, bad, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    health = DeviceHealthCallback(**settings)
    callbacks = [NanCallback(), health, Seats(health)]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder) as sentinel:
        for step, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(60)])):
            loss = model(batch).square().mean()
            sentinel.backward(loss * NAN if step in bad else loss)
            sentinel.step()
    return sentinel, health


def test_a_card_with_too_many_incidents_becomes_a_suspect_with_its_chance(tmp_path):
    sentinel, health = accuse(tmp_path, bad=(0, 12, 24, 36, 48))
    (accusation,) = [i for i in sentinel.incidents if i.kind is Kind.DEVICE_HEALTH]
    assert accusation.step == 36
    assert health._card in accusation.message
    assert "4 of 4 incidents" in accusation.message
    assert "by chance" in accusation.message
    assert "at most 0.0098" in accusation.message
    assert (accusation.diagnosis.cause, accusation.diagnosis.confidence) == ("hardware", 0.9)
    notes = [note for i in sentinel.incidents if i.kind is Kind.NONFINITE_LOSS for note in i.notes]
    assert sum("were to be expected" in note for note in notes) == 4  # not the first one
    assert [(s.hits, s.tries) for s in health.suspects()] == [(5, 5)]


def test_the_count_goes_on_after_a_restart_and_tells_no_suspect_twice(tmp_path):
    first, _ = accuse(tmp_path, bad=(0, 12))
    second, _ = accuse(tmp_path, bad=(24, 36))
    third, health = accuse(tmp_path, bad=(48,))
    kinds = [
        [i.kind for i in sentinel.incidents].count(Kind.DEVICE_HEALTH) for sentinel in (first, second, third)
    ]
    assert kinds == [0, 1, 0]
    assert health.suspects()[0].hits == 5


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 99}', '{"schema": 1, "cards": {"a": 3}}', "\x00"]
)
def test_a_damaged_account_is_told_and_begun_anew(tmp_path, caplog, text):
    (tmp_path / "device-health.json").write_text(text)
    with caplog.at_level(logging.WARNING, "gradsentinel"):
        _, health = accuse(tmp_path, bad=(5,))
    assert "begins anew" in caplog.text
    assert health.suspects()[0].hits == 1
    assert json.loads((tmp_path / "device-health.json").read_text())["schema"] == 1


def test_incidents_with_another_known_cause_are_not_counted(tmp_path):
    class Sure(Detector):
        def on_before_clip(self, event):
            from gradsentinel import Diagnosis  # noqa: PLC0415 - by value of the step

            found = Evidence(
                kind=Kind.NONFINITE_GRADIENT,
                action=Action.SKIP,
                message="planted",
                diagnosis=Diagnosis(cause="data", confidence=0.9),
            )
            bad = torch.tensor(event.step % 12 == 0)
            return Finding(kind=found.kind, value=bad, action=Action.SKIP, confirm=lambda: found)

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    health = DeviceHealthCallback()
    callbacks = [health, Seats(health), Sure()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=tmp_path) as sentinel:
        for batch in sentinel.steps([torch.randn(8, 4) for _ in range(50)]):
            sentinel.backward(model(batch).square().mean())
            sentinel.step()
    assert len(sentinel.incidents) == 5
    assert health.suspects() == []


# -- torch_npu's own check ------------------------------------------------------------------------------


def test_alarms_of_the_silent_check_become_warnings(tmp_path):
    def say(step):
        logger = logging.getLogger(LOGGER)
        if step == 1:
            logger.info("A grad-norm spike may happen")
            logger.warning(SPIKE)
        if step == 3:
            logger.warning(CHECKSUM)

    sentinel, _ = run(tmp_path, steps=5, source=None, every_step=say)
    assert [i.step for i in sentinel.incidents] == [1, 3]
    spike, checksum = sentinel.incidents
    assert "feature detection" in spike.message
    assert (spike.diagnosis.cause, "with_checksum:true" in spike.diagnosis.remedy[0]) == ("unknown", True)
    assert (checksum.diagnosis.cause, checksum.diagnosis.confidence) == ("hardware", 0.9)
    assert all(incident.kind is Kind.DEVICE_HEALTH for incident in sentinel.incidents)
    assert logging.getLogger(LOGGER).handlers == []


def test_the_handler_is_gone_after_a_run_that_failed(tmp_path):
    def fail(step):
        if step == 2:
            raise KeyError("the user's own")

    with pytest.raises(KeyError):
        run(tmp_path, steps=3, source=None, every_step=fail)
    assert logging.getLogger(LOGGER).handlers == []


def test_a_flood_of_alarms_is_one_incident_and_takes_bounded_memory(tmp_path):
    def flood(step):
        if step == 1:
            for number in range(5000):
                logging.getLogger(LOGGER).warning("%s %d %s", CHECKSUM, number, "x" * 5000)

    sentinel, _ = run(tmp_path, steps=4, source=None, every_step=flood)
    (incident,) = sentinel.incidents
    assert len(incident.message) < 1000


def test_it_can_be_switched_off(tmp_path):
    def say(step):
        logging.getLogger(LOGGER).warning(CHECKSUM)
        assert logging.getLogger(LOGGER).handlers == []

    sentinel, _ = run(tmp_path, steps=2, source=None, silent_check=False, every_step=say)
    assert sentinel.incidents == ()


# -- the self-test ------------------------------------------------------------------------------------


@pytest.fixture
def torch_npu(monkeypatch):
    """A torch_npu whose self-test answers as told."""

    def install(answer, *, free=64 << 30, without_argument=False):
        calls = []

        def detect(*kind):
            if without_argument and kind:
                raise TypeError("stress_detect() takes 0 positional arguments but 1 was given")
            calls.append(kind)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        npu = types.SimpleNamespace(
            stress_detect=detect,
            synchronize=lambda: calls.append("synchronize"),
            empty_cache=lambda: None,
            mem_get_info=lambda: (free, 64 << 30),
        )
        monkeypatch.setitem(sys.modules, "torch_npu", types.SimpleNamespace(npu=npu))
        return calls

    return install


NPU = types.SimpleNamespace(type="npu", index=0)


@pytest.mark.parametrize(
    ("answer", "passed", "words"),
    [
        (0, True, "passed"),
        (1, None, "did not run: code 1"),
        (2, False, "found a hardware fault"),
        (RuntimeError("Error code is 574007. Voltage recovery failed."), False, "restart the machine"),
        (RuntimeError("out of memory"), None, "out of memory"),
        (KeyError("x"), None, "KeyError"),
    ],
)
def test_what_a_self_test_says(torch_npu, answer, passed, words):
    calls = torch_npu(answer)
    found = run_self_test("aic", NPU)
    assert (found.passed, words in found.words) == (passed, True)
    assert calls == ["synchronize", ("aic",)]


def test_a_self_test_needs_memory_and_an_old_one_takes_no_argument(torch_npu):
    torch_npu(0, free=9 << 30)
    assert "10 GiB" in run_self_test("aic", NPU).words
    calls = torch_npu(0, without_argument=True)
    assert run_self_test("aic", NPU).passed is True
    assert calls[-1] == ()
    assert run_self_test("hccs", NPU).passed is None


def test_only_ascend_devices_have_one(torch_npu):
    assert run_self_test("aic", NPU).passed is None
    torch_npu(0)
    assert run_self_test("aic", torch.device("cpu")).passed is None


def test_a_self_test_that_found_a_fault_decides_the_diagnosis(tmp_path, torch_npu, monkeypatch):
    calls = torch_npu(2)
    monkeypatch.setattr(
        "gradsentinel.callbacks.device_health.run_self_test", lambda kind, device: run_self_test(kind, NPU)
    )
    sentinel, _ = run(tmp_path, steps=40, source=None, bad=(3, 30), self_test="aic")
    first, second = sentinel.incidents
    assert (first.diagnosis.cause, first.diagnosis.confidence) == ("hardware", 0.95)
    assert any("found a hardware fault" in note for note in first.notes)
    assert not any("self-test" in note for note in second.notes)
    assert [call for call in calls if call != "synchronize"] == [("aic",)]


def test_without_being_asked_for_no_self_test_runs(tmp_path, torch_npu):
    calls = torch_npu(0)
    run(tmp_path, steps=4, source=None, bad=(1,))
    assert calls == []


# -- in nobody's way ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"every": 0},
        {"every": float("nan")},
        {"max_corrected": 0},
        {"keep": 0},
        {"max_chance": 0.0},
        {"max_chance": 1.0},
        {"self_test": "everything"},
        {"source": object()},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigurationError):
        DeviceHealthCallback(**settings)


def test_a_source_that_cannot_be_made_is_told_and_the_run_goes_on(tmp_path, caplog, monkeypatch):
    def fail(_device):
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr("gradsentinel.devices.cpu.Cpu.health_source", fail)
    with caplog.at_level(logging.WARNING, "gradsentinel"):
        sentinel, _ = run(tmp_path, steps=3, source=None)
    assert "libnvidia-ml.so.1" in caplog.text
    assert sentinel.incidents == ()


def test_a_healthy_run_is_the_same_with_and_without_it(tmp_path):
    def weights(callbacks):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        with Sentinel(model, optimizer, callbacks=callbacks, run_dir=tmp_path) as sentinel:
            for batch in sentinel.steps([torch.randn(8, 4) for _ in range(10)]):
                sentinel.backward(model(batch).square().mean())
                sentinel.step(1.0)
        return [p.detach().clone() for p in model.parameters()]

    class Silent:
        card = "card 0"

        def read(self):
            return Reading(card=self.card, temperature=50)

    health = DeviceHealthCallback(source=Silent(), every=1e-3)
    for plain, watched in zip(weights([]), weights([health]), strict=True):
        assert torch.equal(plain, watched)


@pytest.mark.expects_swallowed
def test_if_it_fails_its_thread_ends_and_the_run_goes_on(tmp_path):
    class Spoilt(DeviceHealthCallback):
        def _judge(self, iteration):
            raise ZeroDivisionError("planted")

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    card = Card({})
    health = Spoilt(source=card, every=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Sentinel(model, optimizer, callbacks=[health], run_dir=tmp_path) as sentinel:
        for step, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(4)])):
            if step == 0:
                card.answer(health)
            sentinel.backward(model(batch).square().mean())
            sentinel.step()
            assert sentinel.applied
    assert [i.kind for i in sentinel.incidents] == [Kind.CALLBACK_ERROR]
    card.turn.release()
    health._poller._thread.join(60)
    assert not health._poller._thread.is_alive()
    assert logging.getLogger(LOGGER).handlers == []


def test_alone_it_protects_nobody_and_the_run_says_so(tmp_path, caplog):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with caplog.at_level(logging.WARNING, "gradsentinel"):
        Sentinel(model, optimizer, callbacks=[DeviceHealthCallback()], run_dir=tmp_path).close()
    assert "add NanCallback()" in caplog.text


def test_one_callback_may_serve_one_run_after_the_other(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    cards = [Card({"health": "Alarm"}) for _ in range(2)]
    health = DeviceHealthCallback(every=1e-4)
    for number, card in enumerate(cards):
        health.source = card
        folder = tmp_path / f"{number}"
        sentinel = Sentinel(model, optimizer, callbacks=[NanCallback(), health], run_dir=folder)
        for batch in sentinel.steps([torch.randn(8, 4)]):
            card.answer(health)
            sentinel.backward(model(batch).square().mean())
            sentinel.step()
        assert told(sentinel) == [(0, "card 0: health Alarm")]  # though the run before was told the same
        turn, card.turn = card.turn, None
        turn.release()
    sentinel.close()  # the first one is left as it is
    assert logging.getLogger(LOGGER).handlers == []
