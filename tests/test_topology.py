"""Where a rank stands in a job, in a mesh of any shape; and who must hold the same parameters there."""

import contextlib
import re
import socket

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from gradsentinel import Sentinel
from gradsentinel.errors import ConfigurationError
from gradsentinel.replicas import find_replicas
from gradsentinel.topology import device_name, find_mesh, fold_ranks, mesh_coordinates, this_rank


@contextlib.contextmanager
def a_job(world_size, *, rank):
    """One rank of a job whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distributed(mesh, *placements):
    return DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False)


# -- ranks in few words ---------------------------------------------------------------------------------


def unfold(text):
    """The ranks that a text names."""
    runs = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {rank for low, high in runs for rank in range(int(low), int(high or low) + 1)}


@given(st.sets(st.integers(0, 16), max_size=16))
@example({3})
@example(set(range(64)))
def test_folded_ranks_can_be_unfolded(ranks):
    text = fold_ranks(ranks)
    assert unfold(text) == ranks
    assert text.startswith(("rank ", "no rank") if len(ranks) < 2 else "ranks ")


@given(st.lists(st.integers(0, 30), max_size=12))
def test_the_order_does_not_matter_and_nobody_is_told_twice(ranks):
    assert fold_ranks(ranks) == fold_ranks(sorted(set(ranks)))
    assert fold_ranks(iter(ranks)) == fold_ranks(ranks)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), "no rank"),
        ((3,), "rank 3"),
        (range(64), "ranks 0-63"),
        ((0, 1), "ranks 0-1"),
        ((0, 2, *range(8, 16)), "ranks 0, 2, 8-15"),
        (range(16384), "ranks 0-16383"),
    ],
    ids=str,
)
def test_the_words(ranks, text):
    assert fold_ranks(ranks) == text


@given(st.sets(st.integers(0, 16383), min_size=17, max_size=300))
def test_many_scattered_ranks_are_counted_and_stay_one_short_line(ranks):
    text = fold_ranks(ranks)
    assert len(text) < 250
    listed, _, rest = text.partition(", and ")
    assert unfold(listed) <= ranks
    if not rest:
        assert unfold(listed) == ranks
        return
    runs = sum(rank - 1 not in ranks for rank in ranks)
    assert rest == f"{runs - 15} more runs"


# -- coordinates ----------------------------------------------------------------------------------------


def test_a_named_mesh_gives_short_names():
    with a_job(8, rank=5):
        mesh = init_device_mesh(
            "cpu", (2, 2, 2), mesh_dim_names=("pipeline", "dp_replicate", "tensor_parallel")
        )
        assert mesh_coordinates(mesh) == {"pp": 1, "dp_replicate": 0, "tp": 1}
        assert mesh_coordinates(mesh["tensor_parallel"]) == {"tp": 1}
        me = this_rank(5, torch.device("cpu"), mesh=mesh)
    assert (me.rank, me.host, me.device) == (5, socket.gethostname(), "cpu")
    assert me.coordinates == {"pp": 1, "dp_replicate": 0, "tp": 1}


@pytest.mark.parametrize("rank", range(8))
def test_an_unnamed_mesh_numbers_its_dimensions(rank):
    with a_job(8, rank=rank):
        mesh = init_device_mesh("cpu", (2, 4))
        assert mesh_coordinates(mesh) == {"dim0": rank // 4, "dim1": rank % 4}


def test_coordinates_come_from_the_framework_where_there_is_no_mesh():
    me = this_rank(3, torch.device("cpu"), coordinates={"tp": 1, "pp": 0})
    assert me.coordinates == {"tp": 1, "pp": 0}
    assert me.as_dict()["tp"] == 1
    assert this_rank(0, torch.device("cpu")).coordinates == {}


def test_a_rank_outside_of_the_mesh_is_told_so():
    with a_job(4, rank=3):
        mesh = DeviceMesh("cpu", [0, 1, 2])
        with pytest.raises(ConfigurationError, match="this rank is not in the device mesh"):
            this_rank(3, torch.device("cpu"), mesh=mesh)


def test_a_sentinel_is_told_so_at_once(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with a_job(4, rank=3):
        mesh = DeviceMesh("cpu", [0, 1, 2])
        with pytest.raises(ConfigurationError, match="this rank is not in the device mesh"):
            Sentinel(model, optimizer, run_dir=tmp_path / "run", mesh=mesh)


def test_the_mesh_of_a_model_is_the_one_with_the_most_dimensions():
    with a_job(4, rank=1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensors = [
            torch.ones(1),
            distributed(mesh["dp"], Shard(0)),
            distributed(mesh, Shard(0), Replicate()),
            distributed(mesh["tp"], Replicate()),
        ]
        assert find_mesh(tensors) == mesh
        assert find_mesh(tensors[:2]) == mesh["dp"]
    assert find_mesh(tensors[:1]) is None
    assert find_mesh([]) is None


@pytest.mark.parametrize(
    ("device", "local_rank", "name"),
    [
        ("cpu", "3", "cpu"),
        ("cuda", "3", "cuda:3"),
        ("cuda:1", "3", "cuda:1"),
        ("cuda", None, "cuda:0"),
    ],
)
def test_a_device_without_a_number_gets_that_of_the_launcher(monkeypatch, device, local_rank, name):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert device_name(torch.device(device)) == name


# -- who must hold the same -----------------------------------------------------------------------------


def told(groups):
    return {(group.name, tuple(group.ranks)): group.members for group in groups}


def test_what_is_replicated_in_a_mesh_of_two_dimensions():
    """Rank 5 of 2 data-parallel times 4 tensor-parallel ranks."""
    with a_job(8, rank=5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        parameters = [
            ("weight", distributed(mesh, Shard(0), Shard(1))),
            ("norm", distributed(mesh, Shard(0), Replicate())),
            ("copied", distributed(mesh, Replicate(), Replicate())),
            ("over dp only", distributed(mesh["dp"], Shard(0))),
            ("over tp only", distributed(mesh["tp"], Shard(0))),
            ("plain", torch.ones(2)),
        ]
        assert told(find_replicas(parameters)) == {
            ("mesh dimension tp", (4, 5, 6, 7)): ("norm", "copied", "over dp only", "plain"),
            ("mesh dimension dp", (1, 5)): ("copied", "over tp only", "plain"),
        }


def test_hsdp_replicas():
    with a_job(4, rank=2):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        parameters = [(name, distributed(mesh, Replicate(), Shard(0))) for name in "ab"]
        assert told(find_replicas(parameters)) == {("mesh dimension dp_replicate", (0, 2)): ("a", "b")}


def test_an_unnamed_mesh_and_one_of_others_claim_nothing_of_each_other():
    with a_job(4, rank=1):
        mesh = init_device_mesh("cpu", (2, 2))
        other = DeviceMesh("cpu", [0, 1])
        parameters = [("a", distributed(mesh, Shard(0), Replicate())), ("b", distributed(other, Shard(0)))]
        assert told(find_replicas(parameters)) == {("mesh dimension 1", (0, 1)): ("a",)}


def test_pure_sharding_has_no_replicas():
    with a_job(4, rank=1):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        assert find_replicas([("a", distributed(mesh, Shard(0)))]) == []
        alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp_shard", "dp_replicate"))
        assert find_replicas([("a", distributed(alone, Shard(0), Replicate()))]) == []


def test_data_parallel_replicas_are_those_of_the_wrapper():
    with a_job(4, rank=1):
        group = dist.new_group([1, 3])
        found = find_replicas(
            [("mine", torch.ones(1)), ("other", torch.ones(1))],
            replicated={"mine": group}.get,
        )
        assert told(found) == {("data-parallel replicas", (1, 3)): ("mine",)}
        assert found[0].group is group
