"""Infinities in records of a batch, in whatever kind of tensor they are."""

import math

import pytest
import torch

from gradsentinel.diagnosis.findings import _has_infinities, _with_infinities

ROWS = torch.tensor([[0.0, 1.0], [math.inf, 0.0]])


def test_the_rows_that_hold_some():
    assert _with_infinities(ROWS, 2) == [1]
    assert _with_infinities(ROWS, 3) == []
    assert _with_infinities(ROWS.to(torch.float8_e5m2), 2) == [1]
    assert (
        _with_infinities(torch.ones(2).to(torch.float8_e4m3fn), 2) == []
    )  # has none, and no kernel that looks


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.clone])
def test_any_layout_is_looked_into(kind):
    assert _has_infinities(kind(ROWS))
    assert not _has_infinities(kind(torch.eye(2)))
    assert _with_infinities(kind(torch.eye(2)), 2) == []
