"""Looking into single tensors: which elements are non-finite, and where."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradsentinel.measures.inspection import (
    inspect_tensor,
    is_finite,
    nonfinite_in,
    readable,
    stored,
    values_of,
)

NAN, INF = float("nan"), float("inf")
REAL = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX], ids=name_of)
def test_numbers_are_judged_in_every_dtype(dtype):
    values = [[1.0, -2.0, 0.0], [4.0, NAN, 0.5]]
    tensor = torch.tensor(values).to(dtype)
    fine = torch.tensor(values).nan_to_num().to(dtype)
    assert readable(tensor) is None
    assert bool(is_finite(fine))
    assert not bool(is_finite(tensor))
    evidence = inspect_tensor("x", tensor)
    assert (evidence.nonfinite, evidence.numel, evidence.first_index) == (1, 6, (1, 1))
    assert math.isnan(evidence.norm)
    clean = inspect_tensor("x", fine)
    assert (clean.nonfinite, clean.first_index) == (0, None)
    assert clean.norm == pytest.approx(math.sqrt(1 + 4 + 16 + 0.25))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("part", ["real", "imag"])
def test_either_part_of_a_complex_number_counts(part, value):
    parts = {"real": torch.zeros(5), "imag": torch.zeros(5)}
    parts[part][3] = value
    tensor = torch.complex(parts["real"], parts["imag"])
    for seen in (tensor, tensor.conj(), tensor.reshape(5, 1)[:, 0]):
        evidence = inspect_tensor("z", seen)
        assert (evidence.nonfinite, evidence.numel, evidence.first_index) == (1, 5, (3,))
        assert not bool(is_finite(seen))


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(2, dtype=torch.int32), "int32 is always finite"),
        (torch.ones(2, dtype=torch.bool), "bool is always finite"),
        (torch.ones(2, device="meta"), "meta tensor"),
        (nn.UninitializedParameter(), "not initialised yet"),
        (nn.UninitializedBuffer(), "not initialised yet"),
    ],
    ids=["integer", "bool", "meta", "lazy parameter", "lazy buffer"],
)
def test_what_cannot_be_judged_has_a_reason(tensor, reason):
    assert readable(tensor) == reason
    assert nonfinite_in([("x", tensor)]) == ()


def sparse():
    """Rows 2 and 0, the first of them in two entries."""
    indices, values = torch.tensor([[2, 0, 2]]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, NAN]])
    return torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=True)


@pytest.mark.parametrize("tensor", [sparse(), sparse().coalesce()], ids=["uncoalesced", "coalesced"])
def test_a_sparse_tensor_is_judged_by_its_sums(tensor):
    torch.testing.assert_close(values_of(tensor), torch.tensor([[3.0, 4.0], [6.0, NAN]]), equal_nan=True)
    evidence = inspect_tensor("embedding", tensor)
    assert (evidence.nonfinite, evidence.numel, evidence.first_index) == (1, 4, (2, 1))


def test_a_sparse_tensor_of_two_sparse_dimensions():
    tensor = torch.sparse_coo_tensor(
        torch.tensor([[0, 2], [1, 3]]), torch.tensor([1.0, INF]), (3, 4), check_invariants=True
    )
    assert inspect_tensor("x", tensor).first_index == (2, 3)


@pytest.mark.parametrize(
    ("tensor", "index"),
    [
        (torch.tensor(NAN), ()),
        (torch.tensor([[1.0, 2.0], [NAN, 4.0]]).t(), (0, 1)),
        (torch.tensor([0.0, 1.0, 2.0, NAN])[1::2], (1,)),
        (torch.tensor([1.0, NAN]).expand(3, 2), (0, 1)),
    ],
    ids=["0-dim", "transposed", "strided", "expanded"],
)
def test_the_index_is_one_of_the_tensor_itself(tensor, index):
    evidence = inspect_tensor("x", tensor)
    assert evidence.first_index == index
    assert not math.isfinite(float(tensor[index]))
    assert evidence.nonfinite == int((~tensor.isfinite()).sum())


def test_an_empty_tensor_is_fine():
    evidence = inspect_tensor("x", torch.zeros(0, 3))
    assert (evidence.nonfinite, evidence.numel, evidence.norm, evidence.first_index) == (0, 0, 0.0, None)
    assert bool(is_finite(torch.zeros(0)))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float32, 1e30),
        (torch.float16, 6e4),
        (torch.bfloat16, 1e38),
        (torch.complex64, 1e30),
        (torch.float64, 1e200),
    ],
    ids=lambda value: name_of(value) if isinstance(value, torch.dtype) else "",
)
def test_the_norm_of_finite_numbers_is_finite(dtype, value):
    tensor = torch.full((16,), value, dtype=dtype)
    exact = 4 * float(tensor[0].abs())
    assert inspect_tensor("x", tensor).norm == pytest.approx(exact, rel=1e-5)


@given(st.lists(st.one_of(st.sampled_from([NAN, INF, -INF]), st.floats(width=32)), min_size=1, max_size=12))
def test_against_one_look_at_a_time(values):
    evidence = inspect_tensor("x", torch.tensor(values))
    bad = [index for index, value in enumerate(values) if not math.isfinite(value)]
    assert evidence.nonfinite == len(bad)
    assert evidence.first_index == ((bad[0],) if bad else None)
    assert math.isfinite(evidence.norm) == (not bad)


def test_only_the_bad_ones_are_returned_in_order():
    named = [
        ("a", torch.ones(2)),
        ("b", torch.tensor([NAN])),
        ("count", torch.tensor(3)),
        ("c", torch.tensor([1.0, INF], dtype=torch.float16)),
    ]
    assert [entry.name for entry in nonfinite_in(iter(named))] == ["b", "c"]


def test_looking_changes_nothing_and_needs_no_graph():
    tensor = torch.tensor([1.0, NAN], requires_grad=True)
    evidence = inspect_tensor("x", tensor * 2)
    assert evidence.nonfinite == 1
    assert tensor.grad is None
    assert tensor._version == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3),
        torch.ones(1).expand(8),
        torch.ones(2, 1).expand(2, 3),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.ones(2, 3).t(),
        torch.tensor(1.0),
        torch.zeros(0, 2),
    ],
    ids=["plain", "one number", "a column", "conjugated", "transposed", "0-dim", "empty"],
)
def test_what_is_stored_can_be_written_back(tensor):
    before = tensor.clone()
    copy = stored(tensor).clone()
    stored(tensor).zero_()
    assert bool((tensor == 0).all())
    stored(tensor).copy_(copy)
    assert torch.equal(tensor, before)
