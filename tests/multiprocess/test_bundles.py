"""Each rank keeps its own part of the evidence, and one rank's part is enough to run its step again."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradsentinel import NanCallback, Sentinel, SnapshotSaver
from gradsentinel.diagnosis import offline
from gradsentinel.diagnosis.bundle import Bundle, ranks_in
from gradsentinel.diagnosis.stage import CannotReplay, set_up
from gradsentinel.diagnosis.target import Target
from gradsentinel.diagnosis.verify import verify
from gradsentinel.names import ranks_with_map, read_map

pytestmark = pytest.mark.multiprocess


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def loss(model, batch):
    return model(batch["x"]).pow(2).sum(1).sqrt().mean()


def safe(model, batch):
    return (model(batch["x"]).pow(2).sum(1) + 1e-12).sqrt().mean()


def job(rank, run_dir):
    model = DistributedDataParallel(build())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    batches = [{"x": torch.randn(3, 4) + rank} for _ in range(3)]
    if rank == 1:
        batches[1]["x"][2] = 0.0  # sqrt'(0)
    with Sentinel(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        callbacks=[NanCallback(), SnapshotSaver(level="full")],
        run_dir=run_dir,
        forward=loss,
    ) as sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(loss(model, batch))
            sentinel.step()
    (incident,) = sentinel.incidents
    return incident.id, batches[1]["x"]


def sharded_job(rank, run_dir):
    model = build()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    batches = [{"x": torch.ones(3, 4)}, {"x": torch.full((3, 4), torch.nan)}]
    with Sentinel(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[NanCallback(), SnapshotSaver(level="full")],
        run_dir=run_dir,
    ) as sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(loss(model, batch))
            sentinel.step()
    return [incident.id for incident in sentinel.incidents]


def test_shards_are_told_from_whole_models(tmp_path: Path):
    run_dir = tmp_path / "run"
    names = run_ranks(sharded_job, 2, tmp_path, str(run_dir))
    assert names[0] == names[1]
    first = read_map(run_dir, 1)["parameters"][0]
    assert (first["name"], first["shape"], first["local_shape"], first["numel"]) == (
        "0.weight",
        [4, 4],
        [2, 4],
        8,
    )
    assert [entry["offset"] for entry in read_map(run_dir, 1)["parameters"]] == [0, 8, 10, 18]
    bundle = Bundle(run_dir / "incidents" / names[0][0], 1)
    state, meta = bundle.read("state")
    assert meta["sharded"] is True
    assert state["parameters"]["0.weight"].shape == (2, 4)
    target = Target(name="t", model=build(), forward=loss)
    with pytest.raises(CannotReplay, match="--own-weights"):
        set_up(bundle, target)
    assert set_up(bundle, target, own_weights=True).weights is False


def test_each_rank_keeps_its_own_part(tmp_path: Path):
    run_dir = tmp_path / "run"
    results = run_ranks(job, 2, tmp_path, str(run_dir))
    (name,) = {name for name, _ in results}
    directory = run_dir / "incidents" / name
    assert ranks_in(directory) == [0, 1]
    assert ranks_with_map(run_dir) == [0, 1]
    assert read_map(run_dir, 1)["rank"]["rank"] == 1
    for rank, (_, x) in enumerate(results):
        bundle = Bundle(directory, rank)
        assert set(bundle.facts()["parts"]) >= {
            *(f"scene-rank{rank}/", f"state-rank{rank}/", f"statistics-rank{rank}.json")
        }
        state, meta = bundle.scene()
        assert torch.equal(state["microbatches"][0]["batch"]["x"], x)
        assert meta["rank"] == rank
    guilty = Bundle(directory)
    assert guilty.rank == 1
    assert guilty.program == directory / "repro-rank1.py"
    assert Bundle(directory, 0).program is None
    stage = set_up(guilty, Target(name="t", model=build(), forward=loss))
    assert stage.weights
    assert offline.same_verdict(guilty.incident.diagnosis, offline.judge(stage))
    assert guilty.incident.diagnosis.node == "SqrtBackward0"
    assert verify(set_up(guilty, Target(name="t", model=build(), forward=safe), fixed=True)).holds is True
    innocent = set_up(Bundle(directory, 0), Target(name="t", model=build(), forward=loss))
    assert offline.compute(innocent).finite
