"""States that all ranks finish together, through torch's own save: none has one that another lacks."""

import errno
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import RankFailedError, run_ranks
from test_divided_anew import STEPS, batches, build, contents

from gradsentinel import ArchiveError, ConfigurationError, NanCallback, Rollback, Sentinel
from gradsentinel.state import archive, saved_states, scribe
from gradsentinel.state.together import Together

pytestmark = pytest.mark.multiprocess


class Heard(logging.Handler):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("gradsentinel").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.lines.append(record.getMessage())


def train(rank: int, run_dir: Path, ranks: int, kind: str, count: int = STEPS + 2) -> dict[str, Any]:
    heard = Heard()
    model, called, optimizer, scheduler = build(ranks, kind)
    watch = [NanCallback(), Rollback(every=2, confirm_after=1, on_disk=2, together=True)]
    found: dict[str, Any] = {}
    with Sentinel(
        called,
        optimizer,
        callbacks=watch,
        scheduler=scheduler,
        run_dir=run_dir,
        resume="auto",
        timeout=20.0,
    ) as sentinel:
        states = sentinel._watch.run.states
        found["first"] = sentinel.step_count
        found["start"] = contents(model, optimizer, scheduler) if sentinel.step_count else None
        for batch in sentinel.steps(batches(count)):
            sentinel.backward(called(batch).square().mean())
            sentinel.step()
            states.finish()
            if sentinel.step_count == STEPS:
                found["end"] = contents(model, optimizer, scheduler)
        found["together"] = bool(states._scribe.together)
        found["incidents"] = [incident.message for incident in sentinel.incidents]
    found["final"] = contents(model, optimizer, scheduler)
    found["saved"] = sorted(path.name for path in (run_dir / "snapshots").iterdir())
    found["heard"] = [line for line in heard.lines if "dropped" in line]
    return found


def named(*steps: int, ranks: int = 2) -> list[str]:
    return [f"step-{step:09d}-rank{rank}" for step in steps for rank in range(ranks)]


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
@pytest.mark.parametrize("after", [1, 2])
def test_a_run_goes_on_from_them_with_any_number_of_ranks(after, kind, tmp_path):
    saved = run_ranks(train, 2, tmp_path, tmp_path / "run", 2, kind)
    assert [one["together"] for one in saved] == [True, True]
    assert saved[0]["saved"] == named(2, 4)
    if after == 1:
        taken = [train(0, tmp_path / "run", 1, kind, STEPS + 4)]
    else:
        taken = run_ranks(train, 2, tmp_path, tmp_path / "run", 2, kind, STEPS + 4)
    for one in taken:
        assert one["first"] == STEPS
        assert one["start"] == saved[0]["end"]


def test_the_training_is_the_same_bit_for_bit(tmp_path):
    together = run_ranks(train, 2, tmp_path, tmp_path / "run", 2, "ddp")
    init = Rollback.__init__
    Rollback.__init__ = lambda self, **given: init(self, **{**given, "together": False})  # type: ignore[method-assign,misc,assignment]
    try:
        alone = run_ranks(train, 2, tmp_path, tmp_path / "alone", 2, "ddp")
    finally:
        Rollback.__init__ = init  # type: ignore[method-assign]
    assert not alone[0]["together"]
    assert together[0]["final"] == alone[0]["final"]
    for name in named(2, 4):
        files = [tmp_path / run / "snapshots" / name / "state.safetensors" for run in ("run", "alone")]
        assert files[0].read_bytes() == files[1].read_bytes()


def train_on_a_full_disk(rank: int, run_dir: Path) -> dict[str, Any]:
    """The disk of rank 1 refuses its first state."""
    write, refused = archive.write_tensor_file, []

    def refuse(path: Path, *args: Any) -> Any:
        if rank == 1 and not refused:
            refused.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *args)

    archive.write_tensor_file = refuse
    return train(rank, run_dir, 2, "fsdp2")


def test_what_one_rank_cannot_write_no_rank_has_and_the_next_all_have(tmp_path):
    for one in run_ranks(train_on_a_full_disk, 2, tmp_path, tmp_path / "run"):
        assert one["saved"] == named(4)
        assert one["together"]
        assert one["heard"] == []
        assert any("No space left on device" in message for message in one["incidents"])


def train_with_a_late_rank(rank: int, run_dir: Path) -> dict[str, Any]:
    """Rank 1 takes longer for its first state than the others wait."""
    saved_states._PATIENCE = 6.0  # so that the others wait 3 seconds
    write, late = scribe.write_archive, []

    def sleep(*args: Any, **kwargs: Any) -> Any:
        if rank == 1 and not late:
            late.append(True)
            time.sleep(4.0)
        return write(*args, **kwargs)

    scribe.write_archive = sleep  # type: ignore[assignment]
    return train(rank, run_dir, 2, "ddp")


def test_a_rank_that_is_late_costs_that_state_and_no_more(tmp_path):
    for one in run_ranks(train_with_a_late_rank, 2, tmp_path, tmp_path / "run"):
        assert one["saved"] == named(4)
        assert not one["together"], "each rank writes by itself"
        assert len(one["heard"]) == 1


def save_and_die(rank: int, folder: Path, mortal: int) -> dict[str, Any]:
    together = Together(timeout=30.0)

    def write(path: Path) -> None:
        path.mkdir()
        if rank == mortal:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    start = time.monotonic()
    try:
        together.save(folder / f"step-1-rank{rank}", write)
    except ArchiveError as error:
        told = f"{error}"
    waited = time.monotonic() - start
    (folder / "survivor").write_text(f"{waited < 20} {bool(together)} {told}")
    return {}


@pytest.mark.parametrize("mortal", [0, 1])
def test_a_rank_that_is_killed_while_it_writes_leaves_no_state_and_hangs_nobody(mortal, tmp_path):
    (tmp_path / "states").mkdir()
    with pytest.raises(RankFailedError):
        run_ranks(save_and_die, 2, tmp_path, tmp_path / "states", mortal)
    assert (tmp_path / "states" / "survivor").read_text().startswith("True False cannot write the archive")
    assert list((tmp_path / "states").glob("step-*")) == []


def test_alone_it_changes_nothing(tmp_path):
    assert train(0, tmp_path / "run", 1, "ddp")["saved"] == named(2, 4, ranks=1)


def test_what_it_is_about_has_to_be_there():
    with pytest.raises(ConfigurationError, match="together=True needs on_disk=1 or more"):
        Rollback(together=True)
