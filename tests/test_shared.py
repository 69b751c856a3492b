"""Memory that the process which writes sees as well: any tensor lies in it, and nothing is handed over."""

import gc
import os
import sys

import pytest
import torch

from gradsentinel import NanCallback, Rollback, Sentinel
from gradsentinel.state import scribe, writer
from gradsentinel.state.archive import read_archive, write_archive
from gradsentinel.state.shared import SharedMemory
from gradsentinel.state.staging import Staging
from gradsentinel.state.writer import Writer
from loops import fingerprint

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no such memory")

LARGE = {
    "plain": torch.randn(300, 500),
    "transposed": torch.randn(300, 500).t(),
    "channels last": torch.randn(8, 16, 40, 40).to(memory_format=torch.channels_last),
    "every second": torch.randn(100_000)[::2],
    "complex": torch.randn(20_000, dtype=torch.complex64),
    "bool": torch.rand(100_000) > 0.5,
    "bfloat16": torch.randn(70_000).bfloat16(),
    "float8": torch.randn(100_000).to(torch.float8_e4m3fn),
    "whole numbers": torch.arange(30_000),
    "no whole pages": torch.randn(20_001),
}


class Told(Writer):
    """Counts the bytes that go through the pipe."""

    piped = 0

    def _put(self, pieces):
        self.piped += sum(map(len, pieces))
        super()._put(pieces)


def copies(memory, tensors):
    found = {}
    for name, tensor in tensors.items():
        found[name] = memory.tensor_like(tensor)
        found[name].copy_(tensor)
    return found


@pytest.mark.parametrize("kind", LARGE)
def test_it_is_like_the_tensors_own(kind):
    memory, like = SharedMemory(), LARGE[kind]
    here = memory.tensor_like(like)
    model = torch.empty_like(like)
    assert (here.shape, here.stride(), here.dtype) == (model.shape, model.stride(), model.dtype)
    assert here.untyped_storage().nbytes() == model.untyped_storage().nbytes(), "saved with its neighbours"
    assert fingerprint(here.copy_(like)) == fingerprint(like)


def test_tensors_do_not_overlap_and_outlive_it():
    memory = SharedMemory()
    kept = [copies(memory, LARGE) for _ in range(20)]
    large = memory.tensor_like(torch.empty(30_000_000))  # larger than a segment: one of its own
    large.fill_(7.0)
    assert len(memory.segments) > 1
    del memory
    gc.collect()
    for one in kept:
        for name, value in one.items():
            assert fingerprint(value) == fingerprint(LARGE[name])


def test_what_is_small_is_not_worth_it():
    assert SharedMemory().tensor_like(torch.randn(100)) is None


@pytest.mark.parametrize("error", [OSError("no descriptor is left"), None])
def test_where_there_is_none_the_snapshot_is_taken_all_the_same(monkeypatch, error):
    def none(name):
        raise error

    if error is None:
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", none)
    staging = Staging()
    staging.share()
    kept = staging.begin().keep(LARGE["plain"])
    assert kept.shape == LARGE["plain"].shape
    assert staging.shared.segments == ()


def test_the_files_are_the_same_and_only_what_is_elsewhere_is_handed_over(tmp_path):
    memory = SharedMemory()
    state = {**copies(memory, LARGE), "elsewhere": torch.randn(50_000), "small": torch.arange(3)}
    turned = sum(state[name].nbytes for name in ("transposed", "channels last"))  # written as a copy
    with Told(memory) as process:
        later = SharedMemory.tensor_like(memory, torch.empty(20_000_000)).fill_(3.0)  # a segment it never saw
        state["later"] = later
        write_archive(tmp_path / "process", state, {}, kind="test", verify=True, writer=process)
        assert process.piped < later.nbytes + turned + 300_000
    write_archive(tmp_path / "thread", state, {}, kind="test")
    for entry in (tmp_path / "thread").iterdir():
        assert (tmp_path / "process" / entry.name).read_bytes() == entry.read_bytes()
    found, _ = read_archive(tmp_path / "process", kind="test")
    for name, value in state.items():
        assert fingerprint(found[name]) == fingerprint(value.contiguous()), name


def test_what_is_let_go_takes_no_memory():
    staging = Staging()
    staging.share()

    def held():
        return sum(os.fstat(segment.descriptor).st_blocks * 512 for segment in staging.shared.segments)

    class Owner:
        pass

    def take(*tensors):
        owner, shot = Owner(), staging.begin()
        owner.kept = [shot.keep(tensor) for tensor in tensors]
        owner.pending = shot.finish(owner)
        return owner

    first = take(torch.ones(1_000_000))
    before = held()
    del first
    second = take(torch.ones(100_000))
    third = take(torch.ones(100_000))
    assert before >= 4_000_000
    assert held() < 1_000_000
    assert torch.equal(second.kept[0], torch.ones(100_000))
    assert torch.equal(third.kept[0], torch.ones(100_000))


def test_a_forked_child_does_not_write_into_its_parents_snapshots():
    staging = Staging()
    staging.share()

    class Owner:
        pass

    def take(value):
        owner, shot = Owner(), staging.begin()
        owner.kept = shot.keep(torch.full((100_000,), value))
        owner.pending = shot.finish(owner)
        return owner

    free, used = take(1.0).kept, take(1.0)  # the second takes the memory of the first
    assert free.data_ptr() == used.kept.data_ptr()
    free = take(1.0).kept
    child = os.fork()
    if not child:
        first = take(2.0)
        del used  # the parent's: not to be used again, either
        second = take(2.0)
        os._exit(int(not torch.equal(first.kept, second.kept)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(free, torch.ones(100_000))
    assert torch.equal(used.kept, torch.ones(100_000))
    assert take(3.0).kept.data_ptr() == free.data_ptr()


@pytest.mark.skipif(sys.platform != "linux", reason="counts the bytes of a pipe of Linux")
def test_a_run_hands_over_next_to_nothing(tmp_path, monkeypatch):
    told = []

    class Counted(Told):
        def __init__(self, memory=None):
            super().__init__(memory)
            told.append(self)

    monkeypatch.setattr(writer, "Writer", Counted)
    model = torch.nn.Linear(700, 700)
    optimizer = torch.optim.AdamW(model.parameters())
    watch = [NanCallback(), Rollback(every=2, confirm_after=1, on_disk=1)]
    with Sentinel(model, optimizer, callbacks=watch, run_dir=tmp_path) as sentinel:
        for batch in sentinel.steps([torch.randn(4, 700) for _ in range(8)]):
            sentinel.backward(model(batch).square().mean())
            sentinel.step()
        sentinel._watch.run.states.finish()
        size = sentinel._watch.run.known_good.nbytes()
    assert size > scribe._FOR_A_PROCESS
    assert told
    assert sum(one.piped for one in told) < size / 50
    assert sentinel._watch.run.states.failures() == []
