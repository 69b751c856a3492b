"""Fingerprints of batches: the same content in any process, and nothing else."""

import dataclasses
import subprocess
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from gradsentinel.data.records import Content, fingerprint, probe, sample_ids


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    x: Any
    text: str = ""


class Opaque:
    """Says nothing about what it holds."""

    __slots__ = ()


class Own:
    """A batch class of one's own, with a reference to itself."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.me = self


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(4, 3, generator=generator),
        "y": torch.arange(4),
        "text": ["a", "b", "ü", "d"],
        "array": np.arange(3.0),
        "nested": Pair(torch.ones(2, dtype=torch.bfloat16), [Record(torch.zeros(1)), {"deep": (1, 2.5)}]),
    }


CHANGES = {
    "one bit": lambda b: b["x"].view(torch.int32)[2, 1].bitwise_xor_(1),
    "sign of zero": lambda b: b["nested"].y[0].x.neg_(),
    "dtype": lambda b: b.update(y=b["y"].int()),
    "shape": lambda b: b.update(x=b["x"].reshape(3, 4)),
    "text": lambda b: b["text"].__setitem__(1, "B"),
    "order": lambda b: b["text"].reverse(),
    "array": lambda b: b["array"].__setitem__(0, 9),
    "number": lambda b: b["nested"].y[1].update(deep=(1, 2.0)),
    "key": lambda b: b.update(z=b.pop("y")),
    "more": lambda b: b.update(more=None),
}


def test_equal_content_has_the_same_fingerprint():
    one, other = batch(), batch()
    assert fingerprint(one) == fingerprint(other)
    assert fingerprint(one) == fingerprint(dict(reversed(list(other.items()))))
    assert Content(one).has(fingerprint(other))
    assert fingerprint(one).startswith(probe(other))


@pytest.mark.parametrize("change", CHANGES)
def test_any_difference_shows(change):
    changed = batch()
    CHANGES[change](changed)
    assert fingerprint(changed) != fingerprint(batch())
    assert not Content(changed).has(fingerprint(batch()))


@pytest.mark.slow
def test_it_does_not_depend_on_the_process():
    code = (
        "import torch; from gradsentinel.data.records import fingerprint;"
        "print(fingerprint({'x': torch.arange(6.), 's': {'b', 'a', 'c'}, 't': 'text'}))"
    )
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603 - ours
    assert fresh.stdout.strip() == fingerprint({"x": torch.arange(6.0), "s": {"c", "b", "a"}, "t": "text"})


def test_strides_and_containers_of_the_same_content_do_not_matter():
    x = torch.arange(6.0).reshape(2, 3)
    assert fingerprint(x.t()) == fingerprint(x.t().contiguous())
    assert fingerprint(x) == fingerprint(x.expand(2, 3).clone().requires_grad_())
    assert fingerprint(OrderedDict(a=x)) != fingerprint({"b": x})


TENSORS = {
    "nan": lambda: torch.tensor(float("nan")),
    "empty": lambda: torch.zeros(0, 3),
    "bool": lambda: torch.zeros((), dtype=torch.bool),
    "conj": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "expanded": lambda: torch.ones(1).expand(5),
    "meta": lambda: torch.zeros(2, device="meta"),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_every_kind_of_tensor_has_one(kind):
    known = fingerprint({"x": TENSORS[kind]()})
    assert known == fingerprint({"x": TENSORS[kind]()})
    assert len(known) == 8 + 1 + 32


def test_ones_own_classes_count_with_what_they_hold():
    assert fingerprint(Own(torch.ones(2))) == fingerprint(Own(torch.ones(2)))
    assert fingerprint(Own(torch.ones(2))) != fingerprint(Own(torch.zeros(2)))


@pytest.mark.parametrize("empty", [Opaque(), {"x": Opaque()}, [], None, print])
def test_what_says_nothing_is_never_taken_for_the_same(empty):
    assert fingerprint(empty) == ""
    assert not Content(empty).has("")


def test_ids_are_found_where_a_batch_carries_some():
    assert sample_ids({"id": torch.tensor([5, 7]), "x": 1}) == {0: 5, 1: 7}
    assert sample_ids({"sample_ids": ["a", "b"]}) == {0: "a", 1: "b"}
    assert sample_ids({"x": torch.ones(2)}) == {}
    assert sample_ids([1, 2]) == {}


@dataclasses.dataclass
class Batch:
    ids: list[str]
    x: torch.Tensor


class WithIds(NamedTuple):
    uid: torch.Tensor
    x: torch.Tensor


@pytest.mark.parametrize(
    "batch",
    [
        Batch(["a", "b"], torch.ones(2, 3)),
        {"meta": {"id": ["a", "b"]}, "x": torch.ones(2)},
        {"batch": Batch(["a", "b"], torch.ones(2, 3))},
        {"row_id": np.array(["a", "b"]), "x": torch.ones(2)},
        {"__key__": ("a", "b"), "jpg": torch.ones(2, 3)},
        [{"id": "a", "x": torch.ones(2)}, {"id": "b", "x": torch.ones(3)}],
        [{"meta": {"uid": "a"}}, {"meta": {"uid": "b"}}],
        {"indices": torch.tensor([3, 3]), "sample_id": ["a", "b"], "x": torch.ones(2)},
    ],
    ids=str,
)
def test_ids_are_found_wherever_they_are(batch):
    assert sample_ids(batch) == {0: "a", 1: "b"}


def test_ids_of_a_named_tuple():
    assert sample_ids(WithIds(torch.tensor([4, 9]), torch.ones(2))) == {0: 4, 1: 9}


@pytest.mark.parametrize(
    "batch",
    [
        {"indices": torch.tensor([7, 7, 9]), "x": torch.ones(3)},  # rows of an embedding repeat
        {"indices": torch.zeros(2, 5).long(), "x": torch.ones(2)},
        {"ids": torch.tensor([1, 2, 3, 4]), "x": torch.ones(2), "y": torch.ones(2)},  # not one for each
        {"id": torch.tensor([0.25, 0.75]), "x": torch.ones(2)},
        {"id": [[1], [2]], "x": torch.ones(2)},
        [{"x": 1}, {"id": 2}],
    ],
    ids=str,
)
def test_what_only_looks_like_ids(batch):
    assert sample_ids(batch) == {}
