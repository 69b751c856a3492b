"""Numbers counted by powers of two: exactly, whatever their type."""

import math

import pytest
import torch

from gradsentinel.measures.histogram import BINS, Histogram, count_exponents

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]


def by_hand(values):
    counts = [0] * BINS
    for value in values.tolist():
        if not math.isfinite(value):
            counts[BINS - 1] += 1
        elif abs(value) < 2.0**-126:
            counts[0] += 1
        else:
            counts[min(math.frexp(value)[1] - 1, 127) + 127] += 1
    return counts


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_counts_are_those_of_the_numbers(dtype):
    sizes = torch.logspace(-30, 30, 300, base=2, dtype=torch.float64)
    odd = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 1e-42, 3e38, math.inf, -math.inf, math.nan], dtype=torch.float64
    )
    values = torch.cat([sizes, -sizes, odd]).to(dtype)
    counts = count_exponents(values)
    assert counts.dtype is torch.int32
    assert counts.tolist() == by_hand(values.to(torch.float64))
    assert int(counts.sum()) == values.numel()


def test_what_float32_cannot_hold_is_still_finite():
    counts = count_exponents(torch.tensor([1e200, -1e300, math.inf], dtype=torch.float64))
    assert counts[BINS - 2] == 2
    assert counts[BINS - 1] == 1


def test_no_numbers_are_counted_too():
    histogram = Histogram(count_exponents(torch.zeros(0)).tolist())
    assert histogram.total == 0
    assert math.isnan(histogram.zeros)
    assert math.isnan(histogram.below(0))
    assert histogram.log2() == ([], [])


def test_what_a_histogram_tells():
    values = torch.tensor([0.0, 0.0, 0.75, 1.0, 1.5, -3.0, 2.0**-30, math.nan])
    histogram = Histogram(count_exponents(values).tolist())
    assert histogram.total == 8
    assert histogram.zeros == 2 / 8
    assert histogram.nonfinite == 1
    assert histogram.below(-24) == 1 / 8  # zeros do not underflow, they are there already
    assert histogram.below(1) == 4 / 8
    assert histogram.below(500) == 5 / 8
    assert histogram.below(-500) == 0
    limits, counts = histogram.log2()
    assert limits == [float(n) for n in range(-29, 3)]
    assert {limit: count for limit, count in zip(limits, counts, strict=True) if count} == {
        -29: 1,
        0: 1,
        1: 2,
        2: 1,
    }
