"""Archives: whole or not there, verified before use, never unpickled."""

import errno
import json
import math
import os
import pickle
import resource
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import gradsentinel.state.archive as archive_module
from gradsentinel.state.archive import (
    ArchiveError,
    is_complete,
    list_archives,
    read_archive,
    read_manifest,
    remove_stale,
    write_archive,
    write_tensor_file,
)
from gradsentinel.state.tree import NATIVE_DTYPES, UnsupportedStateError

STATE = {"w": torch.arange(6.0).view(2, 3), "step": 3, "nested": [torch.ones(2, dtype=torch.complex64), None]}


def write(path, state=STATE, meta=None, **options):
    return write_archive(path, state, meta, **{"kind": "snapshot", **options})


def read(path, **options):
    return read_archive(path, **{"kind": "snapshot", **options})


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "a")


def forge(path, **changes):
    """Change the manifest and its checksum."""
    body = json.loads((path / "manifest.json").read_text())
    body.update(changes)
    body.pop("crc32")
    body["crc32"] = f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"
    (path / "manifest.json").write_text(json.dumps(body))


def forge_file(path, name, data):
    """Change a file, and the manifest to match."""
    (path / name).write_bytes(data)
    files = json.loads((path / "manifest.json").read_text())["files"]
    forge(path, files={**files, name: {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}})


