"""A rollback that draws the data once more, without what led to it: nothing else is lost."""

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from gradsentinel import (
    Action,
    BeforeClip,
    ConfigurationError,
    Finding,
    Kind,
    NanCallback,
    Rollback,
    Skip,
    SkipBatches,
)
from gradsentinel.integrations.engine import Engine
from gradsentinel.integrations.host import FrameworkHost
from loops import Training, build, differences, fingerprint, generators, make_batches, train_by_hand

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata, in newer torch
COUNT = 9
FULL = {"random": True, "scheduler": "cosine", "ema": True, "max_norm": 1.0}


def records() -> list[dict[str, Any]]:
    batches = make_batches(COUNT)
    return [
        {"x": x, "y": y, "id": 8 * number + place}
        for number, batch in enumerate(batches)
        for place, (x, y) in enumerate(zip(batch["x"], batch["y"], strict=True))
    ]


def replaying(**given: Any) -> list[Any]:
    rollback = {"every": 2, "confirm_after": 1, "keep": 4, "max_rollbacks": 50, "data": "replay", **given}
    return [NanCallback(state_every=1), Skip(max_skips=50), Rollback(**rollback)]


@dataclass
class Loop:
    """A watched training in epochs, what goes wrong in it, and what its state is made of in the end."""

    run: Training
    faults: dict[int, str] = field(default_factory=dict)
    """By attempted step: "back" asks for a rollback, "loss" and "weight" put a NaN there."""
    leave_at: tuple[int, ...] = ()
    """Leave the epoch of this turn behind so many batches of its own; 0 stays to the end."""
    made: list[tuple[int, Any]] = field(default_factory=list)
    """Step, and which batch it was."""
    positions: list[dict[str, int]] = field(default_factory=list)
    attempts: int = 0
    callbacks: list[Any] = field(default_factory=replaying)

    def __call__(self, loader: Any, run_dir: Any, *, epochs: int = 2, **given: Any) -> "Loop":
        asked = [False]
        with self.run.sentinel(self.callbacks, run_dir=run_dir, **given) as sentinel:
            sentinel.on(
                BeforeClip,
                lambda event: Finding(kind=Kind.SPIKE, value=torch.tensor(asked[0]), action=Action.ROLLBACK),
            )
            for turn in range(epochs):
                if hasattr(getattr(loader, "sampler", None), "set_epoch"):
                    loader.sampler.set_epoch(turn)
                for batch in sentinel.steps(loader, accumulate=self.run.accumulate):
                    self.positions.append(dict(sentinel.data_position))
                    self._step(sentinel, batch, asked)
                    place, leave = sentinel.data_position, [*self.leave_at, 0, 0, 0][turn]
                    if leave and place["batch"] == leave and self._at_home(place, turn):
                        break
        return self

    def _at_home(self, place: Any, turn: int) -> bool:
        """Say whether the loop is in its own turn, and not on the way back to it."""
        left = sum(bool(leave) for leave in self.leave_at[:turn])
        drawn = sum(leave or COUNT for leave in [*self.leave_at, 0, 0, 0][:turn])
        return place["epoch"] == turn - left and place["batches"] > drawn

    def _step(self, sentinel: Any, batch: Any, asked: list[bool]) -> None:
        fault, step = self.faults.get(self.attempts), sentinel.step_count
        self.attempts += 1
        asked[0] = fault == "back"
        loss = self.run.loss(batch)
        sentinel.backward(loss * math.nan if fault == "loss" else loss)
        sentinel.step(max_norm=self.run.max_norm)
        if sentinel.step_count <= step:
            self.made = [one for one in self.made if one[0] < sentinel.step_count]
        elif sentinel.applied:
            self.made.append((step, name_of(batch)))
        if fault == "weight":
            with torch.no_grad():
                self.run.model.head.weight[0, 0] = math.nan

    @property
    def survivors(self) -> list[Any]:
        return [name for _, name in self.made]

    def everything(self) -> Any:
        return fingerprint({**self.run.state(), "generators": generators()})


def name_of(batch: dict[str, Tensor]) -> Any:
    return tuple(batch["id"].tolist()) if "id" in batch else float(batch["x"][0, 0])


faults = st.dictionaries(st.integers(0, 24), st.sampled_from(["back", "loss", "weight"]), max_size=5)


