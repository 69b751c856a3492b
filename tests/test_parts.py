"""Which archives are the parts of one state, while other ranks take theirs away."""

import pytest

from gradsentinel.state import parts
from gradsentinel.state.archive import ArchiveError, remove_archive, write_archive
from gradsentinel.state.parts import SNAPSHOT_KIND, orphans


def write(folder, step, rank):
    path = folder / f"step-{step:09d}-rank{rank}"
    meta = {"step": step, "iteration": step, "world_size": 4}
    write_archive(path, {}, kind=SNAPSHOT_KIND, meta=meta)
    return path


def test_a_rank_may_take_its_archive_away_while_another_one_looks(tmp_path, monkeypatch):
    """The list of them is read first, then each of them: in between one may go."""
    paths = [write(tmp_path, 3, rank) for rank in range(4)]
    listed = parts.list_archives

    def then_gone(directory, kind):
        found = listed(directory, kind)
        remove_archive(paths[1])
        return found

    monkeypatch.setattr(parts, "list_archives", then_gone)
    assert {path for _, path in orphans(tmp_path, 2)} == set(paths[2:])


def test_an_archive_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    write(tmp_path, 3, 2)

    def refused(path, **_):
        raise ArchiveError(f"the archive {path} is too new")

    monkeypatch.setattr(parts, "read_manifest", refused)
    with pytest.raises(ArchiveError, match="too new"):
        list(orphans(tmp_path, 2))
