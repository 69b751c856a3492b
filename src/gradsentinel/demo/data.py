"""The text of the demonstration, the Python standard library's own sources, and batches of it."""

import importlib.util
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

UNKNOWN = "\ufffd"
"""The character that stands for all rare ones."""

_LEAST_BYTES = 50_000  # less than this is no text to learn from
_SKIPPED = frozenset(  # tests, applications, bundled packages, and tables that are not much like code
    {
        "__phello__",
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


class Record(TypedDict):
    """One training example: a window of text."""

    tokens: Tensor
    """int64, (context,)."""

    targets: Tensor
    """The same window one character on, int64, (context,)."""

    weight: Tensor
    """How much the record counts in the loss, float32, 0-dim; 1.0 unless somebody changed it."""

    id: int
    """Number of the window in the corpus."""


def stdlib_text(max_bytes: int = 2_000_000) -> str:
    """Read the sources of the running Python's standard library, at most `max_bytes` of them.

    Files come in sorted order, so a machine always gives the same text; tests, bundled packages and tables
    are left out. A standard library inside an archive is read through its importers.

    Raises:
        ValueError: `max_bytes` is not positive.
        RuntimeError: this Python comes without sources.
    """
    if max_bytes <= 0:
        raise ValueError(f"max_bytes must be positive, not {max_bytes}")
    root = Path(sysconfig.get_paths()["stdlib"])
    text = _join(_files(root), max_bytes)
    if len(text) < min(_LEAST_BYTES, max_bytes // 2):
        text = _join(_importable(), max_bytes)
    if len(text) < min(_LEAST_BYTES, max_bytes // 2):
        raise RuntimeError(
            f"the demo trains on the standard library's sources, but this Python ({sys.executable}) has "
            f"none: {root} holds no .py files. Run it with a Python that ships them, such as one from "
            "python.org, a Linux distribution, conda or uv."
        )
    return text


def _files(root: Path) -> Iterator[str]:
    """Yield the readable sources under a folder: in sorted order, a folder's files before its subfolders."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED)  # os.walk goes on with these
        for name in sorted(names):
            if name.endswith(".py"):
                try:
                    yield Path(folder, name).read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError):
                    continue


def _importable() -> Iterator[str]:
    """Yield the sources of the top-level standard modules that their importers can produce."""
    for name in sorted(sys.stdlib_module_names - _SKIPPED):
        try:
            spec = importlib.util.find_spec(name)
            get_source = getattr(spec.loader if spec else None, "get_source", None)
            source = get_source(name) if get_source else None
        except (ImportError, ValueError):
            continue
        if source:
            yield source


def _join(sources: Iterator[str], max_bytes: int) -> str:
    """Join sources up to a number of UTF-8 bytes."""
    joined = bytearray()
    for source in sources:
        joined += source.strip().encode() + b"\n\n\n"
        if len(joined) >= max_bytes:
            break
    return joined[:max_bytes].decode(errors="ignore")


class CharCorpus:
    """Text as numbers: a vocabulary of characters, and a training and a validation part.

    Characters whose share of the text is below `rare` all get the number of `UNKNOWN`.
    """

    def __init__(self, text: str, *, rare: float = 1e-5, validation: float = 0.1) -> None:
        if not text:
            raise ValueError("the corpus is empty")
        if not 0.0 <= validation < 1.0:
            raise ValueError(f"validation must be a fraction below 1, not {validation}")
        counts = Counter(text)
        frequent = sorted(c for c, count in counts.items() if count >= rare * len(text) and c != UNKNOWN)
        self.characters: tuple[str, ...] = (UNKNOWN, *frequent)
        self._number = {character: number for number, character in enumerate(self.characters)}
        tokens = self.encode(text)
        split = len(text) - int(len(text) * validation)
        self.train: Tensor = tokens[:split]
        self.validation: Tensor = tokens[split:]

    @property
    def vocab(self) -> int:
        """How many different numbers there are."""
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Turn text into int64 numbers, (characters,)."""
        return torch.tensor([self._number.get(character, 0) for character in text], dtype=torch.long)

    def decode(self, tokens: Tensor) -> str:
        """Turn numbers, of any shape, into text."""
        return "".join(self.characters[int(token)] for token in tokens.flatten())


class Windows(Dataset[Record]):
    """The windows of `context` characters that lie side by side in a text."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context
        self.count = (len(tokens) - 1) // context
        if self.count < 1:
            raise ValueError(
                f"{len(tokens)} characters are too few for one window of {context} and its target"
            )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Record:
        if not 0 <= index < self.count:
            raise IndexError(index)
        start = index * self.context
        return Record(
            tokens=self.tokens[start : start + self.context],
            targets=self.tokens[start + 1 : start + 1 + self.context],
            weight=torch.tensor(1.0),
            id=index,
        )


def batches(
    corpus: CharCorpus,
    *,
    batch_size: int,
    steps: int,
    context: int,
    seed: int,
    dataset: Dataset[Record] | None = None,
) -> DataLoader[Record]:
    """Load `steps` batches of the training text in an order that depends on the seed alone.

    Every iteration over the loader gives the same batches and draws no global random numbers. No window
    comes twice before all have come once.

    Args:
        corpus: where the text comes from.
        batch_size: records in a batch.
        steps: number of batches.
        context: characters in a record.
        seed: seed of the order.
        dataset: takes the place of the plain windows, one record for each; for injecting bad records.
    """
    windows = Windows(corpus.train, context)
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < batch_size * steps:
        order += torch.randperm(len(windows), generator=generator).tolist()
    return DataLoader(
        windows if dataset is None else dataset,
        batch_size=batch_size,
        sampler=order[: batch_size * steps],
        generator=generator,  # the loader draws a seed for its workers, from here and not from the global one
    )
