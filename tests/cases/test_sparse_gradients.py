"""nn.Embedding(sparse=True): gradients that are lists of rows, some of them several times."""

import pytest
import torch
from torch import nn


@pytest.mark.parametrize("optimizer_class", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_embedding_with_one_bad_row(optimizer_class, value, watch, drive, told, nonfinite):
    """nn.Embedding(sparse=True): gradients are uncoalesced, token 3 occurs twice, one of its rows is bad."""
    embedding = nn.Embedding(6, 3, sparse=True)
    optimizer = optimizer_class(embedding.parameters(), lr=0.1)
    sentinel = watch(embedding, optimizer)
    tokens = torch.tensor([1, 3, 5, 3])

    def loss_of(step):
        rows = embedding(tokens)
        assert rows.requires_grad
        if step == 1:
            rows.register_hook(lambda g: g.index_put((torch.tensor(3), torch.tensor(2)), torch.tensor(value)))
        return rows.pow(2).mean()

    assert drive(sentinel, [0, 1, 2], loss_of) == ["continue", "skip", "continue"]
    assert told(sentinel) == [(1, "nonfinite_gradient", "skipped")]
    (tensor,) = sentinel.incidents[0].tensors
    assert (tensor.name, tensor.nonfinite, tensor.first_index) == ("weight", 1, (3, 2))
    assert nonfinite(embedding, optimizer) == []


def test_sparse_entries_that_overflow_only_when_summed(watch, drive, told, nonfinite):
    """Two finite entries of one row, 2e38 each: their sum, which the optimizer uses, is Inf."""
    embedding = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    sentinel = watch(embedding, optimizer)

    def loss_of(step):
        rows = embedding(torch.tensor([1, 3, 3]))
        if step == 1:
            rows.register_hook(lambda g: torch.full_like(g, 2e38))
        return rows.pow(2).mean()

    assert drive(sentinel, [0, 1, 2], loss_of) == ["continue", "skip", "continue"]
    assert told(sentinel) == [(1, "nonfinite_gradient", "skipped")]
    assert sentinel.incidents[0].tensors[0].first_index == (3, 0)
    assert nonfinite(embedding, optimizer) == []


def test_sparse_gradients_that_cancel_or_are_huge(watch, drive, nonfinite):
    """Duplicates that cancel and finite rows whose norm overflows are no incident; clipping holds."""
    embedding = nn.Embedding(6, 3, sparse=True)
    embedding.weight.data.zero_()
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    sentinel = watch(embedding, optimizer)

    def loss_of(step):
        rows = embedding(torch.tensor([1, 3, 3]))
        signs = torch.tensor([[1.0], [3e38], [-3e38]]) if step == 0 else torch.tensor([[3e38], [1.0], [1.0]])
        rows.register_hook(lambda g: signs.expand(3, 3).clone())
        return rows.sum()

    assert drive(sentinel, [0, 1], loss_of, max_norm=1.0) == ["continue", "continue"]
    assert sentinel.incidents == ()
    assert nonfinite(embedding, optimizer) == []
    assert embedding.weight.detach().norm(dim=1).max().item() == pytest.approx(2.0, rel=1e-3)


def test_two_accumulated_sparse_micro_batches(watch, drive, told):
    """The second of two micro-batches is bad; sparse gradients add up by concatenation."""
    embedding = nn.Embedding(6, 3, sparse=True)
    sentinel = watch(embedding, torch.optim.SparseAdam(embedding.parameters()))

    def loss_of(batch):
        rows = embedding(torch.tensor([1, 3]))
        if batch == 3:
            rows.register_hook(lambda g: g * torch.nan)
        return rows.pow(2).mean()

    assert drive(sentinel, range(4), loss_of, accumulate=2) == ["continue", "skip"]
    assert told(sentinel) == [(1, "nonfinite_gradient", "skipped")]
    assert sentinel.incidents[0].microbatch == 1
