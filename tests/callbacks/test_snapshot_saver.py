"""The incident bundle: enough for somebody else, safe to open, and no danger to the run."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gradsentinel import (
    Callback,
    ConfigurationError,
    Kind,
    NanCallback,
    Rollback,
    Sentinel,
    SnapshotSaver,
    TrainingAborted,
)
from gradsentinel.diagnosis import bundle as bundles
from gradsentinel.diagnosis.bundle import Bundle
from gradsentinel.diagnosis.storable import Gone, from_stored, to_storable
from gradsentinel.state.archive import read_archive
from gradsentinel.state.rng import RngState
from loops import differences

NAN = float("nan")


def forward(model, batch):
    return model(batch["x"]).square().mean()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))


def train(run_dir, saver, *more, accumulate=1, bad=(2,), extra=None, tells_forward=False, model=None):
    model = network() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    batches = [
        {"x": torch.randn(8, 4), "id": list(range(8 * n, 8 * n + 8)), **(extra or {})} for n in range(8)
    ]
    for number in bad:
        batches[number]["x"][3, 1] = NAN
    with Sentinel(
        model,
        optimizer,
        callbacks=[NanCallback(), *more, saver],
        run_dir=run_dir,
        forward=forward if tells_forward else None,
    ) as sentinel:
        for batch in sentinel.steps(batches, accumulate=accumulate):
            sentinel.backward(forward(model, batch))
            sentinel.step()
    return batches, sentinel


def directory_of(sentinel, number=0):
    return sentinel.run_dir / "incidents" / sentinel.incidents[number].id


def facts_of(directory):
    return json.loads((directory / "bundle.json").read_text(encoding="utf-8"))


def test_json_and_safetensors_alone_are_enough(run_dir):
    batches, sentinel = train(run_dir, SnapshotSaver(level="full"))
    bundle = directory_of(sentinel)
    names = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()}
    assert {name.rpartition(".")[2] for name in names} == {"json", "safetensors"}
    for name in names:
        if name.endswith(".json"):
            json.loads((bundle / name).read_text(encoding="utf-8"))
    tensors = load_file(bundle / "scene" / "state.safetensors")
    assert torch.equal(tensors["microbatches.0.batch.x"], batches[2]["x"]) is False  # NaN equals nothing
    assert torch.equal(tensors["microbatches.0.batch.x"].nan_to_num(7), batches[2]["x"].nan_to_num(7))
    assert facts_of(bundle)["left_out"] == []


@pytest.mark.parametrize(
    ("level", "parts"),
    [
        ("light", set()),
        ("standard", {"scene/"}),
        ("full", {"scene/", "state/", "gradients/"}),
    ],
)
def test_the_three_levels(run_dir, level, parts):
    _, sentinel = train(run_dir, SnapshotSaver(level=level))
    facts = facts_of(directory_of(sentinel))
    assert (facts["level"], facts["rank"], facts["world_size"], facts["step"]) == (level, 0, 1, 2)
    assert set(facts["parts"]) == {"environment.json", "statistics.json", *parts}
    there = {entry.name + "/" * entry.is_dir() for entry in directory_of(sentinel).iterdir()}
    assert there == {*facts["parts"], "bundle.json", "incident.json", "norms.json"}


def test_unusable_settings_are_refused():
    for settings in ({"level": "huge"}, {"max_bytes": -1}, {"max_bundles": -1}, {"min_action": "perhaps"}):
        with pytest.raises(ConfigurationError):
            SnapshotSaver(**settings)
    with pytest.raises(ConfigurationError, match="light, standard, full"):
        SnapshotSaver(level=3.5)


def test_the_state_is_that_of_the_failing_step(run_dir):
    """Weights, moments and buffers from before its forward pass, which has written to BatchNorm's."""
    seen = {}

    class Look(Callback):
        def on_step_start(self, event):
            if event.step == 2:
                seen["model"] = {k: v.clone() for k, v in model.state_dict().items()}
                state = sentinel.host.optimizers[0].state
                seen["moments"] = {n: state[p]["exp_avg"].clone() for n, p in model.named_parameters()}

    model = network()
    batches = [torch.randn(8, 4) for _ in range(4)]
    batches[2][3, 1] = NAN
    with Sentinel(
        model,
        torch.optim.AdamW(model.parameters(), 0.01),
        callbacks=[NanCallback(), Look(), Rollback(every=1, confirm_after=1), SnapshotSaver(level="full")],
        run_dir=run_dir,
    ) as sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(model(batch).square().mean())
            sentinel.step()
    bundle = Bundle(directory_of(sentinel))
    state, meta = bundle.read("state")
    assert meta == {"moment": "before the step", "sharded": False, "optimizers": True}
    assert differences({**state["parameters"], **state["buffers"]}, seen["model"]) == []
    saved = {name: entries["exp_avg"] for name, entries in state["optimizers"][0]["state"].items()}
    assert differences(saved, seen["moments"]) == []
    gradients, _ = bundle.read("gradients")
    assert gradients["gradients"]["0.weight"].isnan().any()
    good, meta = bundle.read("known-good")
    assert meta["step"] < 2
    assert set(good["parameters"]) == {name for name, _ in model.named_parameters()}