@pytest.mark.slow
@settings(max_examples=25)
@given(faults, st.integers(1, 4), st.integers(0, 2), st.integers(1, 3))
def test_the_end_is_that_of_a_fault_free_run_over_the_surviving_batches(faults, every, confirm, keep):
    """Bit for bit, with dropout and draws from every generator; each batch comes once, in its order."""
    batches = make_batches(COUNT)
    callbacks = replaying(every=every, confirm_after=confirm, keep=keep, after=1)
    loop = Loop(build(**FULL), faults, callbacks=callbacks)(batches, None)
    if faults.get(loop.attempts - 1) == "weight":  # nobody makes a step any more, nor looks
        return
    names = [name_of(batch) for batch in batches]
    spoilt = sum(
        fault != "weight" and faults.get(attempt - 1) != "weight"  # in a bad state no batch is to blame
        for attempt, fault in faults.items()
        if attempt < loop.attempts
    )
    assert len(loop.survivors) == 2 * COUNT - spoilt
    merged = iter(names * 2)
    assert all(name in merged for name in loop.survivors)  # in this order, none twice
    reference = build(**FULL)
    train_by_hand(reference, [batches[names.index(name)] for name in loop.survivors])
    assert differences(loop.run.state(), reference.state()) == []


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(records())


def stateful(**given: Any) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(records(), batch_size=8, shuffle=True, **given)


