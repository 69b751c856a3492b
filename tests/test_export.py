"""A known-good state as a torch.distributed.checkpoint: whole, or refused."""

import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from typer.testing import CliRunner

from gradsentinel import ArchiveError, NanCallback, Rollback
from gradsentinel.cli import app
from gradsentinel.state import export as export_module
from gradsentinel.state.archive import read_archive, write_archive
from gradsentinel.state.export import export, saved_states
from gradsentinel.state.saved_states import SNAPSHOT_KIND
from loops import build, differences, finish, make_batches, train_by_hand, train_watched

pytestmark = pytest.mark.filterwarnings(
    "ignore:TypedStorage is deprecated"
)  # torch 2.6 says it of its own checkpoints


@pytest.fixture
def run(run_dir):
    """Train for 12 steps; the states of steps 6 and 9 are on disk."""
    run = build(scheduler="cosine", ema=True)
    callbacks = [NanCallback(), Rollback(every=3, confirm_after=1, on_disk=2)]
    with run.sentinel(callbacks, run_dir=run_dir) as sentinel:
        finish(train_watched(run, sentinel, make_batches(12)))
    return run


def load(training, path):
    """Load it with the tools that torch has for that."""
    model, optimizer = get_state_dict(training.model, training.optimizers)
    state = {"model": model, "optimizer": optimizer}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            training.model,
            training.optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


@pytest.mark.parametrize(("step", "steps"), [(None, 9), (6, 6)])
def test_what_torch_loads_is_the_state_of_that_step(run, run_dir, tmp_path, step, steps):
    assert export(run_dir, tmp_path / "out", step=step).step == steps
    loaded, reference = build(scheduler="cosine"), build(scheduler="cosine")
    load(loaded, tmp_path / "out")
    train_by_hand(reference, make_batches(steps))
    mine, theirs = loaded.state(), reference.state()
    for part in ("parameters", "buffers", "optimizers"):
        assert differences(mine[part], theirs[part]) == []


def test_schedulers_averages_and_the_place_in_the_data_are_there_too(run, run_dir, tmp_path):
    export(run_dir, tmp_path / "out")
    metadata = dcp.FileSystemReader(tmp_path / "out").read_metadata()
    keys = set(metadata.state_dict_metadata)
    assert {"step", "data.batches", "optimizer.param_groups.0.lr"} <= keys
    assert "scheduler.0.last_epoch" in keys
    assert "extra.ema.n_averaged" in keys


def test_the_command(run, run_dir, tmp_path):
    out = tmp_path / "out"
    listed = CliRunner().invoke(app, ["snapshots", "list", str(run_dir), "--json"])
    assert [(one["step"], one["ranks"]) for one in json.loads(listed.output)] == [(6, 1), (9, 1)]
    done = CliRunner().invoke(app, ["snapshots", "export", str(run_dir), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "The state of step 9, of 1 ranks" in done.output
    assert (out / ".metadata").is_file()
    again = CliRunner().invoke(app, ["snapshots", "export", str(run_dir), "-o", str(out)])
    assert again.exit_code == 2
    assert "exists already" in again.output


def test_what_is_not_there_is_told(run, run_dir, tmp_path):
    with pytest.raises(ArchiveError, match="no state of step 7; there are: 6, 9"):
        export(run_dir, tmp_path / "out", step=7)
    with pytest.raises(ArchiveError, match="holds no state that all ranks have"):
        export(tmp_path / "elsewhere", tmp_path / "out")


def test_a_damaged_state_is_not_exported(run, run_dir, tmp_path):
    (file,) = (run_dir / "snapshots").glob("step-000000009-rank0/state.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArchiveError, match="does not match its checksum"):
        export(run_dir, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == []


def test_what_is_read_back_otherwise_gets_no_name(run, run_dir, tmp_path, monkeypatch):
    known = export_module._sum_of
    calls = iter(range(10_000))
    monkeypatch.setattr(export_module, "_sum_of", lambda tensor: known(tensor) ^ (next(calls) == 3))
    with pytest.raises(ArchiveError, match="is not read back as it was written"):
        export(run_dir, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def two_ranks(run_dir, change):
    """Make the state of step 9 one of two ranks, the second of which is changed."""
    path = run_dir / "snapshots" / "step-000000009-rank0"
    state, meta = read_archive(path, kind=SNAPSHOT_KIND)
    meta = {**meta, "world_size": 2}
    path.rename(path.with_name("before"))
    write_archive(path, state, meta, kind=SNAPSHOT_KIND)
    change(state)
    write_archive(path.with_name("step-000000009-rank1"), state, meta, kind=SNAPSHOT_KIND)


def test_replicas_are_written_once_and_buffers_are_the_first_ranks(run, run_dir, tmp_path):
    two_ranks(run_dir, lambda state: state["buffers"]["norm.running_mean"].add_(1.0))
    assert len(export(run_dir, tmp_path / "out").paths) == 2
    loaded, reference = build(), build(scheduler="cosine")
    load(loaded, tmp_path / "out")
    train_by_hand(reference, make_batches(9))
    assert differences(loaded.state()["buffers"], reference.state()["buffers"]) == []


def test_parts_of_which_nothing_says_where_they_belong_are_refused(run, run_dir, tmp_path):
    two_ranks(run_dir, lambda state: state["parameters"]["head.weight"].add_(1.0))
    with pytest.raises(ArchiveError, match=r"ranks 0 and 1 hold different values of 'head\.weight'"):
        export(run_dir, tmp_path / "out")


def test_a_state_that_one_rank_lacks_is_none(run, run_dir):
    two_ranks(run_dir, lambda state: None)
    (run_dir / "snapshots" / "step-000000009-rank1").rename(run_dir / "snapshots" / "gone")
    assert [state.step for state in saved_states(run_dir)] == [6]


def test_a_model_of_every_kind_of_number(run_dir, tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
            self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.register_buffer("mask", torch.tensor([True, False, True, True]))

        def forward(self, x):
            return (x * self.narrow.float() * self.wide.float() * self.mask).sum() * self.scalar

    torch.manual_seed(0)
    run = build()
    run.model = Odd()
    run.optimizers = [torch.optim.Adam(run.model.parameters(), 1e-2)]
    with run.sentinel([NanCallback(), Rollback(every=2, confirm_after=1, on_disk=1)], run_dir=run_dir) as s:
        for batch in s.steps([torch.randn(4) for _ in range(4)]):
            s.backward(run.model(batch))
            s.step()
            if s.step_count == 2:
                expected = {name: value.clone() for name, value in run.model.state_dict().items()}
    export(run_dir, tmp_path / "out")
    other = build()
    other.model = Odd()
    other.optimizers = [torch.optim.Adam(other.model.parameters(), 1e-2)]
    model = {"model": other.model.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(model, checkpoint_id=tmp_path / "out")
    assert differences(other.model.state_dict(), expected) == []
