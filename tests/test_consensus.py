"""Who did not answer: found with few questions to the job's store, whatever the number of ranks."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel.ranks import consensus
from gradsentinel.ranks.consensus import LocalConsensus

PATIENCE = 0.2


class CountingStore:
    """The store of a job, with the ranks that signed in before; counts what it is asked."""

    def __init__(self, present: Any = ()) -> None:
        self.store = dist.HashStore()
        self.asked: list[str] = []
        self.keys = 0
        for rank in present:
            self.store.set(f"call/{rank}", "here")
        if len(present):
            self.store.add("call/present", len(present))

    def set(self, key: str, value: str) -> None:
        self.asked.append("set")
        self.store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        self.asked.append("add")
        return self.store.add(key, amount)

    def get(self, key: str) -> bytes:
        self.asked.append("get")
        return self.store.get(key)

    def check(self, keys: list[str]) -> bool:
        self.asked.append("check")
        self.keys += len(keys)
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.asked.append("wait")
        self.store.wait(keys, timeout)


def roll_call(store: Any, rank: int, world_size: int) -> tuple[int, list[int]]:
    return consensus._roll_call(store, "call", rank, world_size, PATIENCE)


def all_sign_in(store: Any, ranks: list[int], world_size: int) -> dict[int, tuple[int, list[int]]]:
    heard: dict[int, tuple[int, list[int]]] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: heard.update({rank: roll_call(store, rank, world_size)}))
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


@pytest.mark.parametrize("missing", [[], [0], [3], [0, 1, 2], [1, 6]], ids=str)
def test_all_who_sign_in_hear_the_same_names(missing):
    there = [rank for rank in range(8) if rank not in missing]
    heard = all_sign_in(CountingStore(), there, 8)
    assert heard == dict.fromkeys(there, (len(missing), missing))


def test_who_comes_after_the_count_hears_that_it_was_missing():
    store = CountingStore()
    all_sign_in(store, [0, 2], 3)
    assert roll_call(store, 1, 3) == (1, [1])


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(1, 64))
def test_the_absent_are_found_by_halves(missing, most):
    there = [rank for rank in range(41) if rank not in missing]
    found = consensus._absent(CountingStore(there), "call", range(41), most)
    assert found == sorted(missing)[: len(found)]
    assert min(most, len(missing)) == len(found)


MANY = 16384


def test_at_sixteen_thousand_ranks_a_rank_goes_to_the_store_four_times():
    first = CountingStore([5])
    first.store.set("call/verdict", "[1, [7]]")
    assert roll_call(first, 0, MANY) == (1, [7])
    assert first.asked == ["set", "add", "wait", "get"]


@pytest.mark.parametrize(
    ("missing", "most_checks"), [({7}, 40), (set(range(800, 808)), 60), ({0, 9000, 16383}, 100)]
)
def test_at_sixteen_thousand_ranks_few_absentees_take_few_questions(missing, most_checks):
    store = CountingStore([rank for rank in range(MANY) if rank not in missing])
    assert consensus._absent(store, "call", range(MANY), consensus._MOST_NAMED) == sorted(missing)
    assert len(store.asked) <= most_checks
    assert store.keys <= (2 + 2 * len(missing)) * MANY


def test_a_job_torn_in_half_is_counted_and_not_listed():
    class Crowded(CountingStore):
        """All others that live sign in just after the first."""

        def add(self, key: str, amount: int) -> int:
            present = super().add(key, amount)
            if amount:
                self.store.add(key, MANY // 2 - 1)
            return present

    store = Crowded()
    for rank in range(1, MANY // 2):
        store.store.set(f"call/{rank}", "here")
    count, named = roll_call(store, 0, MANY)
    assert count == MANY // 2
    assert named == list(range(MANY // 2, MANY // 2 + consensus._MOST_NAMED))
    assert len(store.asked) < 200


def test_a_store_that_neither_answers_nor_refuses_is_given_up():
    class Silent(CountingStore):
        def add(self, key: str, amount: int) -> int:
            threading.Event().wait()  # for ever; the thread is a daemon
            raise AssertionError

    assert consensus._ask(lambda: roll_call(Silent(), 0, 2), 0.05) is None


def test_a_store_that_is_gone_is_given_up():
    class Gone(CountingStore):
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("connection reset by peer")

    assert consensus._ask(lambda: roll_call(Gone(), 0, 2), 5.0) is None


def test_who_counts_and_dies_leaves_the_others_without_names():
    store = CountingStore([0])  # rank 0 came first and never wrote down what it found
    assert consensus._ask(lambda: roll_call(store, 1, 3), PATIENCE) is None


def test_a_job_of_one_process_agrees_with_itself():
    alone = LocalConsensus()
    levels = torch.tensor([0, 4], dtype=torch.int32)
    assert alone.agree(levels) is levels
    assert not alone.differ(torch.tensor([3, 4]), None).any()
    assert alone.gather("x") == ["x"]
    assert alone.all_of(True)
    assert not alone.all_of(False)
