"""Where a rank stands in a job, in a mesh of any shape; and who must hold the same parameters there."""

import contextlib
import math
import re
import socket
import subprocess
import sys
import types

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
from gradsentinel.ranks.replicas import find_replicas
from gradsentinel.ranks.topology import (
    _NODES,
    VARIABLE,
    device_name,
    find_mesh,
    fold_ranks,
    megatron_peers,
    mesh_coordinates,
    stated_coordinates,
    this_rank,
)


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
        (range(5, 16384, 64), "ranks 5-16325 in steps of 64"),
        (range(0, 32, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30"),
    ],
    ids=str,
)
def test_the_words(ranks, text):
    assert fold_ranks(ranks) == text


@given(st.sets(st.integers(0, 16383), min_size=17, max_size=300))
@example(set(range(0, 100, 3)))
def test_many_scattered_ranks_are_counted_and_stay_one_short_line(ranks):
    text = fold_ranks(ranks)
    assert len(text) < 250
    spaced = re.fullmatch(r"ranks (\d+)-(\d+) in steps of (\d+)", text)
    if spaced is not None:
        first, last, step = map(int, spaced.groups())
        assert set(range(first, last + 1, step)) == ranks
        return
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


def test_what_is_no_mesh_is_refused():
    with pytest.raises(ConfigurationError, match="takes a torch DeviceMesh, not a tuple"):
        this_rank(0, torch.device("cpu"), mesh=(2, 2))


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


# -- coordinates from elsewhere -------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Whatever started the tests says nothing about the jobs in them."""
    for name in (VARIABLE, *(name for pair in _NODES for name in pair)):
        monkeypatch.delenv(name, raising=False)


def place(rank, world_size, **arguments):
    return this_rank(rank, torch.device("cpu"), world_size=world_size, **arguments).coordinates


def megatron(**told):
    """Megatron-Core's module as far as this version of it has it; an exception is raised."""

    def answer(value):
        def function(*args, **kwargs):
            if isinstance(value, Exception):
                raise value
            return value

        return function

    module = types.ModuleType("megatron.core.parallel_state")
    for name, value in told.items():
        setattr(module, name, answer(value))
    return module


def groups(**sizes):
    """All functions for these places: tp=(rank, size)."""
    kinds = {
        "tp": "tensor_model",
        "pp": "pipeline_model",
        "dp": "data",
        "cp": "context",
        "ep": "expert_model",
        "etp": "expert_tensor",
    }
    told = {"model_parallel_is_initialized": True, "is_initialized": True}
    for name, (rank, size) in sizes.items():
        told[f"get_{kinds[name]}_parallel_rank"] = rank
        told[f"get_{kinds[name]}_parallel_world_size"] = size
    return told


@pytest.mark.parametrize(
    ("told", "coordinates"),
    [
        (groups(tp=(1, 2), pp=(0, 4), dp=(2, 3)), {"tp": 1, "pp": 0, "dp": 2}),
        (groups(tp=(0, 1), pp=(0, 1), dp=(5, 8), cp=(0, 1), ep=(0, 1)), {"tp": 0, "pp": 0, "dp": 5}),
        (
            groups(tp=(1, 2), pp=(0, 1), dp=(0, 2), cp=(3, 4), ep=(1, 2), etp=(1, 2)),
            {"tp": 1, "pp": 0, "dp": 0, "cp": 3, "ep": 1},
        ),
        (
            groups(tp=(1, 2), pp=(0, 1), dp=(0, 2), ep=(1, 2), etp=(0, 1)),
            {"tp": 1, "pp": 0, "dp": 0, "ep": 1},
        ),
        (
            groups(tp=(3, 4), pp=(0, 1), dp=(0, 2), ep=(1, 2), etp=(1, 2)),
            {"tp": 3, "pp": 0, "dp": 0, "ep": 1, "etp": 1},
        ),
        ({**groups(tp=(1, 2)), "get_data_parallel_rank": AssertionError("not initialized")}, {"tp": 1}),
        ({"get_tensor_model_parallel_rank": 1, "get_expert_model_parallel_rank": 2}, {"tp": 1, "ep": 2}),
        ({**groups(tp=(1, 2)), "model_parallel_is_initialized": False}, {}),
        ({**groups(tp=(1, 2)), "model_parallel_is_initialized": RuntimeError("moved")}, {}),
        ({"get_tensor_model_parallel_rank": None}, {}),
        ({}, {}),
    ],
)
def test_coordinates_from_megatron(monkeypatch, told, coordinates):
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", megatron(**told))
    assert place(0, 4) == coordinates