LOADERS = {
    "shuffled": lambda: DataLoader(records(), batch_size=8, shuffle=True),
    "shuffled by its own generator": lambda: DataLoader(
        records(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "through a sampler": lambda: DataLoader(
        records(), batch_sampler=SkipBatches(BatchSampler(RandomSampler(records()), 8, drop_last=True))
    ),
    "by the number of the epoch": lambda: DataLoader(
        records(), batch_size=8, sampler=DistributedSampler(records(), num_replicas=1, rank=0, seed=3)
    ),
    "a stream": lambda: DataLoader(Stream(), batch_size=8),
    "a list": lambda: make_batches(COUNT),
    "with a state": stateful,
}


@pytest.mark.slow
@pytest.mark.parametrize("faults", [{5: "weight"}, {10: "weight"}, {11: "weight", 16: "weight"}])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_transient_fault_costs_nothing_whatever_the_loader(kind, faults, run_dir):
    """The state went bad, no batch is to blame: the end is that of the run without it, its draws included.

    The faults are in the first epoch, and at the beginning of the second, where the way back leads to the
    first.
    """
    reference = Loop(build(**FULL))(LOADERS[kind](), run_dir / "reference")
    expected = reference.everything()
    loop = Loop(build(**FULL), faults)(LOADERS[kind](), run_dir / "run")
    assert loop.attempts > reference.attempts
    assert loop.survivors == reference.survivors
    assert loop.everything() == expected


@pytest.mark.slow
@pytest.mark.parametrize("workers", [{"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("make", [DataLoader, stateful])
def test_with_workers(make, workers, run_dir):
    def loader() -> Any:
        if make is stateful:
            return stateful(**workers)
        return DataLoader(records(), batch_size=8, shuffle=True, **workers)

    reference = Loop(build())(loader(), run_dir / "reference")
    loop = Loop(build(), {10: "weight"})(loader(), run_dir / "run")
    assert loop.survivors == reference.survivors
    assert differences(loop.run.state(), reference.run.state()) == []


def test_an_epoch_that_has_begun_begins_alike_when_a_batch_before_it_is_left_out(run_dir):
    """The draws of that batch are missing, so the generators are elsewhere; the order is not."""
    plain = Loop(build(**FULL))(LOADERS["shuffled"](), run_dir / "plain")
    loop = Loop(build(**FULL), {8: "loss", 11: "weight"}, callbacks=replaying(every=4, confirm_after=2))
    loop(LOADERS["shuffled"](), run_dir / "run")
    assert loop.survivors == plain.survivors[:8] + plain.survivors[9:]


@pytest.mark.slow
@settings(max_examples=25)
@given(faults, st.lists(st.integers(0, COUNT - 1), min_size=3, max_size=3), st.integers(1, 4))
def test_loops_that_leave_an_epoch_early(faults, leave_at, every):
    """What was left stays left, and what comes next follows on it, also on the way back."""
    faults = dict.fromkeys(faults, "weight")
    plain = Loop(build(), leave_at=tuple(leave_at))(make_batches(COUNT), None, epochs=3)
    loop = Loop(build(), faults, tuple(leave_at), callbacks=replaying(every=every))
    loop(make_batches(COUNT), None, epochs=3)
    if loop.attempts - 1 not in faults:
        assert loop.survivors == plain.survivors


def test_the_position_goes_back_too(run_dir):
    loop = Loop(build(), {10: "back"}, callbacks=replaying(every=4, confirm_after=2))(
        make_batches(COUNT), run_dir
    )
    places = [(place["epoch"], place["batch"], place["batches"]) for place in loop.positions]
    assert places[10:14] == [(1, 2, 11), (0, 9, 9), (1, 1, 10), (1, 3, 12)]
    assert places[-1] == (1, 9, 18)


def test_accumulation(run_dir):
    settings = {**FULL, "accumulate": 2}
    batches = make_batches(8)
    reference = Loop(build(**settings))(batches, run_dir / "reference")
    loop = Loop(build(**settings), {5: "weight", 12: "weight"})(batches, run_dir / "run")
    assert loop.attempts > reference.attempts
    assert loop.everything() == reference.everything()


def test_a_restart_goes_on_where_it_was_and_can_go_back_to_there(run_dir):
    """Its only good state for a while is the one that it took up, in the middle of an epoch."""
    faults = {4: "loss", 7: "back"}
    whole = Loop(build(**FULL), faults, callbacks=replaying(after=1))
    whole(LOADERS["shuffled"](), run_dir / "whole")
    broken = Loop(build(**FULL), faults, leave_at=(8,), callbacks=replaying(after=1, on_disk=2))
    broken(LOADERS["shuffled"](), run_dir / "run", epochs=1)
    again = Loop(build(**FULL), {1: "weight"}, callbacks=replaying(on_disk=2, every=50))
    with again.run.sentinel(again.callbacks, run_dir=run_dir / "run", resume="auto") as sentinel:
        first = sentinel.step_count
        loader = LOADERS["shuffled"]()
        for _ in range(sentinel.data_position["epoch"], 2):
            for batch in sentinel.steps(loader):
                again._step(sentinel, batch, [False])
    assert 0 < first < len(broken.made)
    assert [*(name for step, name in broken.made if step < first), *again.survivors] == whole.survivors
    assert again.everything() == whole.everything()


def test_the_refused_batch_is_told_where_it_does_not_come_again(run_dir, caplog):
    """A loader whose order nothing decides: the batch cannot be left out, and the log says so."""
    orders = itertools.count()

    class Unsteady:
        def __iter__(self) -> Iterator[Any]:
            first = next(orders)
            return iter(make_batches(COUNT, seed=first))

    with caplog.at_level(logging.WARNING, logger="gradsentinel"):
        Loop(build(), {5: "back"})(Unsteady(), run_dir, epochs=1)
    assert "other batches than before" in caplog.text


# -- what cannot be done is refused ----------------------------------------------------------------------


def test_data_that_comes_only_once_is_refused(run_dir):
    with (
        build().sentinel(replaying(), run_dir=run_dir) as sentinel,
        pytest.raises(ConfigurationError, match="a generator gives its batches only once"),
    ):
        sentinel.steps(batch for batch in make_batches(3))


def test_a_stream_that_comes_only_once_is_refused(run_dir):
    class Once(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            raise StopIteration

    with (
        build().sentinel(replaying(), run_dir=run_dir) as sentinel,
        pytest.raises(ConfigurationError, match="a Once gives its batches only once"),
    ):
        sentinel.steps(DataLoader(Once(), batch_size=2))


def test_a_loop_that_draws_its_data_itself_is_refused_at_its_first_step(run_dir):
    run = build()
    sentinel = run.sentinel(replaying(), run_dir=run_dir)
    with pytest.raises(ConfigurationError, match=r"for batch in sentinel\.steps\(loader\)"):
        sentinel.backward(run.loss(make_batches(1)[0]))
    with pytest.raises(ConfigurationError, match=r"for batch in sentinel\.steps\(loader\)"):
        sentinel.attached()
    sentinel.close()


def test_a_list_of_bad_batches_is_needed(run_dir):
    with pytest.raises(ConfigurationError, match="leave remember=False out"):
        build().sentinel([NanCallback(), Skip(remember=False), Rollback(data="replay")], run_dir=run_dir)


def test_an_adapter_refuses_it_when_it_is_attached(run_dir):
    run = build()
    host = FrameworkHost(run.model, run.optimizers)
    with pytest.raises(ConfigurationError, match=r"Rollback\(data='replay'\) has to draw the data itself"):
        Engine(host, replaying(), model=run.model, forward=None, directory=run_dir)


def test_an_unknown_wish():
    with pytest.raises(ConfigurationError, match="data='again'; choose 'go_on' or 'replay'"):
        Rollback(data="again")


def test_without_it_one_call_is_remembered_and_no_more(run_dir):
    run = build()
    with run.sentinel([NanCallback(), Rollback()], run_dir=run_dir) as sentinel:
        for _ in range(3):
            for batch in sentinel.steps(iter(make_batches(2))):
                sentinel.backward(run.loss(batch))
                sentinel.step()
        assert len(sentinel._watch.run.course._stretches) == 1


def test_what_lies_before_every_snapshot_is_forgotten(run_dir):
    run = build()
    with run.sentinel(replaying(keep=2), run_dir=run_dir) as sentinel:
        for _ in range(20):
            for batch in sentinel.steps(make_batches(2)):
                sentinel.backward(run.loss(batch))
                sentinel.step()
        assert len(sentinel._watch.run.course._stretches) <= 5
