import gc
import logging
import threading
import weakref

import pytest

from gradsentinel.devices.health import HealthUnavailable, Reading, growth, is_serious
from gradsentinel.devices.polling import Poller


class Source:
    card = "card 0"

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = threading.Semaphore(0)

    def read(self):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.asked.release()
        if isinstance(answer, BaseException):
            raise answer
        return Reading(card=self.card, temperature=answer)


def poller_of(*answers, **settings):
    return Poller(Source(*answers), **{"every": 60.0, **settings})


def test_readings_are_bounded():
    poller = poller_of(*range(10), keep=3)
    for _ in range(10):
        assert poller.poll() == 60
    assert [reading.temperature for reading in poller.readings()] == [7, 8, 9]
    assert poller.count == 10


@pytest.mark.parametrize(
    "error", [HealthUnavailable("npu-smi is away"), OSError("npu-smi is away"), KeyError(3)]
)
def test_a_card_that_does_not_answer_is_asked_less_often_and_told_once(caplog, error):
    poller = poller_of(error)
    with caplog.at_level(logging.WARNING, "gradsentinel"):
        pauses = [poller.poll() for _ in range(40)]
    assert pauses[:4] == [120, 240, 480, 600]
    assert pauses[-1] == 600
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "card 0" in caplog.text
    assert poller.failure
    poller.source.answers = [50, HealthUnavailable("again")]
    assert (poller.poll(), poller.failure) == (60, "")
    poller.poll()
    assert len(caplog.records) == 2
    assert len(poller.readings()) == 1


def test_who_asks_seldom_is_not_asked_more_often_by_a_failure():
    assert poller_of(HealthUnavailable("x"), every=3600.0).poll() == 3600


def test_the_thread_asks_and_ends():
    poller = poller_of(40, every=0.001)
    poller.start()
    for _ in range(3):
        assert poller.source.asked.acquire(timeout=60)
    poller.stop()
    poller._thread.join(60)
    assert not poller._thread.is_alive()
    poller.stop()
    assert poller.readings()[-1].temperature == 40


def test_stopping_does_not_wait_for_a_card_that_hangs():
    entered, leave = threading.Event(), threading.Event()

    class Hanging:
        card = "card 0"

        def read(self):
            entered.set()
            leave.wait(60)
            raise HealthUnavailable("late")

    poller = Poller(Hanging(), every=1.0)
    poller.start()
    assert entered.wait(60)
    poller.stop()
    assert poller._thread.is_alive()  # and a daemon, which no process waits for
    assert poller._thread.daemon
    leave.set()
    poller._thread.join(60)
    assert not poller._thread.is_alive()


def test_a_poller_that_is_forgotten_ends_its_thread():
    poller = poller_of(40, every=0.001)
    poller.start()
    thread, source, gone = poller._thread, poller.source, weakref.ref(poller)
    assert source.asked.acquire(timeout=60)
    del poller
    thread.join(60)
    gc.collect()
    assert not thread.is_alive()
    assert gone() is None


def test_counters_that_were_set_back_count_from_zero():
    assert growth({"a": 5, "b": 5, "c": 5}, {"a": 5, "b": 7, "c": 2, "d": 9}) == {"b": 2, "c": 2}
    assert growth({"a": 5}, {"a": 0}) == {}


@pytest.mark.parametrize(
    ("counter", "serious"),
    [
        ("HBM Double Bit Error Count", True),
        ("HBM Double Bit Isolated Pages Count", True),
        ("uncorrected ECC errors", True),
        ("remapped rows, uncorrectable", True),
        ("HBM Single Bit Error Count", False),
        ("corrected ECC errors", False),
    ],
)
def test_which_counters_are_serious(counter, serious):
    assert is_serious(counter) is serious


@pytest.mark.parametrize(
    ("word", "healthy"),
    [("OK", True), ("Alarm", False), ("NA", None), (None, None), ("-", None), ("Critical", False)],
)
def test_words_for_health(word, healthy):
    assert Reading(card="x", health=word).healthy is healthy
