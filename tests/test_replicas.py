"""The checksum that tells whether replicas hold the same bits, and who must hold the same."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel.ranks import replicas
from gradsentinel.ranks.replicas import checksum, checksums, combine

FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    *FLOAT8,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex128,
    torch.complex64,
]
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


def of(tensor):
    return int(checksum(tensor))


def from_bytes(content, dtype, shape=(-1,)):
    """A tensor of just these bits."""
    raw = torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8).copy())
    return raw.view(dtype).reshape(shape)


@st.composite
def bits(draw, dtypes=tuple(DTYPES), least=1):
    """Bytes, dtype and shape of a small tensor: 0-dim, long or with several dimensions."""
    dtype = draw(st.sampled_from(dtypes))
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    count = int(np.prod(shape)) if shape else 1
    assume(count >= least)
    size = count * dtype.itemsize
    return draw(st.binary(min_size=size, max_size=size)), dtype, shape


# -- the same bits, the same sum; another bit, another sum -----------------------------------------------


@given(bits(), st.data())
def test_one_flipped_bit_changes_the_sum_and_flipped_back_gives_it_again(tensor, data):
    content, dtype, shape = tensor
    before = of(from_bytes(content, dtype, shape))
    position = data.draw(st.integers(0, 8 * len(content) - 1))
    flipped = bytearray(content)
    flipped[position // 8] ^= 1 << position % 8
    assert of(from_bytes(flipped, dtype, shape)) != before
    flipped[position // 8] ^= 1 << position % 8
    assert of(from_bytes(flipped, dtype, shape)) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80, 0x3F], ids=hex)
def test_every_single_bit_counts(dtype, fill):
    """All of them, at every place of a tensor: the sign of a float64 just as the last bit of an int8."""
    content = bytes([fill]) * (3 * dtype.itemsize)
    seen = {of(from_bytes(content, dtype))}
    for position in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        seen.add(of(from_bytes(flipped, dtype)))
    assert len(seen) == 1 + 8 * len(content)


@given(bits(least=2), st.data())
def test_two_elements_that_change_places_change_the_sum_unless_they_are_equal(tensor, data):
    content, dtype, shape = tensor
    size = dtype.itemsize
    elements = [content[start : start + size] for start in range(0, len(content), size)]
    places = st.integers(0, len(elements) - 1)
    one, two = data.draw(places), data.draw(places)
    swapped = list(elements)
    swapped[one], swapped[two] = swapped[two], swapped[one]
    before, after = (of(from_bytes(b"".join(parts), dtype, shape)) for parts in (elements, swapped))
    assert (after == before) == (elements[one] == elements[two])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_plus_and_minus_zero_differ_and_may_not_change_places(dtype):
    plus, minus = torch.zeros(3, dtype=dtype), torch.tensor([0.0, -0.0, 0.0], dtype=dtype)
    assert torch.equal(plus, minus)
    assert of(plus) != of(minus)
    assert len({of(minus.roll(shift)) for shift in range(3)}) == 3


def test_nan_equals_itself_and_not_another_nan():
    nan = torch.tensor([float("nan"), 1.0])
    other = nan.clone()
    other.view(torch.int32)[0] += 1
    assert other.isnan()[0]
    assert of(nan) == of(nan.clone())
    assert of(nan) != of(other)


def test_booleans():
    """Every pattern of five."""
    patterns = [torch.tensor(pattern) for pattern in itertools.product([False, True], repeat=5)]
    assert len({of(pattern) for pattern in patterns}) == 32


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_half_precision_complex():
    one = torch.tensor([1 + 2j, complex(3, -0.0)]).to(torch.complex32)
    other = torch.tensor([1 + 2j, 3 + 0j]).to(torch.complex32)
    assert of(one) == of(one.clone())
    assert of(one) != of(other)


def test_small_changes_at_many_places_do_not_cancel_out():
    """Each of eight values moves by one unit in the last place, up or down: every pattern is told apart."""
    values = torch.randn(8)
    sums = {of(values)}
    for pattern in itertools.product([-1, 1], repeat=8):
        moved = (values.view(torch.int32) + torch.tensor(pattern, dtype=torch.int32)).view(torch.float32)
        sums.add(of(moved))
    assert len(sums) == 257


# -- what it must not depend on -----------------------------------------------------------------------


@given(bits(), st.data())
def test_the_layout_in_memory_does_not_matter(tensor, data):
    content, dtype, shape = tensor
    plain = from_bytes(content, dtype, shape)
    order = data.draw(st.permutations(range(len(shape))))
    back = [order.index(dim) for dim in range(len(shape))]
    turned = plain.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    spaced = torch.stack([plain, plain], dim=-1)[..., 0]
    assert of(turned) == of(spaced) == of(plain)
    offset = torch.cat([plain.flatten()[:1], plain.flatten()])[1:].reshape(shape)
    assert of(offset) == of(plain)


@given(bits(dtypes=(torch.complex64, torch.complex128)))
def test_a_lazy_conjugate_counts_as_the_numbers_it_stands_for(tensor):
    values = from_bytes(*tensor)
    assert of(values.conj()) == of(values.conj().resolve_conj())
    assert of(values.conj().imag) == of(values.conj().imag.resolve_neg())


@given(bits(), st.integers(1, 7))
def test_the_size_of_the_pieces_does_not_matter(tensor, size):
    values = from_bytes(*tensor)
    whole = of(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_CHUNK", size)
        assert of(values) == whole


@given(bits(least=2), st.data())
def test_flips_and_swaps_are_seen_across_pieces(tensor, data):
    content, dtype, _ = tensor
    size = dtype.itemsize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_CHUNK", 2)
        before = of(from_bytes(content, dtype))
        flipped = bytearray(content)
        position = data.draw(st.integers(0, 8 * len(content) - 1))
        flipped[position // 8] ^= 1 << position % 8
        assert of(from_bytes(flipped, dtype)) != before
        swapped = content[-size:] + content[size:-size] + content[:size]
        assert (of(from_bytes(swapped, dtype)) == before) == (content[:size] == content[-size:])


def test_a_tensor_larger_than_a_piece():
    values = torch.randint(-100, 100, (replicas._CHUNK + 3,), dtype=torch.int8)
    before = of(values)
    for place in (0, replicas._CHUNK - 1, replicas._CHUNK, replicas._CHUNK + 2):
        changed = values.clone()
        changed[place] ^= 1
        assert of(changed) != before
    changed = values.clone()
    changed[-1], changed[0] = 5, 6
    other = values.clone()
    other[-1], other[0] = 6, 5
    assert of(changed) != of(other)


# -- corners ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=[*NAMES, "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3)], ids=str)
def test_it_is_one_int64_that_leaves_room_for_its_negative(dtype, shape):
    found = checksum(torch.ones(shape).to(dtype))
    assert (found.dtype, found.shape) == (torch.int64, ())
    assert 0 <= int(found) < 2**61


def test_more_zeros_are_something_else():
    assert len({of(torch.zeros(count)) for count in range(10)}) == 10


def test_sparse_gradients_count_what_they_add_up_to():
    """As an embedding makes them, the same row twice."""
    index, rows = torch.tensor([[2, 0, 2]]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    sparse = torch.sparse_coo_tensor(index, rows, (4, 2), check_invariants=True)
    assert of(sparse) == of(sparse.coalesce())
    moved = torch.sparse_coo_tensor(index + 1, rows, (4, 2), check_invariants=True)
    changed = torch.sparse_coo_tensor(index, rows.flip(1), (4, 2), check_invariants=True)
    assert len({of(sparse), of(moved), of(changed)}) == 3


class Waits(TorchDispatchMode):
    """Notes each operator that makes the host wait for the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in {
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
            torch.ops.aten.is_nonzero,
        }:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_host_does_not_wait():
    tensors = [torch.randn(5, 3).t(), torch.ones(4, dtype=torch.bool), torch.randn(3, dtype=torch.complex64)]
    with Waits() as waits:
        combine(checksums(tensors))
    assert waits.found == []
    with Waits() as waits:
        float(tensors[0].sum())
    assert waits.found != []


# -- many parameters -----------------------------------------------------------------------------------


def test_checksums_of_many():
    tensors = [torch.randn(3), torch.ones(2, 2, dtype=torch.bfloat16), torch.zeros(0)]
    assert checksums(tensors).tolist() == [of(tensor) for tensor in tensors]
    assert checksums([]).shape == (0,)


SUMS = st.lists(st.integers(0, 2**61 - 1), min_size=1, max_size=6)


@given(SUMS, st.data())
def test_one_sum_of_many_that_changes_changes_the_total(sums, data):
    place = data.draw(st.integers(0, len(sums) - 1))
    other = data.draw(st.integers(0, 2**61 - 1))
    changed = [*sums[:place], other, *sums[place + 1 :]]
    totals = [combine(torch.tensor(values)) for values in (sums, changed)]
    assert all(total.shape == (1,) and 0 <= int(total) < 2**61 for total in totals)
    assert (int(totals[0]) == int(totals[1])) == (sums == changed)


def test_parameters_that_change_places_change_the_total():
    sums = checksums([torch.randn(4) for _ in range(5)])
    orders = list(itertools.permutations(range(5)))
    assert len({int(combine(sums[list(order)])) for order in orders}) == len(orders)
