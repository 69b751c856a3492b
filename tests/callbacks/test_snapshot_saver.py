"""The incident bundle: enough for somebody else, safe to open."""

import json

import torch
from safetensors.torch import load_file
from torch import nn

from gradsentinel import NanCallback, Sentinel, SnapshotSaver
from gradsentinel.archive import read_archive
from gradsentinel.callbacks.snapshot_saver import BUNDLE_KIND
from gradsentinel.rng import RngState

NAN = float("nan")


def train(run_dir, saver, *, accumulate=1, bad=(2,), extra=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batches = [{"x": torch.randn(8, 4), "id": list(range(8)), **(extra or {})} for _ in range(8)]
    for number in bad:
        batches[number]["x"][3, 1] = NAN
    with Sentinel(model, optimizer, callbacks=[NanCallback(), saver], run_dir=run_dir) as sentinel:
        for batch in sentinel.steps(batches, accumulate=accumulate):
            sentinel.backward(model(batch["x"]).square().mean())
            sentinel.step()
    return batches, sentinel


def test_json_and_safetensors_alone_are_enough(run_dir):
    batches, sentinel = train(run_dir, SnapshotSaver())
    bundle = run_dir / "incidents" / sentinel.incidents[0].id
    names = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()}
    assert {name.rpartition(".")[2] for name in names} == {"json", "safetensors"}
    for name in names:
        if name.endswith(".json"):
            json.loads((bundle / name).read_text(encoding="utf-8"))
    tensors = load_file(bundle / "scene" / "state.safetensors")
    assert torch.equal(tensors["microbatches.0.batch.x"], batches[2]["x"]) is False  # NaN equals nothing
    assert torch.equal(tensors["microbatches.0.batch.x"].nan_to_num(7), batches[2]["x"].nan_to_num(7))
    environment = json.loads((bundle / "environment.json").read_text(encoding="utf-8"))
    assert environment["torch"] == torch.__version__
    assert environment["left_out"] == []


def test_the_random_state_is_that_before_the_forward_pass(run_dir):
    _, sentinel = train(run_dir, SnapshotSaver())
    state, meta = read_archive(run_dir / "incidents" / sentinel.incidents[0].id / "scene", kind=BUNDLE_KIND)
    assert meta["step"] == 2
    RngState.from_tree(state["microbatches"][0]["rng"]).restore()
    first = nn.functional.dropout(torch.ones(32), 0.5)
    RngState.from_tree(state["rng"]).restore()
    assert torch.equal(nn.functional.dropout(torch.ones(32), 0.5), first)


def test_only_the_bad_micro_batch_is_kept(run_dir):
    _, sentinel = train(run_dir, SnapshotSaver(), accumulate=4, bad=(6,))
    (incident,) = sentinel.incidents
    state, _ = read_archive(run_dir / "incidents" / incident.id / "scene", kind=BUNDLE_KIND)
    assert [entry["index"] for entry in state["microbatches"]] == [incident.microbatch] == [2]


def test_so_many_bundles_and_no_more(run_dir):
    train(run_dir, SnapshotSaver(max_bundles=1), bad=(2, 4))
    assert len(list((run_dir / "incidents").glob("*/scene"))) == 1
    assert len(list((run_dir / "incidents").glob("*/incident.json"))) == 2


def test_what_is_too_large_is_left_out_and_said(run_dir):
    _, sentinel = train(run_dir, SnapshotSaver(max_bytes=16))
    bundle = run_dir / "incidents" / sentinel.incidents[0].id
    state, _ = read_archive(bundle / "scene", kind=BUNDLE_KIND)
    assert state["microbatches"] == []
    (left_out,) = json.loads((bundle / "environment.json").read_text(encoding="utf-8"))["left_out"]
    assert "max_bytes=16" in left_out


def test_what_cannot_be_stored_without_pickle_is_left_out_and_said(run_dir):
    _, sentinel = train(run_dir, SnapshotSaver(), extra={"thing": object()})
    bundle = run_dir / "incidents" / sentinel.incidents[0].id
    (left_out,) = json.loads((bundle / "environment.json").read_text(encoding="utf-8"))["left_out"]
    assert "thing" in left_out
    state, _ = read_archive(bundle / "scene", kind=BUNDLE_KIND)
    assert state["rng"] is not None
