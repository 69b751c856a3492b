"""Every element is looked at in turn: once in so many checks, which are alike and no larger than was said."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel import ConfigurationError
from gradsentinel.measures.sampling import MOST_PIECES, Piece, Rotation, cut, size_of

SIZES = st.lists(
    st.one_of(st.integers(0, 12), st.integers(0, 2000), st.sampled_from([2**10, 2**16, 10**6])), max_size=60
)


def rotation_of(sizes, bound):
    return Rotation([(f"p{place}", size) for place, size in enumerate(sizes)], bound)


def cost(rotation, sample):
    """What a check was charged: its elements, and a little for each piece that is tiny."""
    least = -(-rotation.elements_per_check // MOST_PIECES)
    return sum(max(len(piece), least) for piece in sample)


@pytest.mark.slow
@given(SIZES, st.one_of(st.integers(2, 40), st.integers(2, 10**6)))
def test_each_element_is_in_one_check_of_a_round(sizes, bound):
    rotation = rotation_of(sizes, bound)
    if rotation.rounds > 3000:  # the next test has those
        return
    pieces: dict[str, list[tuple[int, int]]] = {}
    for check in range(rotation.rounds):
        for piece in rotation.sample(check):
            assert piece.whole == sizes[int(piece.name[1:])]
            pieces.setdefault(piece.name, []).append((piece.start, piece.stop))
    for place, size in enumerate(sizes):
        end = 0
        for start, stop in sorted(pieces.get(f"p{place}", [])):
            assert start == end < stop
            end = stop
        assert end == size


@given(SIZES, st.one_of(st.integers(2, 40), st.integers(2, 10**6)), st.integers(0, 10**9))
def test_every_check_is_within_its_bounds_and_like_the_others(sizes, bound, first):
    rotation = rotation_of(sizes, bound)
    samples = [rotation.sample(first + number) for number in range(min(rotation.rounds, 50))]
    costs = [cost(rotation, sample) for sample in samples]
    assert all(sum(map(len, sample)) <= bound for sample in samples)
    assert all(len(sample) <= MOST_PIECES for sample in samples)
    assert max(costs) - min(costs) <= rotation.piece


@given(SIZES, st.integers(2, 10**6))
def test_there_are_not_many_more_rounds_than_needed(sizes, bound):
    rotation = rotation_of(sizes, bound)
    least = -(-bound // MOST_PIECES)
    charged = sum(
        size // rotation.piece * rotation.piece
        + (max(size % rotation.piece, least) if size % rotation.piece else 0)
        for size in sizes
    )
    assert rotation.rounds <= max(1, -(-charged // (bound - rotation.piece)))
    assert rotation.rounds == 1 or rotation.rounds * bound >= charged


def test_a_model_of_a_trillion_is_dealt_out_without_being_listed():
    sizes = [(f"layer{n // 12}.{n % 12}", 175 * 10**12 // 1200) for n in range(1200)]
    rotation = Rotation(sizes, 2**24)
    assert rotation.rounds == -(-sum(size for _, size in sizes) // (2**24 - rotation.piece))
    assert sum(map(len, rotation.sample(rotation.rounds - 1))) <= 2**24


def test_a_bound_beyond_all_elements_takes_one_check():
    rotation = Rotation([("a", 10), ("b", 0), ("c", 7)], 100)
    assert rotation.rounds == 1
    assert rotation.covers_after(every=50) == 50
    seen = sorted((piece.name, piece.start, piece.stop) for piece in rotation.sample(12345))
    assert seen == [("a", 0, 10), ("c", 0, 7)]


def test_no_tensors_are_no_trouble():
    rotation = Rotation([], 10)
    assert (rotation.rounds, rotation.sample(3)) == (1, ())


def test_each_check_has_something_from_all_over_the_model():
    """Forty-eight layers, each with two matrices, a bias and a norm."""
    parts = {"attention": 4096 * 64, "mlp": 16384 * 64, "bias": 4096, "norm": 512}
    sizes = [(f"{layer}.{part}", size) for layer in range(48) for part, size in parts.items()]
    rotation = Rotation(sizes, 8 * 2**20)
    assert rotation.rounds > 5
    for check in range(rotation.rounds):
        sample = rotation.sample(check)
        layers = {int(piece.name.split(".")[0]) for piece in sample}
        assert all(layers & set(range(start, start + 16)) for start in (0, 16, 32))
        assert {"attention", "mlp", "bias"} <= {piece.name.split(".")[1] for piece in sample}


def test_the_same_sizes_give_the_same_checks():
    """Ranks and restarted runs have nothing but the sizes and the number of the check."""
    sizes = [(f"p{n}", (n * 7919) % 5000) for n in range(300)]
    one, two = Rotation(sizes, 2**14), Rotation(iter(sizes), 2**14)
    assert one.rounds == two.rounds
    assert [one.sample(n) for n in range(one.rounds)] == [
        two.sample(n + two.rounds) for n in range(two.rounds)
    ]


@pytest.mark.parametrize("bound", [1, 0, -5])
def test_a_bound_that_lets_nothing_through_is_refused(bound):
    with pytest.raises(ConfigurationError, match=f"elements_per_check={bound}"):
        Rotation([("a", 3)], bound)


def tensors():
    torch.manual_seed(0)
    return {
        "contiguous": torch.randn(6, 10, 4),
        "transposed": torch.randn(40, 30).t(),
        "channels last": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 7).expand(9, 7),
        "strided": torch.randn(100)[::3],
        "scalar": torch.tensor(2.0),
        "half": torch.randn(50).half(),
        "float8": torch.randn(50).to(torch.float8_e4m3fn),
    }


@pytest.mark.parametrize("name", tensors())
def test_pieces_are_those_of_the_flat_tensor(name):
    tensor = tensors()[name]
    flat = tensor.contiguous().view(-1)
    for piece in rotation_of([tensor.numel()], 37).sample(1):
        assert torch.equal(cut(tensor, piece).float(), flat[piece.start : piece.stop].float())
    whole = Piece("p0", 0, tensor.numel(), tensor.numel())
    assert torch.equal(cut(tensor, whole).float(), flat.float())


def test_a_piece_of_a_contiguous_tensor_is_no_copy():
    tensor = torch.randn(8, 8, requires_grad=True)
    piece = cut(tensor, Piece("p", 10, 20, 64))
    assert piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert not piece.requires_grad


def test_a_complex_number_is_two():
    tensor = torch.randn(5, dtype=torch.complex64)
    assert size_of(tensor) == 10
    assert torch.equal(cut(tensor, Piece("p", 3, 7, 10)), torch.view_as_real(tensor).flatten()[3:7])
    assert torch.equal(
        cut(tensor.conj(), Piece("p", 0, 10, 10)), torch.view_as_real(tensor.conj().resolve_conj()).flatten()
    )


@pytest.mark.parametrize("rows", [0, 1, 3, 50])
def test_pieces_of_a_sparse_gradient_are_of_what_it_stores_and_no_larger(rows):
    index = torch.randint(20, (1, rows))
    values = torch.randn(rows, 4)
    gradient = torch.sparse_coo_tensor(index, values, (20, 4), check_invariants=False)
    pieces = [cut(gradient, Piece("p", start, start + 16, 80)) for start in range(0, 80, 16)]
    assert all(piece.numel() <= 16 for piece in pieces)
    if values.numel() <= 80:
        assert torch.equal(torch.cat(pieces), values.flatten())