def test_the_random_state_is_that_before_the_forward_pass(run_dir):
    _, sentinel = train(run_dir, SnapshotSaver())
    state, meta = read_archive(directory_of(sentinel) / "scene", kind="scene")
    assert (meta["step"], meta["count"], meta["loss_scale"], meta["evaluating"]) == (2, 1, None, [])
    RngState.from_tree(state["microbatches"][0]["rng"]).restore()
    first = nn.functional.dropout(torch.ones(32), 0.5)
    RngState.from_tree(state["rng"]).restore()
    assert torch.equal(nn.functional.dropout(torch.ones(32), 0.5), first)


def test_only_the_bad_micro_batch_is_kept_and_with_the_weights_all_are(tmp_path):
    for level, kept in (("standard", [2]), ("full", [0, 1, 2, 3])):
        _, sentinel = train(tmp_path / level, SnapshotSaver(level=level), accumulate=4, bad=(6,))
        (incident,) = sentinel.incidents
        state, meta = read_archive(directory_of(sentinel) / "scene", kind="scene")
        assert [entry["index"] for entry in state["microbatches"]] == kept
        assert incident.microbatch == 2
        assert (meta["count"], meta["divisor"]) == (4, 4)


def test_a_micro_batch_that_only_the_diagnosis_blames_is_added(run_dir):
    class Blame(Callback):
        def on_diagnosis(self, event):
            event.incident.microbatch = 1

    _, sentinel = train(run_dir, SnapshotSaver(), Blame(), accumulate=4, bad=(6,))
    bundle = Bundle(directory_of(sentinel))
    assert "scene-microbatch1/" in bundle.facts()["parts"]
    state, meta = bundle.scene()
    assert [entry["index"] for entry in state["microbatches"]] == [1, 2]
    assert meta["count"] == 4


def test_statistics_tell_norms_counts_and_ranges(run_dir):
    batches, sentinel = train(run_dir, SnapshotSaver(level="light"))
    told = json.loads((directory_of(sentinel) / "statistics.json").read_text())
    assert (told["schema"], told["step"], told["loss"], told["learning_rates"]) == (1, 2, "nan", [[0.01]])
    rows = {entry["name"]: entry for entry in told["parameters"]}
    weight = sentinel.model[0].weight
    assert rows["0.weight"]["grad_nonfinite"] == rows["0.weight"]["grad_numel"] == weight.numel() == 16
    assert rows["0.weight"]["nonfinite"] == 0
    (bad,), (healthy,) = told["batch"], told["healthy"]
    assert bad["tensors"]["x"]["nonfinite"] == 1
    assert bad["tensors"]["x"]["shape"] == [8, 4]
    assert bad["tensors"]["x"]["max"] == pytest.approx(float(batches[2]["x"].nan_to_num(-9).max()))
    assert healthy["tensors"]["x"]["nonfinite"] == 0
    assert healthy["tensors"]["x"]["fingerprint"] != bad["tensors"]["x"]["fingerprint"]