class Trap:
    """Its pickle, loaded, would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class TestReading:
    def test_gives_back_state_and_meta(self, tmp_path):
        meta = {"loss": math.nan, "ids": (1, 2), "step": 3}
        assert write(tmp_path / "deep" / "er" / "a", meta=meta) == tmp_path / "deep" / "er" / "a"
        state, back = read(tmp_path / "deep" / "er" / "a")
        assert torch.equal(state["w"], STATE["w"])
        assert torch.equal(state["nested"][0], STATE["nested"][0])
        assert state["step"] == 3
        assert math.isnan(back["loss"])
        assert back["ids"] == (1, 2)
        assert sorted(entry.name for entry in tmp_path.joinpath("deep", "er").iterdir()) == ["a"]

    def test_gives_the_manifest_alone(self, tmp_path):
        write(tmp_path / "a", meta={"step": 3}, schema=2)
        manifest = read_manifest(tmp_path / "a", kind="snapshot", schema=2)
        assert (manifest.kind, manifest.schema, manifest.meta) == ("snapshot", 2, {"step": 3})
        assert manifest.files.keys() == {"state.json", "state.safetensors"}

    @pytest.mark.parametrize("state", [None, {}, 3, "text", torch.empty(0, 2), torch.tensor(3.0), []])
    def test_small_states(self, tmp_path, state):
        back, _ = read(write(tmp_path / "a", state))
        assert torch.equal(back, state) if isinstance(state, torch.Tensor) else back == state

    def test_several_files(self, tmp_path):
        state = {f"t{i}": torch.full((10,), float(i)) for i in range(5)} | {"big": torch.ones(100)}
        path = write(tmp_path / "a", state, max_file_bytes=80)
        names = sorted(entry.name for entry in path.glob("*.safetensors"))
        assert names == [f"state-0000{i}-of-00004.safetensors" for i in range(1, 5)]
        back, _ = read(path)
        assert list(back) == list(state)
        assert all(torch.equal(back[name], state[name]) for name in state)

    def test_views_and_shared_memory(self, tmp_path):
        base = torch.arange(12.0).view(3, 4)
        state = {
            "t": base.t(),
            "row": base[1],
            "base": base,
            "wide": torch.ones(1).expand(3),
            "array": np.arange(3),
        }
        back, _ = read(write(tmp_path / "a", state))
        assert all(np.array_equal(back[name], state[name]) for name in state)

    def test_what_is_read_does_not_hang_on_the_files(self, path):
        state, _ = read(path)
        state["w"].zero_()
        again, _ = read(path)
        assert torch.equal(again["w"], STATE["w"])

    def test_on_a_device(self, path):
        assert read(path, device="meta")[0]["w"].is_meta

    def test_other_programs_read_the_tensors(self, path):
        assert torch.equal(safetensors.torch.load_file(path / "state.safetensors")["w"], STATE["w"])

    def test_every_native_dtype(self, tmp_path):
        tensors = {str(dtype): torch.ones(3).to(dtype) for dtype in NATIVE_DTYPES}
        facts = write_tensor_file(tmp_path / "x.safetensors", tensors)
        back = safetensors.torch.load_file(tmp_path / "x.safetensors")
        assert {name: (t.dtype, t.tolist()) for name, t in back.items()} == {
            name: (t.dtype, t.tolist()) for name, t in tensors.items()
        }
        data = (tmp_path / "x.safetensors").read_bytes()
        assert facts == {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}

    def test_hidden_files_do_not_matter(self, path):
        (path / ".nfs0001").touch()
        read(path)

    def test_is_possible_through_a_link(self, path, tmp_path):
        (tmp_path / "latest").symlink_to(path)
        assert read(tmp_path / "latest")[0]["step"] == 3


class TestRefusal:
    def test_missing(self, tmp_path):
        with pytest.raises(ArchiveError, match=r"^no archive at .*/a$"):
            read(tmp_path / "a")

    def test_a_file(self, tmp_path):
        (tmp_path / "a").touch()
        with pytest.raises(ArchiveError, match=r"is not an archive but a file$"):
            read(tmp_path / "a")

    def test_a_foreign_directory(self, tmp_path):
        (tmp_path / "weights.bin").touch()
        with pytest.raises(
            ArchiveError, match=r"is not an archive of GradSentinel: it has no manifest.json$"
        ):
            read(tmp_path)

    @pytest.mark.parametrize("text", ["[]", "{}", '{"format": "web"}'])
    def test_another_programs_manifest(self, tmp_path, text):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ArchiveError, match="is not an archive of GradSentinel"):
            read(tmp_path)

    def test_another_kind(self, path):
        with pytest.raises(ArchiveError, match=r"is a 'snapshot', not a 'bundle'$"):
            read(path, kind="bundle")

    def test_a_newer_schema(self, tmp_path):
        path = write(tmp_path / "a", schema=3)
        with pytest.raises(
            ArchiveError,
            match=r"was written by a newer GradSentinel \(schema 3, this one reads 1\): upgrade$",
        ):
            read(path)
        assert read(path, schema=3)[0]["step"] == 3

    def test_a_newer_format(self, path):
        forge(path, format=2)
        with pytest.raises(ArchiveError, match=r"newer GradSentinel .*: upgrade$"):
            read(path)

    @pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
    def test_a_truncated_file(self, path, name):
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[:-1])
        with pytest.raises(
            ArchiveError, match=rf"is truncated: {name} has {len(data) - 1} of {len(data)} bytes$"
        ):
            read(path)
        assert not is_complete(path)

    @pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
    def test_a_longer_file(self, path, name):
        (path / name).write_bytes((path / name).read_bytes() + b" ")
        with pytest.raises(ArchiveError, match=f"is damaged: {name} is longer than it was$"):
            read(path)

    @pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
    def test_a_missing_file(self, path, name):
        (path / name).unlink()
        with pytest.raises(ArchiveError, match=f"is incomplete: it lacks {name}$"):
            read(path)

    def test_any_flipped_bit(self, path):
        for file in path.iterdir():
            data = file.read_bytes()
            for position in range(0, len(data), 7):
                file.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
                with pytest.raises(ArchiveError):
                    read(path)
            file.write_bytes(data)
        read(path)

    def test_a_flipped_bit_is_named(self, path):
        data = bytearray((path / "state.safetensors").read_bytes())
        data[-1] ^= 1
        (path / "state.safetensors").write_bytes(data)
        with pytest.raises(ArchiveError, match=r"is damaged: state.safetensors does not match its checksum$"):
            read(path)

    @pytest.mark.parametrize("size", [0, 1, 20])
    def test_a_truncated_manifest(self, path, size):
        os.truncate(path / "manifest.json", size)
        with pytest.raises(ArchiveError, match=r"is damaged: its manifest.json is truncated or no JSON$"):
            read(path)

    @pytest.mark.parametrize(
        "name", ["../b/state.safetensors", "/etc/passwd", "state.pkl", "sub/state.json", ""]
    )
    def test_a_manifest_that_points_elsewhere(self, path, name):
        forge(path, files={name: {"bytes": 1, "crc32": "0"}})
        with pytest.raises(ArchiveError, match="names a file that cannot be in an archive"):
            read(path)

    @pytest.mark.parametrize(
        "changes",
        [
            {"files": None},
            {"files": {"state.json": None}},
            {"files": {"state.json": {"bytes": "1"}}},
            {"files": {}},
            {"schema": None},
            {"schema": "x"},
            {"meta": {"$tensor": "w"}},
        ],
    )
    def test_a_forged_manifest(self, path, changes):
        forge(path, **changes)
        with pytest.raises(ArchiveError):
            read(path)
        assert not is_complete(path)

    @pytest.mark.parametrize("name", ["state.safetensors", "state.json", "manifest.json"])
    def test_links_out_of_it(self, path, tmp_path, name):
        (path / name).rename(tmp_path / name)
        (path / name).symlink_to(tmp_path / name)
        with pytest.raises(ArchiveError, match=f"{name} is no regular file$"):
            read(path)

    def test_a_skeleton_without_its_tensors(self, path):
        forge_file(path, "state.json", b'{"$tensor": "absent"}')
        with pytest.raises(ArchiveError, match=r"is damaged: .*absent"):
            read(path)

    def test_a_bottomless_skeleton(self, path):
        forge_file(path, "state.json", b"[" * 100_000 + b"]" * 100_000)
        with pytest.raises(ArchiveError, match="is damaged"):
            read(path)


class TestPickle:
    def test_the_trap_works(self, tmp_path):
        pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))  # noqa: S301  to see that the tests below would notice
        assert (tmp_path / "sprung").exists()

    @pytest.mark.parametrize("name", ["state.safetensors", "state.json", "manifest.json"])
    @pytest.mark.parametrize("dump", [pickle.dumps, "torch"])
    def test_planted_in_place_of_a_file(self, path, tmp_path, name, dump):
        trap = Trap(tmp_path / "sprung")
        if dump == "torch":
            torch.save(trap, tmp_path / "trap")
            data = (tmp_path / "trap").read_bytes()
        else:
            data = dump(trap)
        if name == "manifest.json":
            (path / name).write_bytes(data)
        else:
            (path / name).write_bytes(data)
            with pytest.raises(ArchiveError):
                read(path)
            forge_file(path, name, data)
        with pytest.raises(ArchiveError, match="is damaged"):
            read(path)
        assert not (tmp_path / "sprung").exists()

    def test_planted_beside_the_files(self, path, tmp_path):
        (path / "state.pkl").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
        with pytest.raises(ArchiveError, match=r"holds a file that is not part of it: state.pkl$"):
            read(path)
        assert not (tmp_path / "sprung").exists()


class TestWriting:
    def test_replaces_nothing(self, path):
        with pytest.raises(ArchiveError, match=r"exists already$"):
            write(path, {"other": 1})
        assert read(path)[0]["step"] == 3
        assert [entry.name for entry in path.parent.iterdir()] == ["a"]

    def test_loses_a_race_without_a_trace(self, path, monkeypatch):
        monkeypatch.setattr(os.path, "lexists", lambda path: False)
        with pytest.raises(ArchiveError, match="cannot write the archive"):
            write(path, {"other": 1})
        assert read(path)[0]["step"] == 3
        assert [entry.name for entry in path.parent.iterdir()] == ["a"]

    @pytest.mark.parametrize("meta", [{"t": torch.ones(1)}, {"a": np.ones(1)}, {"f": object()}])
    def test_meta_is_small(self, tmp_path, meta):
        with pytest.raises(UnsupportedStateError, match=r"^meta"):
            write(tmp_path / "a", meta=meta)
        assert list(tmp_path.iterdir()) == []

    def test_what_cannot_be_stored_leaves_nothing(self, tmp_path):
        with pytest.raises(UnsupportedStateError, match=r"^f: "):
            write(tmp_path / "a", {"f": object()})
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
    @pytest.mark.parametrize("call", range(6))
    def test_a_failing_disk_leaves_nothing(self, tmp_path, monkeypatch, number, call):
        calls = iter(range(100))
        sync = os.fsync

        def fsync(descriptor):
            if next(calls) == call:
                raise OSError(number, os.strerror(number))
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        state = {"a": torch.ones(2), "b": torch.ones(2)}
        with pytest.raises(ArchiveError, match=rf"^cannot write the archive .*: {os.strerror(number)}$"):
            write(tmp_path / "a", state, max_file_bytes=8)
        if call < 5:  # two files of tensors, skeleton, manifest, directory
            assert list(tmp_path.iterdir()) == []
        else:  # the parent directory: all is there, but it might not survive a power cut
            assert list(tmp_path.iterdir()) == [tmp_path / "a"]
            assert read(tmp_path / "a")[0]["a"].tolist() == [1, 1]

    def test_a_full_disk(self, tmp_path):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(ArchiveError, match=r"cannot write the archive .*: File too large"):
                write(tmp_path / "a", torch.ones(10_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(tmp_path.iterdir()) == []

    def test_below_a_file(self, tmp_path):
        (tmp_path / "f").touch()
        with pytest.raises(ArchiveError, match="cannot write the archive"):
            write(tmp_path / "f" / "a")

    def test_an_interrupt_leaves_nothing(self, tmp_path, monkeypatch):
        def interrupted(path, tensors):
            raise KeyboardInterrupt

        monkeypatch.setattr(archive_module, "write_tensor_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "a")
        assert list(tmp_path.iterdir()) == []


class TestListing:
    def test_newest_first_and_whole_only(self, tmp_path):
        for name in ("step-2", "step-10", "step-01", "broken"):
            write(tmp_path / name)
        write(tmp_path / "bundle", kind="bundle")
        (tmp_path / "broken" / "state.json").unlink()
        write(tmp_path / "x").rename(tmp_path / f".tmp-x-{os.getpid()}-0123456789abcdef")
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").touch()
        assert [found.name for found in list_archives(tmp_path, "snapshot")] == [
            "step-2",
            "step-10",
            "step-01",
        ]
        assert [found.name for found in list_archives(tmp_path, "bundle")] == ["bundle"]

    def test_of_nothing(self, tmp_path):
        assert list_archives(tmp_path / "none", "snapshot") == []
        assert not is_complete(tmp_path / "none")

    def test_a_newer_schema_is_complete(self, tmp_path):
        write(tmp_path / "a", schema=9)
        assert is_complete(tmp_path / "a")
        assert list_archives(tmp_path, "snapshot") == [tmp_path / "a"]


class TestStale:
    def temporary(self, directory, pid, host=None):
        path = directory / f".tmp-a-{pid}-{host or archive_module.host_token()}89abcdef"
        path.mkdir()
        (path / "state.json").touch()
        return path

    def finished_process(self):
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        return process.pid

    def test_goes_with_its_process(self, tmp_path):
        gone = self.temporary(tmp_path, self.finished_process())
        ours = self.temporary(tmp_path, os.getpid())
        elsewhere = self.temporary(tmp_path, self.finished_process(), host="00000000")
        write(tmp_path / "a")
        assert remove_stale(tmp_path) == [gone]
        assert ours.exists()
        assert elsewhere.exists()
        assert is_complete(tmp_path / "a")

    def test_goes_after_a_day(self, tmp_path):
        old = self.temporary(tmp_path, os.getpid(), host="00000000")
        busy = self.temporary(tmp_path, os.getpid())
        for entry in (old, old / "state.json", busy):
            os.utime(entry, (0, time.time() - 25 * 3600))
        assert remove_stale(tmp_path) == [old]

    def test_leaves_links_and_files_alone(self, tmp_path, path):
        token = f"{archive_module.host_token()}89abcdef"
        (tmp_path / f".tmp-l-{self.finished_process()}-{token}").symlink_to(path)
        (tmp_path / f".tmp-f-{self.finished_process()}-{token}").touch()
        assert remove_stale(tmp_path) == []

    def test_of_nothing(self, tmp_path):
        assert remove_stale(tmp_path / "none") == []


WRITER = """
import os, random, signal, sys, time
import torch
from gradsentinel.state.archive import write_archive
from pathlib import Path

