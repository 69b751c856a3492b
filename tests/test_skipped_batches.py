"""Batches that led to an incident are remembered, and left out when they come again."""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from gradsentinel import (
    Action,
    BeforeClip,
    ConfigurationError,
    Finding,
    Kind,
    MagnitudeCallback,
    NanCallback,
    Outcome,
    Rollback,
    Sentinel,
    Skip,
    SkipBatches,
    StoreError,
    TrainingAborted,
)
from gradsentinel.data.skipped import FILE, Part, SkippedBatch, SkippedBatches
from gradsentinel.ranks.consensus import LocalConsensus
from gradsentinel.store import RunDirectory
from loops import differences

WIDTH = 4
SIZE = 24


def rows(bad: Sequence[int] = (), value: float = float("nan")) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    data = [{"x": torch.randn(WIDTH, generator=generator), "id": number} for number in range(SIZE)]
    for number in bad:
        data[number]["x"][0] = value
    return data


def batches(bad: Sequence[int] = (), value: float = float("nan")) -> list[dict[str, Tensor]]:
    return list(DataLoader(rows(bad, value), batch_size=4))  # type: ignore[arg-type]


def sentinel_for(folder: Any, *callbacks: Any, **settings: Any) -> tuple[Sentinel, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    sentinel = Sentinel(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=callbacks or [NanCallback()],
        run_dir=folder,
        **settings,
    )
    return sentinel, model


def epoch(sentinel: Sentinel, model: nn.Module, loader: Any, *, accumulate: int = 1) -> list[list[int]]:
    """One epoch; the ids of each micro-batch that was trained on."""
    seen = []
    for batch in sentinel.steps(loader, accumulate=accumulate):
        seen.append(batch["id"].tolist())
        sentinel.backward(model(batch["x"]).square().mean())
        sentinel.step()
    return seen


def crash(sentinel: Sentinel, model: nn.Module, loader: Any, *, after: int) -> None:
    """Begin an epoch and die behind so many steps."""
    for number, batch in enumerate(sentinel.steps(loader), start=1):
        sentinel.backward(model(batch["x"]).square().mean())
        sentinel.step()
        if number == after:
            raise ZeroDivisionError


def on_disk(folder: Any) -> list[dict[str, Any]]:
    data = json.loads((folder / FILE).read_text())
    assert data["schema"] == 1
    return data["batches"]


def test_bad_data_is_left_out_for_good(tmp_path):
    sentinel, model = sentinel_for(tmp_path)
    loader = batches(bad=[9])
    with sentinel:
        first = epoch(sentinel, model, loader)
        second = epoch(sentinel, model, loader)
    assert [8, 9, 10, 11] in first
    assert second == [ids for ids in first if 9 not in ids]
    assert len(sentinel.incidents) == 1
    (entry,) = on_disk(tmp_path)
    assert (entry["epoch"], entry["batch"], entry["step"]) == (0, 2, 2)
    assert entry["incident"] == sentinel.incidents[0].id
    assert (entry["cause"], entry["for_good"], entry["left_out"]) == ("data", True, 1)
    (part,) = entry["ranks"]
    assert part["guilty"]
    assert part["ids"] == [8, 9, 10, 11]
    assert part["samples"] == [{"position": 1, "id": 9}]


def test_what_is_left_out_counts_as_drawn(tmp_path):
    sentinel, model = sentinel_for(tmp_path)
    loader = batches(bad=[9, 20])
    with sentinel:
        epoch(sentinel, model, loader)
        assert sentinel.data_position == {"epoch": 1, "batch": 0, "batches": 6}
        positions = []
        for batch in sentinel.steps(loader):
            positions.append(sentinel.data_position["batch"])
            sentinel.backward(model(batch["x"]).square().mean())
            sentinel.step()
        assert positions == [1, 2, 4, 5]
        assert sentinel.data_position == {"epoch": 2, "batch": 0, "batches": 12}
    assert sentinel.step_count == 6 + 4


def test_a_spike_is_tried_again_in_the_next_epoch(tmp_path):
    callbacks = [NanCallback(), MagnitudeCallback(max_global_norm=1e3, action="skip")]
    sentinel, model = sentinel_for(tmp_path, *callbacks)
    loader = batches(bad=[9], value=1e4)
    with sentinel:
        first, second = epoch(sentinel, model, loader), epoch(sentinel, model, loader)
        assert first == second
        assert [i.step for i in sentinel.incidents] == [2, 8]
        (entry,) = sentinel._watch.run.skipped.entries
        assert (entry.for_good, entry.failures, entry.epoch) == (False, 2, 1)
        third, fourth = epoch(sentinel, model, loader), epoch(sentinel, model, loader)
    assert third == first
    assert fourth == [ids for ids in first if 9 not in ids]  # three epochs: it is not the state any more
    assert on_disk(tmp_path)[0]["for_good"]


def test_within_its_epoch_a_spike_is_left_out_after_a_rollback_to_before_it(tmp_path):
    """The rollback draws the batches since the snapshot once more; in the next epoch it is tried again."""
    watch = MagnitudeCallback(max_global_norm=1e3, action="rollback")
    keep = Rollback(every=2, confirm_after=0, data="replay")
    sentinel, model = sentinel_for(tmp_path, NanCallback(), watch, keep)
    loader = batches(bad=[13], value=1e4)
    ids = [batch["id"].tolist() for batch in loader]
    with sentinel:
        first = epoch(sentinel, model, loader)
        assert first == [*ids[:4], ids[2], *ids[4:]]  # the fourth failed, and the third came once more
        assert sentinel.data_position == {"epoch": 1, "batch": 0, "batches": 6}
        assert sentinel.step_count == 5
        assert not on_disk(tmp_path)[0]["for_good"]
        second = epoch(sentinel, model, loader)
    assert ids[3] in second
    assert [incident.step for incident in sentinel.incidents] == [3, 8]


def test_within_its_epoch_a_spike_is_left_out_after_a_restart_from_before_it(tmp_path):
    """The process that goes on from the snapshot draws the same batches again."""
    watch = MagnitudeCallback(max_global_norm=1e3, action="skip")
    keep = Rollback(every=2, confirm_after=0, on_disk=3)
    loader = batches(bad=[9], value=1e4)
    first, model = sentinel_for(tmp_path, NanCallback(), watch, keep)
    with pytest.raises(ZeroDivisionError), first:
        crash(first, model, loader, after=3)
    assert not on_disk(tmp_path)[0]["for_good"]
    again, model = sentinel_for(
        tmp_path, NanCallback(), MagnitudeCallback(max_global_norm=1e3, action="skip"), resume="auto"
    )
    with again:
        done = again.data_position["batch"]
        assert done == 2
        seen = epoch(again, model, loader)
    assert seen == [b["id"].tolist() for number, b in enumerate(loader) if number > 2]
    assert again.incidents == ()
    assert again.data_position == {"epoch": 1, "batch": 0, "batches": 6}


def test_a_fresh_start_in_the_same_directory_knows_bad_data_and_tries_spikes_again(tmp_path):
    def run(bad: list[int], value: float) -> tuple[list[list[int]], Sentinel]:
        watch = MagnitudeCallback(max_global_norm=1e3, action="skip")
        sentinel, model = sentinel_for(tmp_path, NanCallback(), watch)
        loader = batches(bad=bad, value=value)
        loader[1]["x"] = loader[1]["x"] * 1e4
        with sentinel:
            return epoch(sentinel, model, loader), sentinel

    run([9], float("nan"))
    seen, sentinel = run([9], float("nan"))
    assert [8, 9, 10, 11] not in seen
    assert [4, 5, 6, 7] in seen
    assert [i.step for i in sentinel.incidents] == [1]


def test_an_aborted_run_leaves_its_last_batch_on_the_list(tmp_path):
    sentinel, model = sentinel_for(tmp_path, NanCallback(), Skip(max_skips=0))
    loader = batches(bad=[9])
    with pytest.raises(TrainingAborted), sentinel:
        epoch(sentinel, model, loader)
    again, model = sentinel_for(tmp_path, NanCallback(), Skip(max_skips=0))
    with again:
        assert [8, 9, 10, 11] not in epoch(again, model, loader)
    assert again.incidents == ()


def test_only_the_guilty_micro_batch_of_a_step_is_left_out(tmp_path):
    sentinel, model = sentinel_for(tmp_path)
    loader = batches(bad=[9])
    with sentinel:
        epoch(sentinel, model, loader, accumulate=2)
        second = epoch(sentinel, model, loader, accumulate=2)
        assert [8, 9, 10, 11] not in second
        assert len(second) == 5
        assert sentinel.data_position == {"epoch": 2, "batch": 0, "batches": 12}
        assert sentinel.applied_steps == 2 + 3  # the window at the end of the loader is closed as ever
    assert [entry["batch"] for entry in on_disk(tmp_path)] == [2]


def test_a_window_that_ends_with_a_left_out_batch_is_stepped_with_what_it_has(tmp_path):
    sentinel, model = sentinel_for(tmp_path)
    loader = batches(bad=[21])
    with sentinel:
        epoch(sentinel, model, loader, accumulate=2)
        applied = sentinel.applied_steps
        epoch(sentinel, model, loader, accumulate=2)
        assert sentinel.applied_steps == applied + 3
        assert all(parameter.grad is None for parameter in model.parameters())
        assert sentinel.data_position == {"epoch": 2, "batch": 0, "batches": 12}
        seen = epoch(sentinel, model, loader, accumulate=2)
        assert len(seen) == 5
        assert sentinel.applied_steps == applied + 6  # twice 5 micro-batches in windows of 2, 2 and 1


@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_that_step_is_the_one_that_the_loop_asked_for(tmp_path, max_norm):
    """Bit for bit what a loop does by hand that closes each epoch's last window; schedulers and all."""

    torch.manual_seed(0)
    whole = batches(bad=[21])
    outcomes = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        if watched:
            settings = {"callbacks": [NanCallback()], "scheduler": scheduler, "run_dir": tmp_path}
            with Sentinel(model, optimizer, **settings) as sentinel:
                for _ in range(4):
                    for batch in sentinel.steps(whole, accumulate=2):
                        sentinel.backward(model(batch["x"]).square().mean())
                        sentinel.step(max_norm)
        for windows in [] if watched else [[[0, 1], [2, 3]], *3 * [[[0, 1], [2, 3], [4]]]]:
            for window in windows:
                for number in window:
                    (model(whole[number]["x"]).square().mean() / 2).backward()
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        outcomes.append({**model.state_dict(), "rate": torch.tensor(optimizer.param_groups[0]["lr"])})
    assert differences(*outcomes) == []


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_window_is_stepped_too_if_the_sampler_leaves_the_last_batch_out(tmp_path, shuffle):
    data = rows(bad=[20, 21, 22, 23])
    order = RandomSampler(data) if shuffle else SequentialSampler(data)
    loader = DataLoader(data, batch_sampler=SkipBatches(BatchSampler(order, 1, drop_last=True)))
    sentinel, model = sentinel_for(tmp_path, NanCallback(), Skip(max_skips=10))
    with sentinel:
        epoch(sentinel, model, loader)
        for _ in range(3):
            before = sentinel.applied_steps
            seen = epoch(sentinel, model, loader, accumulate=3)
            assert len(seen) == 20
            assert sentinel.applied_steps == before + 7


def test_a_rollback_at_the_end_of_such_a_window_goes_on_in_the_epoch(tmp_path):
    sentinel, model = sentinel_for(tmp_path, NanCallback(), Rollback(every=1, confirm_after=0, data="replay"))
    loader = batches(bad=[21])
    asked = []

    def look(event):
        asked.append(event.step)
        wanted = event.step == 5 and asked.count(5) == 1
        return Finding(kind=Kind.SPIKE, value=torch.tensor(wanted), action=Action.ROLLBACK)

    with sentinel:
        sentinel.on(BeforeClip, look)
        epoch(sentinel, model, loader, accumulate=2)  # steps 0 and 1; the third fails
        seen = epoch(sentinel, model, loader, accumulate=2)
        assert asked == [0, 1, 2, 3, 4, 5]
        assert [i.outcome for i in sentinel.incidents] == [Outcome.SKIPPED, Outcome.ROLLED_BACK]
        assert [ids[0] for ids in seen] == [0, 4, 8, 12, 16]  # and the last one led to it, and is left out
        assert sentinel.data_position == {"epoch": 2, "batch": 0, "batches": 12}
        assert sentinel.applied_steps == 2 + 2
        assert len(epoch(sentinel, model, loader, accumulate=2)) == 5
        assert sentinel.applied_steps == 2 + 2 + 3


def test_random_content_is_recognised_by_its_ids(tmp_path):
    class Noisy(IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for row in rows(bad=[9]):
                yield {"x": row["x"] + 0.01 * torch.randn(WIDTH), "id": row["id"]}

    sentinel, model = sentinel_for(tmp_path)
    with sentinel:
        epoch(sentinel, model, DataLoader(Noisy(), batch_size=4))
        assert [8, 9, 10, 11] not in epoch(sentinel, model, DataLoader(Noisy(), batch_size=4))
    assert len(sentinel.incidents) == 1


def test_a_loader_that_gives_one_batch_for_ever_goes_on_after_a_glitch(tmp_path):
    sentinel, model = sentinel_for(tmp_path)
    (batch, *_) = batches()
    with sentinel:
        for number, one in enumerate(sentinel.steps([batch] * 8)):
            loss = model(one["x"]).square().mean()
            sentinel.backward(loss * float("nan") if number == 2 else loss)
            sentinel.step()
    assert sentinel.applied_steps == 7


def test_a_loader_with_nothing_but_bad_data_ends_as_ever(tmp_path):
    def bad_for_ever() -> Iterator[dict[str, Tensor]]:
        while True:
            yield batches(bad=[1])[0]

    sentinel, model = sentinel_for(tmp_path, NanCallback(), Skip(max_skips=3))
    with pytest.raises(TrainingAborted), sentinel:
        epoch(sentinel, model, bad_for_ever())
    assert len(sentinel.incidents) == 4


def test_ids_that_every_batch_has_tell_nothing(tmp_path):
    """Some programs number the records of each batch anew: the other batches are not to be left out."""
    sentinel, model = sentinel_for(tmp_path)
    loader = [{**batch, "id": torch.arange(4)} for batch in batches(bad=[9])]
    with sentinel:
        assert len(epoch(sentinel, model, loader)) == 6
        assert len(epoch(sentinel, model, loader)) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_it_works_with_loaders_of_every_kind(tmp_path, workers):
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            info = torch.utils.data.get_worker_info()
            data = rows(bad=[9])
            yield from data if info is None else data[info.id :: info.num_workers]

    for data in (rows(bad=[9]), Stream()):
        folder = tmp_path / type(data).__name__
        sentinel, model = sentinel_for(folder)
        loader = DataLoader(data, batch_size=4, num_workers=workers)  # type: ignore[arg-type, var-annotated]
        with sentinel:
            first, second = epoch(sentinel, model, loader), epoch(sentinel, model, loader)
        assert len(first) == 6
        assert second == [ids for ids in first if 9 not in ids]
        assert sentinel.data_position["batches"] == 12


def test_remembering_can_be_turned_off(tmp_path):
    sentinel, model = sentinel_for(tmp_path, NanCallback(), Skip(remember=False))
    loader = batches(bad=[9])
    with sentinel:
        assert epoch(sentinel, model, loader) == epoch(sentinel, model, loader)
    assert not (tmp_path / FILE).exists()
    with pytest.raises(ConfigurationError, match="give_up_after"):
        Skip(give_up_after=0)


def test_a_transient_fault_of_the_hardware_does_not_condemn_the_batch(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    sentinel = Sentinel(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[NanCallback()],
        run_dir=tmp_path,
        forward=lambda m, batch: m(batch["x"]).square().mean(),
    )
    with sentinel:
        for number, batch in enumerate(sentinel.steps(batches())):
            sentinel.backward(model(batch["x"]).square().mean())
            if number == 2:
                model.weight.grad.view(torch.int32)[0, 1] = 0x7F800000  # one element of a finished gradient
            sentinel.step()
    (incident,) = sentinel.incidents
    assert incident.diagnosis is not None
    condemned = sentinel._watch.run.skipped.entries
    assert bool(condemned) is (incident.diagnosis.cause != "hardware")


def test_nothing_is_looked_at_while_nothing_on_the_list_concerns_the_epoch(tmp_path, monkeypatch):
    looked: list[Any] = []
    monkeypatch.setattr("gradsentinel.data.records._tensor", lambda *given: looked.append(given) or iter(()))
    sentinel, model = sentinel_for(tmp_path)
    with sentinel:
        epoch(sentinel, model, batches())
        sentinel._watch.run.skipped.add(entry(epoch=7), give_up_after=3)
        epoch(sentinel, model, batches())
        assert not looked
        sentinel._watch.run.skipped.add(entry("cc-dd", epoch=2, batch=3), give_up_after=3)
        epoch(sentinel, model, batches())
        assert looked
    assert not (tmp_path / FILE).exists()


# -- the list itself -------------------------------------------------------------------------------


def listed(folder: Any) -> SkippedBatches:
    return SkippedBatches(RunDirectory(folder), LocalConsensus())


def entry(fingerprint: str = "aa-bb", **more: Any) -> SkippedBatch:
    part = Part(rank=0, guilty=True, fingerprint=fingerprint, ids=(3, "x"), indices=(7, 8))
    return SkippedBatch(**{"epoch": 0, "batch": 3, "step": 3, "incident": "i", "parts": (part,), **more})


def test_the_list_comes_back_as_it_was(tmp_path):
    mine = listed(tmp_path)
    mine.add(entry(for_good=True), give_up_after=3)
    mine.add(entry("cc-dd"), give_up_after=3)
    mine.save()
    again = listed(tmp_path)
    again.load()
    assert again.entries == mine.entries[:1]
    again.take_up()
    assert again.entries == mine.entries
    assert [path.name for path in tmp_path.iterdir()] == [FILE]  # no temporary file is left


def test_what_is_left_out_for_an_epoch_is_forgotten_in_the_end(tmp_path):
    mine = listed(tmp_path)
    mine.add(entry("for-good", for_good=True), give_up_after=3)
    for number in range(1100):
        mine.add(entry(f"a-{number}"), give_up_after=3)
    kept = [one.parts[0].fingerprint for one in mine.entries]
    assert len(kept) == 1001
    assert kept[0] == "for-good"
    assert kept[-1] == "a-1099"


def test_a_newer_list_is_refused_and_a_damaged_one_reported(tmp_path, caplog):
    (tmp_path / FILE).write_text('{"schema": 99, "batches": []}')
    with pytest.raises(StoreError, match="newer GradSentinel"):
        listed(tmp_path).load()
    for damaged in (
        "",
        "{",
        '{"schema": 1}',
        '{"schema": 1, "batches": [{}]}',
        '{"schema": 1, "batches": [1]}',
    ):
        (tmp_path / FILE).write_text(damaged)
        with caplog.at_level(logging.ERROR, "gradsentinel"):
            mine = listed(tmp_path)
            mine.load()
        assert mine.entries == []
        assert "cannot be read" in caplog.text
        caplog.clear()


def test_a_disk_that_refuses_leaves_the_list_in_memory(tmp_path, caplog):
    mine = listed(tmp_path / "file" / "run")
    (tmp_path / "file").write_text("in the way")
    mine.add(entry(), give_up_after=3)
    with caplog.at_level(logging.ERROR, "gradsentinel"):
        mine.save()
    assert "in memory only" in caplog.text
    assert len(mine.entries) == 1


# -- the sampler -----------------------------------------------------------------------------------


def sampled(data: Any, *, shuffle: bool = False, seed: int = 0, **settings: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    order = RandomSampler(data, generator=generator) if shuffle else SequentialSampler(data)
    return DataLoader(data, batch_sampler=SkipBatches(BatchSampler(order, 4, drop_last=True)), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_records_are_left_out_wherever_a_shuffle_puts_them(tmp_path, workers):
    sentinel, model = sentinel_for(tmp_path)
    loader = sampled(rows(bad=[9, 17]), shuffle=True, num_workers=workers)
    with sentinel:
        epoch(sentinel, model, loader)
        later = [epoch(sentinel, model, loader) for _ in range(3)]
    assert 1 <= len(sentinel.incidents) <= 2
    for seen in later:
        drawn = [number for ids in seen for number in ids]
        assert set(drawn) == {number for number in range(SIZE) if number not in (9, 17)}
        assert [len(ids) for ids in seen] == [4] * 6  # in a bad one's place is a good one of its batch
    assert sentinel.data_position == {"epoch": 4, "batch": 0, "batches": 24}


def test_the_sampler_counts_what_it_leaves_out(tmp_path):
    callbacks = [NanCallback(), MagnitudeCallback(max_global_norm=1e3, action="skip"), Skip(give_up_after=1)]
    sentinel, model = sentinel_for(tmp_path, *callbacks)
    loader = sampled(rows(bad=[9, 22], value=1e4))
    with sentinel:
        first = epoch(sentinel, model, loader)
        positions, second = [], []
        for batch in sentinel.steps(loader):
            positions.append(sentinel.data_position["batch"])
            second.append(batch["id"].tolist())
            sentinel.backward(model(batch["x"]).square().mean())
            sentinel.step()
        assert positions == [1, 2, 4, 5]
        assert second == [first[0], first[1], first[3], first[4]]
        assert sentinel.data_position == {"epoch": 2, "batch": 0, "batches": 12}
    assert [one["ranks"][0]["indices"] for one in on_disk(tmp_path)] == [[8, 9, 10, 11], [20, 21, 22, 23]]


def test_a_resumed_epoch_goes_on_behind_what_the_sampler_left_out(tmp_path):
    data = rows(bad=[1], value=1e4)

    def watch() -> list[Any]:
        return [NanCallback(), MagnitudeCallback(max_global_norm=1e3, action="skip"), Skip(give_up_after=1)]

    first, model = sentinel_for(tmp_path, *watch(), Rollback(every=2, confirm_after=0, on_disk=3))
    epoch(first, model, sampled(data))
    with pytest.raises(ZeroDivisionError), first:  # in the fifth batch of the epoch: the first was left out
        crash(first, model, sampled(data), after=4)
    again, model = sentinel_for(tmp_path, *watch(), resume="auto")
    with again:
        done = again.data_position["batch"]
        seen = epoch(again, model, sampled(data))
    expected = [list(range(start, start + 4)) for start in range(0, SIZE, 4)]
    assert done >= 3
    assert seen == expected[done:]
    assert again.data_position == {"epoch": 2, "batch": 0, "batches": 12}


def test_without_a_sentinel_the_sampler_reads_the_list(tmp_path):
    sentinel, model = sentinel_for(tmp_path)
    data = rows(bad=[9])
    with sentinel:
        epoch(sentinel, model, sampled(data))
    order = BatchSampler(SequentialSampler(data), 4, drop_last=True)
    drawn = list(SkipBatches(order, run_dir=tmp_path))
    assert drawn[2] == [8, 8, 10, 11]
    assert [ids for number, ids in enumerate(drawn) if number != 2] == [
        ids for number, ids in enumerate(order) if number != 2
    ]
    assert list(SkipBatches(order, run_dir=tmp_path / "nothing")) == list(order)


def test_the_epoch_is_passed_on(tmp_path):
    class Order(SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    order = Order(range(8))
    SkipBatches(BatchSampler(order, 4, drop_last=False)).set_epoch(3)
    assert order.epoch == 3


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata, in newer versions of torch
class TestTorchdata:
    """torchdata's StatefulDataLoader, which knows by itself where it is."""

    @pytest.fixture(autouse=True)
    def stateful(self):
        return pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("with_sampler", [False, True])
    def test_a_resumed_epoch_goes_on_without_the_bad_batch(self, tmp_path, stateful, workers, with_sampler):
        data = rows(bad=[9], value=1e4)

        def loader() -> Any:
            order = BatchSampler(SequentialSampler(data), 4, drop_last=True)
            return stateful.StatefulDataLoader(
                data, batch_sampler=SkipBatches(order) if with_sampler else order, num_workers=workers
            )

        def watch() -> list[Any]:
            return [NanCallback(), MagnitudeCallback(max_global_norm=1e3, action="skip")]

        first, model = sentinel_for(tmp_path, *watch(), Rollback(every=2, confirm_after=0, on_disk=3))
        with pytest.raises(ZeroDivisionError), first:
            crash(first, model, loader(), after=3)
        again, model = sentinel_for(tmp_path, *watch(), resume="auto")
        with again:
            assert again.data_position["batch"] == 2
            seen = epoch(again, model, loader())
        assert seen == [list(range(start, start + 4)) for start in (12, 16, 20)]
        assert again.incidents == ()
        assert again.data_position == {"epoch": 1, "batch": 0, "batches": 6}