def test_the_environment_holds_what_changes_results(run_dir, monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC", "NCCL_ALGO", "SECRET_TOKEN"):
        monkeypatch.setenv(name, "x")
    _, sentinel = train(run_dir, SnapshotSaver(level="light"))
    told = json.loads((directory_of(sentinel) / "environment.json").read_text(encoding="utf-8"))
    assert told["torch"] == torch.__version__
    assert told["deterministic_algorithms"] is False
    assert told["cudnn"]["benchmark"] is False
    assert told["npu"] is None
    assert {"CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC", "NCCL_ALGO"} <= set(told["variables"])
    assert "SECRET_TOKEN" not in told["variables"]


def test_so_many_bundles_and_no_more(run_dir):
    train(run_dir, SnapshotSaver(max_bundles=1), bad=(2, 4))
    assert len(list((run_dir / "incidents").glob("*/scene"))) == 1
    assert len(list((run_dir / "incidents").glob("*/incident.json"))) == 2


def test_what_is_too_large_is_left_out_and_said(run_dir):
    _, sentinel = train(run_dir, SnapshotSaver(level="full", max_bytes=16))
    directory = directory_of(sentinel)
    state, _ = read_archive(directory / "scene", kind="scene")
    assert state["microbatches"] == []
    left_out = facts_of(directory)["left_out"]
    assert [text.partition(":")[0] for text in left_out] == [
        "micro-batch 0",
        "a healthy batch to compare with",
        "weights and buffers",
        "gradients",
    ]
    assert all("max_bytes" in text for text in left_out)


def test_the_weights_are_kept_without_the_moments_if_only_they_fit(run_dir):
    model = network()
    batch = 8 * 4 * 4
    weights = sum(t.nbytes for t in model.state_dict().values())
    room = (batch + weights + 200) * 8 // 7 + 8  # an eighth is reserved for the bad operator
    _, sentinel = train(run_dir, SnapshotSaver(level="full", max_bytes=room), model=model)
    state, meta = Bundle(directory_of(sentinel)).read("state")
    assert (meta["optimizers"], state["optimizers"]) == (False, [])
    assert set(state["parameters"]) == {name for name, _ in model.named_parameters()}
    assert any(text.startswith("optimizer state") for text in facts_of(directory_of(sentinel))["left_out"])


def test_what_cannot_be_stored_without_pickle_is_left_out_and_the_rest_is_kept(run_dir):
    batches, sentinel = train(run_dir, SnapshotSaver(), extra={"thing": object()})
    (left_out,) = facts_of(directory_of(sentinel))["left_out"]
    assert "micro-batch 0: thing (object)" in left_out
    state, _ = read_archive(directory_of(sentinel) / "scene", kind="scene")
    assert state["rng"] is not None
    batch = from_stored(state["microbatches"][0]["batch"])
    assert torch.equal(batch["x"].nan_to_num(7), batches[2]["x"].nan_to_num(7))
    with pytest.raises(AttributeError, match=r"thing \(object\) is not in the bundle"):
        batch["thing"].anything  # noqa: B018 - reading it is what raises


# -- copies and the thread -----------------------------------------------------------------------------


def test_what_the_loop_does_next_does_not_get_into_the_bundle(run_dir, monkeypatch):
    """The thread is held up until batch and weights are not any more what they were."""
    release, write_json = threading.Event(), bundles.write_json

    def slowly(path, data):
        assert release.wait(60)
        write_json(path, data)

    monkeypatch.setattr(bundles, "write_json", slowly)
    model = network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    given = torch.randn(8, 4)
    original = given.clone()
    with Sentinel(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        callbacks=[NanCallback(), SnapshotSaver(level="full")],
        run_dir=run_dir,
    ) as sentinel:
        for number, batch in enumerate(sentinel.steps([given] * 6)):
            sentinel.backward(model(batch).square().mean() * (NAN if number == 0 else 1.0))
            sentinel.step()
            given.add_(1.0)
        assert sentinel.applied_steps == 5
        assert not (directory_of(sentinel) / "scene").exists()
        release.set()
    state, _ = read_archive(directory_of(sentinel) / "scene", kind="scene")
    assert torch.equal(state["microbatches"][0]["batch"], original)
    weights, _ = Bundle(directory_of(sentinel)).read("state")
    assert differences(weights["parameters"], before) == []


def test_a_disk_that_refuses_is_an_incident_and_the_run_goes_on(run_dir, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bundles, "write_archive", full)
    _, sentinel = train(run_dir, SnapshotSaver(), bad=(2, 4))
    assert sentinel.applied_steps == 6
    reports = [incident for incident in sentinel.incidents if incident.kind is Kind.CALLBACK_ERROR]
    assert reports
    assert reports[0].message.startswith("SnapshotSaver: the bundle of 000002-nonfinite_input could not be")
    assert "No space left on device" in reports[0].message
    assert "could not be written" in caplog.text
    assert not list((run_dir / "incidents").glob("*callback_error*/bundle.json"))
    events = (run_dir / "events-rank0.jsonl").read_text()
    assert "callback_error" in events


def test_a_file_in_the_way_is_reported_too(run_dir):
    (run_dir / "incidents" / "000002-nonfinite_input").mkdir(parents=True)
    (run_dir / "incidents" / "000002-nonfinite_input-2").write_text("in the way")
    _, sentinel = train(run_dir, SnapshotSaver())
    assert sentinel.applied_steps == 7


def test_the_bundle_is_whole_when_the_run_is_aborted(run_dir):
    model = network()
    sentinel = Sentinel(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        callbacks=[NanCallback(action="abort"), SnapshotSaver(level="full")],
        run_dir=run_dir,
    )
    (batch,) = sentinel.steps([torch.full((8, 4), NAN)])
    sentinel.backward(model(batch).square().mean())
    with pytest.raises(TrainingAborted):
        sentinel.step()
    directory = directory_of(sentinel)
    assert set(facts_of(directory)["parts"]) >= {"scene/", "state/"}
    read_archive(directory / "state", kind="bundle-state")
    sentinel.close()


FORGETFUL = """
    import sys, torch
    from gradsentinel import NanCallback, Sentinel, SnapshotSaver

    model = torch.nn.Linear(2, 1)
    sentinel = Sentinel(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=sys.argv[1],
                        callbacks=[NanCallback(), SnapshotSaver(level="full")])
    (batch,) = sentinel.steps([torch.full((2, 2), float("nan"))])
    sentinel.backward(model(batch).mean())
    sentinel.step()
"""


@pytest.mark.slow
def test_a_process_that_forgets_to_close_leaves_a_whole_bundle(run_dir):
    done = subprocess.run(  # noqa: S603 - this very interpreter
        [sys.executable, "-c", textwrap.dedent(FORGETFUL), str(run_dir)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (directory,) = (run_dir / "incidents").iterdir()
    assert set(facts_of(directory)["parts"]) >= {"scene/", "state/", "statistics.json"}


def test_a_part_that_fails_does_not_cost_the_rest(run_dir):
    class Moody:
        broken = False

        def state_dict(self):
            if self.broken:
                raise RuntimeError("not now")
            return {}

        def load_state_dict(self, state):
            pass

    moody = Moody()

    class Break(Callback):
        def on_incident(self, event):
            moody.broken = True

        def on_recovery(self, event):
            moody.broken = False

    model = network()
    with Sentinel(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        callbacks=[NanCallback(), Break(), SnapshotSaver(level="full")],
        run_dir=run_dir,
        extra={"moody": moody},
    ) as sentinel:
        for batch in sentinel.steps([torch.randn(8, 4), torch.full((8, 4), NAN), torch.randn(8, 4)]):
            sentinel.backward(model(batch).square().mean())
            sentinel.step()
    facts = facts_of(directory_of(sentinel))
    assert {"scene/", "gradients/"} <= set(facts["parts"])
    assert "state/" not in facts["parts"]
    assert facts["left_out"] == ["weights and optimizer state: RuntimeError: not now"]
    assert sentinel.applied_steps == 2


# -- batches of every kind -----------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - as in many a loader


@dataclasses.dataclass
class Sheet:
    pixels: torch.Tensor
    name: str
    hidden: dict = dataclasses.field(default_factory=dict)


class Data:
    """As torch_geometric's: keys() and [], but no Mapping."""

    def __init__(self, **fields):
        self._fields = fields

    def keys(self):
        return list(self._fields)

    def __getitem__(self, key):
        return self._fields[key]


def round_trip(value, tmp_path):
    from gradsentinel.state.archive import write_archive  # noqa: PLC0415 - beside its only use

    stored, left_out = to_storable(value)
    write_archive(tmp_path / "a", {"batch": stored}, {}, kind="x")
    state, _ = read_archive(tmp_path / "a", kind="x")
    return from_stored(state["batch"]), left_out


X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("value", "look"),
    [
        pytest.param(X, lambda b: torch.equal(b, X), id="tensor"),
        pytest.param((X, [X, 1]), lambda b: type(b) is tuple and torch.equal(b[1][0], X), id="nested"),
        pytest.param(Pair(X, 2), lambda b: b.right == 2 and torch.equal(b.left, X), id="named tuple"),
        pytest.param(Sheet(X, "n"), lambda b: b.name == "n" and torch.equal(b["pixels"], X), id="dataclass"),
        pytest.param(UserDict(a=X), lambda b: torch.equal(b.a, X) and set(b) == {"a"}, id="user dict"),
        pytest.param(Data(a=X), lambda b: torch.equal(b["a"], X), id="keys and brackets"),
        pytest.param({1: X, None: "x"}, lambda b: b[None] == "x" and torch.equal(b[1], X), id="odd keys"),
        pytest.param({"a": np.arange(3)}, lambda b: (b["a"] == np.arange(3)).all(), id="numpy"),
        pytest.param(X.clone().requires_grad_(), lambda b: b.requires_grad and b.is_leaf, id="requires grad"),
        pytest.param(X.to_sparse(), lambda b: b.is_sparse and torch.equal(b.to_dense(), X), id="sparse"),
        pytest.param(X[:0], lambda b: b.shape == (0, 3), id="empty"),
        pytest.param(X.expand(4, 2, 3), lambda b: b.shape == (4, 2, 3), id="expanded"),
        pytest.param(X.to(torch.complex64), lambda b: b.dtype is torch.complex64, id="complex"),
        pytest.param(X.to(torch.float8_e4m3fn), lambda b: b.dtype is torch.float8_e4m3fn, id="float8"),
        pytest.param({1, 2}, lambda b: b == {1, 2}, id="set"),
        pytest.param(None, lambda b: b is None, id="none"),
        pytest.param(torch.Size([2, 3]), lambda b: b == torch.Size([2, 3]), id="size"),
        pytest.param(Kind.SPIKE, lambda b: b == "spike", id="enum"),
    ],
)
def test_a_batch_comes_back_as_the_program_uses_it(value, look, tmp_path):
    batch, left_out = round_trip(value, tmp_path)
    assert left_out == []
    assert look(batch)


STRANGERS = {
    "object": object,
    "function": lambda: forward,
    "module": lambda: nn.Linear(1, 1),
    "meta": lambda: torch.ones(2, device="meta"),
    "sparse CSR": X.to_sparse_csr,
    "nested": lambda: torch.nested.nested_tensor([X[0], X[1, :2]], layout=torch.jagged),
    "lazy": lambda: nn.LazyLinear(1).weight,
    "keys": {object(): 1}.keys,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("name", STRANGERS)
def test_what_cannot_be_stored_is_named_and_stands_apart(name, tmp_path):
    batch, (left_out,) = round_trip({"a": {"b": STRANGERS[name]()}, "c": X}, tmp_path)
    assert left_out.startswith("a.b (")
    assert isinstance(batch["a"]["b"], Gone)
    assert torch.equal(batch["c"], X)


def test_a_batch_that_contains_itself(tmp_path):
    value = {"x": X}
    value["self"] = value
    batch, (left_out,) = round_trip(value, tmp_path)
    assert "contains itself" in left_out
    assert torch.equal(batch["x"], X)


def test_tensors_that_are_one_come_back_as_one(tmp_path):
    batch, _ = round_trip({"a": X, "b": X}, tmp_path)
    assert batch["a"] is batch["b"]
