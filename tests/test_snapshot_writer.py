"""States that torch's own save writes in one process, beside those of a run."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from gradsentinel import NanCallback, Rollback, Sentinel
from gradsentinel.state.checkpoint import SnapshotReader, SnapshotWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_that_begin_at_an_odd_place_of_the_file(dtype, tmp_path):
    """One float before them: the file that is mapped holds them where none can be viewed."""
    value = torch.randn(3, dtype=dtype)
    dcp.save(
        {"a": torch.ones(1, dtype=dtype.to_real()), "c": value},
        storage_writer=SnapshotWriter(tmp_path, step=1),
    )
    found = {"a": torch.zeros(1, dtype=dtype.to_real()), "c": torch.zeros(3, dtype=dtype)}
    dcp.load(found, storage_reader=SnapshotReader(tmp_path, step=1))
    assert torch.equal(found["c"], value)


def test_what_was_saved_on_purpose_goes_before_what_the_run_keeps(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keep = Rollback(every=5, confirm_after=1, on_disk=2)
    with Sentinel(model, optimizer, callbacks=[NanCallback(), keep], run_dir=tmp_path) as sentinel:
        for _ in range(12):
            sentinel.backward(model(torch.ones(1, 2)).square().sum())
            sentinel.step()
    state = {"weight": torch.full((1, 2), 7.0)}
    dcp.save(state, storage_writer=SnapshotWriter(tmp_path, step=10))
    found = {"weight": torch.zeros(1, 2)}
    dcp.load(found, storage_reader=SnapshotReader(tmp_path, step=10))
    assert torch.equal(found["weight"], state["weight"])


def test_a_tensor_that_cannot_be_divided_is_refused_by_its_name(tmp_path):
    state = {"dense": torch.ones(2), "odd": {"sparse": torch.eye(3).to_sparse()}}
    with pytest.raises(
        dcp.api.CheckpointException, match=r"odd\.sparse: a tensor of the layout torch.sparse_coo"
    ):
        dcp.save(state, storage_writer=SnapshotWriter(tmp_path, step=2))
