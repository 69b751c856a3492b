"""Which records are drawn after a restart or a rollback: those that were missing, in the order they had."""

import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from gradsentinel import NanCallback, Rollback, Sentinel, SkipBatches

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata, in newer torch
DATA = torch.arange(12.0).reshape(12, 1)
STEPS = 6
"""Of an epoch."""


def sampler(*, generator: bool = False) -> SkipBatches:
    own = torch.Generator().manual_seed(3) if generator else None
    return SkipBatches(BatchSampler(RandomSampler(DATA, generator=own), 2, drop_last=False))


def stateful(**given: Any) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(DATA, **given)


def through_torchdata(**given: Any) -> Any:
    theirs = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    inner = theirs.BatchSampler(theirs.RandomSampler(DATA), 2, drop_last=False)
    return stateful(batch_sampler=SkipBatches(inner), **given)


LOADERS = {
    "shuffled": lambda **given: DataLoader(DATA, batch_size=2, shuffle=True, **given),
    "skipping": lambda **given: DataLoader(DATA, batch_sampler=sampler(), **given),
    "skipping, with a generator": lambda **given: DataLoader(
        DATA, batch_sampler=sampler(generator=True), **given
    ),
    "stateful": lambda **given: stateful(batch_size=2, shuffle=True, **given),
    "stateful, torch's sampler": lambda **given: stateful(sampler=RandomSampler(DATA), batch_size=2, **given),
    "stateful, skipping": lambda **given: stateful(batch_sampler=sampler(), **given),
    "stateful, skipping, with a generator": lambda **given: stateful(
        batch_sampler=sampler(generator=True), **given
    ),
    "stateful, skipping, torchdata's samplers": through_torchdata,
}
WORKERS = {"workers": {"num_workers": 1}, "persistent": {"num_workers": 1, "persistent_workers": True}}


def life(
    make: Callable[[], Any],
    folder: Path,
    *,
    seed: int = 0,
    until: int | None = None,
    bad: int | None = None,
    every: int = 1,
    on_disk: int = 0,
) -> tuple[list[tuple[int, ...]], Any]:
    """Train two epochs; stop after so many steps in all, or put a NaN into the weights after one, once."""
    torch.manual_seed(seed)
    model, loader = nn.Linear(1, 1), make()
    made: list[tuple[int, ...]] = []
    watch = [
        NanCallback(state_every=1),
        Rollback(
            every=every,
            confirm_after=0,
            keep=9,
            on_disk=on_disk,
            data="go_on" if bad is None else "replay",
        ),
    ]
    with Sentinel(
        model, torch.optim.SGD(model.parameters(), 1e-4), callbacks=watch, run_dir=folder, resume="auto"
    ) as sentinel:
        first = sentinel.step_count
        for _ in range(sentinel.data_position["epoch"], 2):
            for batch in sentinel.steps(loader):
                sentinel.backward(model(batch).mean())
                before = sentinel.step_count
                sentinel.step()
                if sentinel.step_count > before:
                    made.append(tuple(int(number) for number in batch.flatten()))
                else:
                    del made[sentinel.step_count - first :]
                if sentinel.step_count == until:
                    return made, model.weight.item()
                if sentinel.step_count == bad:
                    bad = None
                    model.weight.data.fill_(torch.nan)
    return made, model.weight.item()


def restarts_alike(kind: str, given: dict[str, Any], until: int, folder: Path) -> None:
    make = partial(LOADERS[kind], **given)
    expected, weight = life(make, folder / "whole")
    first, _ = life(make, folder / "run", until=until, on_disk=2)
    rest, again = life(make, folder / "run", seed=1, on_disk=2)
    assert first + rest == expected
    assert again == weight
    for epoch in (expected[:STEPS], expected[STEPS:]):
        assert sorted(itertools.chain(*epoch)) == list(range(len(DATA)))


@pytest.mark.slow
@pytest.mark.timeout(400)  # workers are started for each example
@settings(max_examples=10)
@given(st.sampled_from(sorted(LOADERS)), st.integers(1, 2 * STEPS - 1))
def test_after_a_restart_come_the_records_that_were_missing(kind, until):
    folder = Path(tempfile.mkdtemp())
    try:
        restarts_alike(kind, {}, until, folder)
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "until"), [("workers", 2), ("persistent", STEPS + 3)])
@pytest.mark.parametrize("kind", ["shuffled", "skipping", "stateful, skipping"])
def test_after_a_restart_with_workers(kind, workers, until, tmp_path):
    restarts_alike(kind, WORKERS[workers], until, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)  # workers are started for each example
@settings(max_examples=10)
@given(
    st.sampled_from([kind for kind in sorted(LOADERS) if "stateful" not in kind]),
    st.integers(1, 2 * STEPS - 1),
    st.integers(1, 4),
)
def test_a_replay_draws_the_same_records_again(kind, bad, every):
    folder = Path(tempfile.mkdtemp())
    try:
        expected = life(LOADERS[kind], folder / "whole")
        assert life(LOADERS[kind], folder / "run", bad=bad, every=every) == expected
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "bad"), [("workers", STEPS + 1), ("persistent", 5)])
@pytest.mark.parametrize("kind", ["shuffled", "skipping"])
def test_a_replay_with_workers(kind, workers, bad, tmp_path):
    make = partial(LOADERS[kind], **WORKERS[workers])
    expected = life(make, tmp_path / "whole")
    assert life(make, tmp_path / "run", bad=bad, every=3) == expected


def test_without_a_sentinel_the_loader_s_state_holds_the_order():
    loader = LOADERS["stateful, skipping"]()
    torch.manual_seed(4)
    drawn = iter(loader)
    first = [next(drawn).flatten().tolist() for _ in range(2)]
    state = loader.state_dict()
    rest = [batch.flatten().tolist() for batch in drawn]
    torch.manual_seed(5)
    other = LOADERS["stateful, skipping"]()
    other.load_state_dict(state)
    assert [batch.flatten().tolist() for batch in other] == rest
    assert sorted(itertools.chain(*first, *rest)) == list(range(len(DATA)))


def test_an_order_that_cannot_be_had_again_is_told(tmp_path, caplog):
    """torch's own batch sampler has no state, and torchdata draws from it when the order is gone."""

    def loader() -> Any:
        return stateful(batch_sampler=BatchSampler(RandomSampler(DATA), 2, drop_last=False))

    life(loader, tmp_path, until=2, on_disk=2)
    with caplog.at_level(logging.WARNING, logger="gradsentinel"):
        life(loader, tmp_path)
    assert "in another order than before the restart" in caplog.text
    assert "SkipBatches" in caplog.text