def test_megatron_is_not_imported():
    code = (
        "import sys; from gradsentinel.ranks.topology import megatron_coordinates, megatron_peers; "
        "assert (megatron_coordinates(), megatron_peers()) == ({}, ()); assert 'megatron' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - ours


def test_a_sentinel_in_a_process_that_uses_megatron_knows_its_place(tmp_path, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "megatron.core.parallel_state", megatron(**groups(tp=(1, 2), pp=(0, 1), dp=(0, 2)))
    )
    model = nn.Linear(2, 1)
    with a_job(4, rank=1):
        sentinel = Sentinel(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=tmp_path)
        assert sentinel._watch.run.rank.coordinates == {"tp": 1, "pp": 0, "dp": 0}


def test_the_ranks_that_exchange_values_come_from_megatron_too(monkeypatch):
    with a_job(4, rank=1):
        mine = dist.new_group([0, 1])
        told = {**groups(tp=(1, 2)), "get_tensor_model_parallel_group": mine}
        monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", megatron(**told))
        assert megatron_peers() == (0, 1)
        told["get_tensor_and_context_parallel_group"] = dist.new_group([0, 1, 2, 3])
        monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", megatron(**told))
        assert megatron_peers() == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("text", "rank", "coordinates"),
    [
        ("dp=2,pp=2,tp=2", 5, {"dp": 1, "pp": 0, "tp": 1}),
        (" pipeline = 4 , Data_Parallel=1, tensor=2", 5, {"pp": 2, "dp": 0, "tp": 1}),
        ("dp_replicate=2,dp_shard=4", 5, {"dp_replicate": 1, "dp_shard": 1}),
        ("tp=8", 5, {"tp": 5}),
    ],
)
def test_coordinates_that_the_environment_states(monkeypatch, text, rank, coordinates):
    monkeypatch.setenv(VARIABLE, text)
    assert place(rank, 8) == coordinates


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_stated_coordinates_are_those_of_a_mesh_of_these_sizes(sizes, data):
    total = math.prod(sizes)
    rank = data.draw(st.integers(0, total - 1))
    text = ",".join(f"d{index}={size}" for index, size in enumerate(sizes))
    where = (torch.arange(total).reshape(sizes) == rank).nonzero()[0].tolist()
    assert list(stated_coordinates(text, rank, total).values()) == where


@pytest.mark.parametrize(
    ("text", "world_size", "said"),
    [
        ("dp=2,tp=2", 8, "that makes 4 ranks, and the job has 8"),
        ("dp=2", 1, "the job has 1 (is torch.distributed initialised before the Sentinel is made?)"),
        ("dp=2,tp", 2, "'tp' is not a name and a size"),
        ("dp=2,", 2, "'' is not a name and a size"),
        ("2,4", 8, "'2' is not a name and a size"),
        ("dp=0", 8, "'dp=0' is not a name and a size"),
        ("dp=-2", 8, "'dp=-2' is not a name and a size"),
        ("dp=two", 8, "'dp=two' is not a name and a size"),
        ("tp=2,tensor=4", 8, "'tensor' is there twice"),
        ("rank=8", 8, "'rank' is no dimension"),
    ],
)
def test_what_the_environment_states_wrongly_is_said(monkeypatch, text, world_size, said):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigurationError) as caught:
        place(0, world_size)
    assert str(caught.value).startswith(f"{VARIABLE}={text!r}: ")
    assert said in str(caught.value)
    assert "as in dp=2,pp=2,tp=2" in str(caught.value)


def test_what_is_told_first_counts(monkeypatch):
    with a_job(4, rank=3):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
        parameters = [distributed(init_device_mesh("cpu", (4,), mesh_dim_names=("d",)), Shard(0))]
        assert place(3, 4, parameters=parameters) == {"d": 3}
        monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", megatron(**groups(tp=(2, 4))))
        assert place(3, 4, parameters=parameters) == {"tp": 2}
        monkeypatch.setenv(VARIABLE, "b=4")
        assert place(3, 4, parameters=parameters) == {"b": 3}
        assert place(3, 4, parameters=parameters, mesh=mesh) == {"a": 3}
        assert place(3, 4, parameters=parameters, mesh=mesh, coordinates={"e": 1}) == {"e": 1}


def test_parameters_on_a_mesh_of_others_tell_nothing():
    with a_job(4, rank=3):
        assert place(3, 4, parameters=[distributed(DeviceMesh("cpu", [0, 1]), Shard(0))]) == {}


@pytest.mark.parametrize(
    ("variables", "world_size", "found"),
    [
        ({"GROUP_RANK": "3", "GROUP_WORLD_SIZE": "4"}, 32, {"node": 3}),
        ({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, 8, {}),
        ({"NODE_RANK": "1", "NNODES": "2"}, 16, {"node": 1}),
        ({"NODE_RANK": "1"}, 16, {}),  # nobody knows whether there is another one
        ({"GROUP_RANK": "x", "GROUP_WORLD_SIZE": "4"}, 8, {}),
        ({"GROUP_RANK": "3", "GROUP_WORLD_SIZE": "4"}, 1, {}),
    ],
)
def test_the_machine_among_several(monkeypatch, variables, world_size, found):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert place(0, world_size) == found
    assert place(0, world_size, coordinates={"tp": 1}) == {"tp": 1, **found}


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
            # Along dp the ranks see other data, and nobody reduces the last two there.
            ("mesh dimension dp", (1, 5)): ("copied",),
        }


@pytest.mark.parametrize("names", [("outer", "inner"), None])
def test_dimensions_along_which_fsdp_shards_are_known_by_their_ranks(names):
    """Rank 5 of 2 times 4; without data-parallel meshes nothing tells the dimensions of the mesh apart."""
    with a_job(8, rank=5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
        parameters = [("weight", distributed(mesh, Shard(0), Shard(1))), ("plain", torch.ones(2))]
        outer = DeviceMesh("cpu", [1, 5])
        inner = "mesh dimension " + (names[1] if names else "1")
        assert told(find_replicas(parameters, data_parallel=[outer])) == {(inner, (4, 5, 6, 7)): ("plain",)}
        assert len(find_replicas(parameters)) == 2
        assert find_replicas(parameters, data_parallel=[mesh]) == []


def test_what_ddp_and_tensor_parallelism_copy_is_compared_in_both():
    with a_job(4, rank=1):
        tp = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        group = dist.new_group([1, 3])
        parameters = [
            ("weight", distributed(tp, Shard(0))),
            ("norm", distributed(tp, Replicate())),
            ("plain", torch.ones(2)),
        ]
        assert told(find_replicas(parameters, replicated=lambda name: group)) == {
            ("data-parallel replicas", (1, 3)): ("weight", "norm", "plain"),
            ("mesh dimension tp", (0, 1)): ("norm", "plain"),
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