directory = Path(sys.argv[1])
torch.set_num_threads(1)
random.seed(0)
for life in range(12):
    pid = os.fork()
    for number in range(10_000 if pid == 0 else 0):
        state = {"number": number, "t": [torch.full((20_000,), float(number)) for _ in range(6)]}
        path = directory / f"{life:02}-{number:05}"
        write_archive(path, state, number, kind="k", max_file_bytes=100_000)
    while not (directory / f"{life:02}-00000").exists():
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.05))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_archives_only(tmp_path):
    subprocess.run([sys.executable, "-W", "ignore", "-c", WRITER, str(tmp_path)], check=True)  # noqa: S603
    every = list(tmp_path.iterdir())
    whole = [path for path in every if is_complete(path) and not path.name.startswith(".")]
    halves = [path for path in every if path.name.startswith(".tmp-")]
    assert whole
    assert halves, "no writer was killed in the middle: the test tests nothing"
    assert sorted(whole + halves) == sorted(every)
    assert list_archives(tmp_path, "k") == sorted(whole, reverse=True)
    for path in whole:
        state, number = read_archive(path, kind="k")
        assert state["number"] == number
        assert all(torch.equal(tensor, torch.full((20_000,), float(number))) for tensor in state["t"])
    assert sorted(remove_stale(tmp_path)) == sorted(halves)
    assert sorted(tmp_path.iterdir()) == sorted(whole)
