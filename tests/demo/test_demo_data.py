"""The demonstration's text, its vocabulary and its batches."""

import sys
import zipfile
from importlib.machinery import ModuleSpec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel.demo import data
from gradsentinel.demo.data import UNKNOWN, CharCorpus, Windows, batches, stdlib_text


@pytest.fixture
def corpus():
    return CharCorpus("def spam(eggs):\n    return eggs + 1\n" * 40)


def stdlib_at(monkeypatch, folder):
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(folder)})


def test_the_standard_library_is_read_up_to_a_size_and_always_alike():
    text = stdlib_text(60_000)
    assert text == stdlib_text(60_000)
    assert 59_990 <= len(text.encode()) <= 60_000
    assert text.startswith(stdlib_text(60_000)[:1000])
    assert text.count("import ") > 10


def test_files_come_in_order_without_tests_and_what_cannot_be_decoded(tmp_path, monkeypatch):
    line = "x = 'ü'\n"
    (tmp_path / "b.py").write_text("# b\n" + line * 4000, encoding="utf-8")
    (tmp_path / "a.py").write_text("# a\n" + line * 4000, encoding="utf-8")
    (tmp_path / "broken.py").write_bytes(b"# \xff broken\n")
    (tmp_path / "notes.txt").write_text("notes")
    for folder in ("test", "site-packages", "asyncio"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "c.py").write_text(f"# {folder}\n", encoding="utf-8")
    stdlib_at(monkeypatch, tmp_path)
    text = stdlib_text(100_000)
    assert [line for line in text.splitlines() if line.startswith("#")] == ["# a", "# b", "# asyncio"]
    assert stdlib_text(10).endswith("x = '")  # a character is never cut in half


def test_a_zipped_standard_library_is_read_through_its_importer(tmp_path, monkeypatch):
    archive = tmp_path / "python.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("spamlib.py", "spam = 1\n" * 9000)
    stdlib_at(monkeypatch, tmp_path / "nowhere")
    monkeypatch.setattr(data.sys, "stdlib_module_names", frozenset({"spamlib", "no_such_module", "sys"}))
    monkeypatch.syspath_prepend(str(archive))
    assert stdlib_text(50_000).startswith("spam = 1")
    assert "spamlib" not in sys.modules


def test_a_python_without_sources_is_told_so(tmp_path, monkeypatch):
    stdlib_at(monkeypatch, tmp_path)
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: ModuleSpec(name, loader=None))
    with pytest.raises(RuntimeError, match=r"this Python .* has none: .* holds no \.py files"):
        stdlib_text()


def test_a_size_must_be_positive():
    with pytest.raises(ValueError, match="max_bytes must be positive, not 0"):
        stdlib_text(0)


@given(st.text(min_size=1), st.floats(0, 0.9))
def test_every_text_survives_the_round_trip(text, validation):
    corpus = CharCorpus(text, rare=0.0, validation=validation)
    assert corpus.decode(corpus.encode(text)) == text
    assert corpus.decode(torch.cat([corpus.train, corpus.validation])) == text
    assert corpus.encode(text).max() < corpus.vocab


def test_rare_and_new_characters_are_one():
    corpus = CharCorpus("a" * 98 + "bz", rare=0.02)
    assert corpus.characters == (UNKNOWN, "a")
    assert corpus.decode(corpus.encode("abc")) == f"a{UNKNOWN}{UNKNOWN}"


@pytest.mark.parametrize(("text", "validation"), [("", 0.1), ("a", 1.0), ("a", -0.1)])
def test_a_corpus_needs_text_to_train_on(text, validation):
    with pytest.raises(ValueError, match=r"empty|fraction"):
        CharCorpus(text, validation=validation)


def test_windows_lie_side_by_side_and_targets_are_one_ahead(corpus):
    windows = Windows(corpus.train, 7)
    assert len(windows) == (len(corpus.train) - 1) // 7
    record = windows[2]
    assert torch.equal(record["tokens"], corpus.train[14:21])
    assert torch.equal(record["targets"], corpus.train[15:22])
    assert record["weight"].dtype == torch.float32
    assert record["id"] == 2
    assert len(windows[len(windows) - 1]["targets"]) == 7
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_too_little_text_is_told_so(corpus):
    with pytest.raises(ValueError, match="3 characters are too few for one window of 3"):
        Windows(corpus.train[:3], 3)


def test_batches_depend_on_the_seed_alone(corpus):
    def ids(seed, loader=None):
        loader = loader or batches(corpus, batch_size=4, steps=5, context=7, seed=seed)
        return [batch["id"].tolist() for batch in loader]

    loader = batches(corpus, batch_size=4, steps=5, context=7, seed=1)
    state = torch.get_rng_state()
    assert ids(1, loader) == ids(1, loader) == ids(1)
    assert ids(1) != ids(2)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_batch_has_all_fields(corpus):
    loader = batches(corpus, batch_size=4, steps=5, context=7, seed=1)
    assert len(loader) == 5
    batch = next(iter(loader))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()} == {
        "tokens": (torch.int64, (4, 7)),
        "targets": (torch.int64, (4, 7)),
        "weight": (torch.float32, (4,)),
        "id": (torch.int64, (4,)),
    }


def test_no_window_comes_twice_before_all_came_once(corpus):
    count = len(Windows(corpus.train, 7))
    loader = batches(corpus, batch_size=5, steps=count, context=7, seed=1)
    order = torch.cat([batch["id"] for batch in loader]).tolist()
    assert len(order) == 5 * count
    assert all(
        sorted(order[start : start + count]) == list(range(count)) for start in range(0, 5 * count, count)
    )


def test_a_dataset_of_ones_own_takes_the_place_of_the_windows(corpus):
    class Poisoned(Windows):
        def __getitem__(self, index):
            return {**super().__getitem__(index), "weight": torch.tensor(torch.nan)}

    dataset = Poisoned(corpus.train, 7)
    loader = batches(corpus, batch_size=4, steps=1, context=7, seed=1, dataset=dataset)
    (batch,) = loader
    assert batch["weight"].isnan().all()
