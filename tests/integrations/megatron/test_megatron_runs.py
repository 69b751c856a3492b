"""Real Megatron-Core on several ranks: healthy runs, faults everywhere, recovery."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from layouts import LAYOUTS, Fault, Layout
from outcomes import Expected, check_cured, check_incidents, check_untouched, differences
from results import outcome
from server import MegatronServer

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("megatron"), pytest.mark.timeout(200)]

RETRY = "NanCallback, Retry(max_retries=100)"
NAN, INF = float("nan"), float("inf")
QUICK = ["tp2dp2", "pp2", "tp2pp2dp2", "dp2-overlap", "tp2-fp16", "tp2-sequence", "ep2", "cp2dp2"]
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS]


@pytest.mark.parametrize("name", EVERY)
def test_a_healthy_run_is_untouched(megatron: MegatronServer, alone, tmp_path: Path, name: str):
    layout = LAYOUTS[name]
    callbacks = (
        "NanCallback, Retry, MagnitudeCallback(max_global_norm=1e6), CrossRankCallback(every=2), "
        "Rollback(every=2, confirm_after=1)"
    )
    watched = megatron.run("train", layout.world, layout, tmp_path, callbacks=callbacks, again=1)
    check_untouched(outcome(alone(layout, steps=6)), outcome(watched))
    assert all(result["restored"] for result in watched)
    for result in watched:
        check_events(result, layout)


def check_events(result: dict[str, Any], layout: Layout) -> None:
    """Every event of a step in its order, with this rank's own gradients before they are reduced."""
    for step in range(5):
        told = [event for event in result["events"] if event[1] == step]
        kinds = [event[0] for event in told]
        assert kinds[0] == "StepStart"
        assert kinds[-2:] == ["BeforeClip", "AfterStep"]
        assert set(kinds[1:-2]) <= {"Batch", "AfterBackward"}
        after = [event for event in told if event[0] == "AfterBackward"]
        local = [event for event in after if not event[2]]
        names = [name for event in local for name in event[4]]
        assert sorted(names) == sorted(set(names))  # each parameter once
        assert all(event[3] == (layout.precision == "fp16") for event in local)
        losses = [event[5] for event in after if event[2]]
        last = result["coordinates"]["pp"] == layout.pp - 1
        assert len(losses) == (layout.microbatches if last else 0)
        if last:
            assert sum(losses) / len(losses) == pytest.approx(result["losses"][step], rel=1e-6)
        before, closed = told[-2], told[-1]
        assert set(before[3]) <= set(names)
        assert closed[2:4] == (True, result["norms"][step])
        assert before[2] == pytest.approx(result["norms"][step], rel=1e-4)  # the norm of the whole model


MATRIX: dict[str, tuple[Fault, ...]] = {
    "tp2dp2": (
        Fault(rank=3, parameter="linear_fc1.weight"),
        Fault(rank=1, parameter="layers.1.input_layernorm.weight"),  # counts on rank 0 of its group only
        Fault(rank=2, parameter="linear_qkv.weight", value=INF),
        Fault(rank=0, parameter="word_embeddings.weight"),  # tied to the output
        Fault(rank=3, parameter="linear_proj.bias", value=-INF, microbatch=0),
        Fault(rank=1, parameter="final_layernorm.bias", microbatch=0),
        Fault(rank=2, parameter="position_embeddings.weight", value=INF),
        Fault(rank=0, parameter="mlp.linear", when="after"),
        Fault(rank=3, parameter="layernorm", when="after", value=INF),
        Fault(rank=1, parameter="linear_qkv.bias", microbatch=0),
        Fault(rank=3, parameter="layers.2.mlp.linear_fc1", when="forward"),
        Fault(rank=0, parameter="layers.1.self_attention.core_attention", when="forward", value=INF),
    ),
    "pp2": (
        Fault(rank=0, parameter="layers.0.self_attention.linear_qkv.weight"),
        Fault(rank=1, parameter="output_layer.weight"),  # shows up in the embedding of stage 0
        Fault(rank=1, parameter="layers.1.mlp.linear_fc2.bias", value=INF),
        Fault(rank=0, parameter="word_embeddings.weight", microbatch=0),
        Fault(rank=1, parameter="final_layernorm.weight", when="after"),
        Fault(rank=0, parameter="position_embeddings.weight", when="after", value=-INF),
        Fault(rank=0, parameter="layers.1.mlp.linear_fc1", when="forward"),
        Fault(rank=1, parameter="layers.0.mlp.linear_fc2", when="forward", value=INF, microbatch=0),
    ),
    "tp2pp2dp2": (
        Fault(rank=5, parameter="layers.1.mlp.linear_fc1.weight"),
        Fault(rank=7, parameter="output_layer.weight"),
        Fault(rank=2, parameter="word_embeddings.weight", value=INF),
        Fault(rank=3, parameter="layers.0.input_layernorm.bias"),
        Fault(rank=6, parameter="layers.0.self_attention.linear_proj.weight", value=-INF, microbatch=0),
        Fault(rank=4, parameter="final_layernorm.weight"),
        Fault(rank=1, parameter="position_embeddings.weight"),
        Fault(rank=0, parameter="layers.1.mlp.linear_fc2.bias", microbatch=0),
        Fault(rank=7, parameter="self_attention.linear", when="after"),
        Fault(rank=2, parameter="mlp.linear", when="after", value=INF),
        Fault(rank=6, parameter="output_layer", when="forward", microbatch=0),
    ),
    "dp2-overlap": (
        Fault(rank=1, parameter="linear_fc1.weight"),
        Fault(rank=0, parameter="linear_fc2.bias", value=INF, microbatch=0),
        Fault(rank=1, parameter="final_layernorm.weight"),
        Fault(rank=0, parameter="mlp.linear", when="after"),
        Fault(rank=1, parameter="word_embeddings.weight", value=-INF),
        Fault(rank=0, parameter="layers.1.self_attention.linear_qkv", when="forward"),
    ),
    "dp2-overlap-plain": (
        Fault(rank=1, parameter="linear_fc1.weight"),
        Fault(rank=0, parameter="linear_fc2.bias", value=INF, microbatch=0),
        Fault(rank=1, parameter="layers.3.mlp.linear_fc1.weight", when="after"),
    ),
    "tp2-fp16": (
        Fault(rank=1, parameter="input_layernorm.weight"),
        Fault(rank=0, parameter="linear_fc1.weight", value=INF),
        Fault(rank=1, parameter="linear_fc2.bias", microbatch=0),
        Fault(rank=1, parameter="linear_qkv.weight", when="after", value=INF),
    ),
    "dp2-fp16-distributed": (
        Fault(rank=0, parameter="linear_fc1.weight"),  # its shard is on one of the two
        Fault(rank=1, parameter="linear_fc1.weight", value=INF),
        Fault(rank=0, parameter="layers.3.mlp.linear_fc2.weight", microbatch=0),
        Fault(rank=1, parameter="layers.3.mlp.linear_fc2.weight"),
    ),
    "tp2-sequence": (
        Fault(rank=1, parameter="input_layernorm.weight"),  # added up over the tensor-parallel ranks
        Fault(rank=0, parameter="final_layernorm.bias", value=INF),
        Fault(rank=1, parameter="linear_proj.weight", microbatch=0),
        Fault(rank=0, parameter="linear_fc1.bias", when="after"),
        Fault(rank=1, parameter="layers.1.input_layernorm", when="forward"),
    ),
    "ep2": (
        Fault(rank=1, parameter="local_experts.0.linear_fc1.weight"),
        Fault(rank=0, parameter="local_experts.1.linear_fc2.weight", value=INF),
        Fault(rank=1, parameter="router.weight", microbatch=0),
        Fault(rank=0, parameter="linear_qkv.weight"),
        Fault(rank=1, parameter="local_experts", when="after"),
        Fault(rank=1, parameter="local_experts.0", when="forward"),
    ),
    "cp2dp2": (
        Fault(rank=1, parameter="linear_fc1.weight"),
        Fault(rank=2, parameter="final_layernorm.weight", value=INF),
        Fault(rank=3, parameter="layers.1.self_attention.linear_qkv", when="forward", microbatch=0),
        Fault(rank=1, parameter="mlp.linear", when="after"),
    ),
    "pp2vpp2": (
        Fault(rank=0, parameter="linear_fc1.weight"),
        Fault(rank=1, parameter="output_layer.weight", value=INF, microbatch=0),
    ),
}
"""Transient faults, one in each step from the third on."""


def own_name(parameter: str) -> str:
    """Without the numbers that only this rank counts by."""
    return re.sub(r"^(layers|local_experts)\.\d+\.", "", parameter)


def spread_out(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    return tuple(replace(fault, step=2 + number) for number, fault in enumerate(faults))


def test_the_matrix_covers_the_kinds_of_fault():
    faults = [(name, fault) for name, some in MATRIX.items() for fault in some]
    assert len(faults) >= 60
    assert {fault.when for _, fault in faults} == {"before", "after", "forward"}
    assert {str(fault.value) for _, fault in faults} == {"nan", "inf", "-inf"}


@pytest.mark.parametrize("name", [entry for entry in EVERY if entry.values[0] in MATRIX])
def test_transient_faults_leave_no_trace(megatron, alone, tmp_path, name):
    layout, faults = LAYOUTS[name], spread_out(MATRIX[name])
    steps = len(faults) + 3
    watched = megatron.run(
        "train", layout.world, layout, tmp_path, callbacks=RETRY, faults=faults, steps=steps
    )
    for rank, result in enumerate(watched):
        assert result["struck"] == sum(fault.rank == rank for fault in faults)
        assert result["good"] == steps
        assert result["skipped"] == []
    kinds = ("nonfinite_gradient", "nonfinite_loss", "loss_scale")
    expected = [
        Expected(
            step=fault.step,
            outcome="retried",
            rank=fault.rank,
            parameter=None if fault.when == "forward" else own_name(fault.parameter),
            kinds=kinds,
        )
        for fault in faults
    ]
    check_cured(outcome(alone(layout, steps=steps)), outcome(watched), expected)


@pytest.mark.parametrize(
    ("name", "fault", "module"),
    [
        ("tp2dp2", Fault(rank=3, parameter="linear_fc1.weight"), "decoder.layers.0.mlp.linear_fc1"),
        ("tp2dp2", Fault(rank=1, parameter="layernorm", when="after"), ""),
        (
            "pp2",
            Fault(rank=1, parameter="layers.1.mlp.linear_fc1", when="forward"),
            "layers.3.mlp.linear_fc1",
        ),
        (
            "tp2-sequence",
            Fault(rank=1, parameter="1.mlp.linear_fc1", when="forward"),
            "layers.1.mlp.linear_fc1",
        ),
        ("dp2-overlap", Fault(rank=1, parameter="linear_fc2.weight", value=INF), "0.mlp.linear_fc2"),
        pytest.param(
            "tp2pp2dp2",
            Fault(rank=6, parameter="linear_fc1.weight"),
            "layers.2.mlp.linear_fc1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ep2",
            Fault(rank=1, parameter="local_experts.0"),
            "local_experts.2.linear_fc1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "tp2-sequence", Fault(rank=1, parameter="layernorm"), "layernorm", marks=pytest.mark.slow
        ),
    ],
)
def test_a_persistent_fault_is_skipped_the_megatron_way(megatron, alone, tmp_path, name, fault, module):
    layout, fault = LAYOUTS[name], replace(fault, persistent=True)
    watched = megatron.run("train", layout.world, layout, tmp_path, callbacks=RETRY, faults=(fault,))
    without = alone(layout, left_out=(fault.step,))
    for result in watched:
        assert result["skipped"] == [fault.step]
        assert result["norms"][fault.step] is None
        assert result["good"] == 4
    kinds = ("nonfinite_gradient", "nonfinite_loss")
    expected = [Expected(step=fault.step, outcome="skipped", rank=fault.rank, kinds=kinds)]
    check_cured(outcome(without, told=False), outcome(watched, told=False), expected)
    [incident] = watched[0]["incidents"]
    found = incident["diagnosis"]
    if fault.when == "after":  # every rank's own values are finite, however often it is computed
        assert found["module"] is None
        return
    assert incident["microbatch"] == fault.microbatch
    assert found["module"].endswith(module)
    assert found["phase"] == ("forward" if fault.when == "forward" else "backward")


@pytest.mark.parametrize("name", ["tp2-fp16", "dp2-fp16-distributed"])
def test_without_a_retry_a_bad_gradient_is_the_loss_scalers_business(megatron, alone, tmp_path, name):
    layout = LAYOUTS[name]
    fault = Fault(rank=1, parameter="linear_fc1.weight", persistent=True)
    settings = {"faults": (fault,), "steps": 5}
    watched = megatron.run("train", layout.world, layout, tmp_path, callbacks="NanCallback", **settings)
    check_untouched(outcome(alone(layout, **settings)), outcome(watched))
    assert [result["skipped"] for result in watched] == [[2], [2]]


@pytest.mark.parametrize(
    "name", ["tp2dp2", "pp2", "dp2-overlap", pytest.param("ep2", marks=pytest.mark.slow)]
)
def test_a_rollback_restores_everything(megatron, alone, tmp_path, name):
    layout = LAYOUTS[name]
    fault = Fault(rank=layout.world - 1, parameter="linear_fc1.weight", step=2)
    rollback = "NanCallback, Rollback(every=2, confirm_after=0, after=1)"
    watched = megatron.run(
        "train", layout.world, layout, tmp_path, callbacks=rollback, faults=(fault,), steps=3
    )
    check_incidents(outcome(watched), [Expected(step=2, outcome="rolled_back", rank=fault.rank)])
    assert [result["skipped"] for result in watched] == [[2]] * layout.world
    assert differences(outcome(alone(layout, steps=2), told=False), outcome(watched, told=False)) == []


def test_an_aborted_run_leaves_a_state_that_another_one_takes_up(megatron, tmp_path):
    for kept, taken, step in megatron.run("restart", 4, LAYOUTS["tp2dp2"], tmp_path):
        assert step == 4
        assert kept == taken


def test_attached_alone_it_sees_and_skips_what_it_can(megatron, alone, tmp_path):
    """One line in the script, without its schedule: all but batches, losses and retries."""
    layout = LAYOUTS["tp2dp2"]
    fault = Fault(rank=2, parameter="linear_qkv.weight")
    watched = megatron.run(
        "train", layout.world, layout, tmp_path, callbacks=RETRY, faults=(fault,), schedule=False
    )
    check_incidents(outcome(watched), [Expected(step=2, outcome="skipped", rank=2, parameter="linear_qkv")])
    assert "sentinel.schedule(" in " ".join(watched[0]["incidents"][0]["notes"])
    without = outcome(alone(layout, left_out=(2,)), told=False)
    assert differences(without, outcome(watched, told=False)) == []


def test_attached_alone_with_its_data_iterator_it_sees_the_batches(megatron, alone, tmp_path):
    layout = LAYOUTS["tp2dp2"]
    healthy = megatron.run(
        "train", 4, layout, tmp_path / "healthy", callbacks="NanCallback", schedule=False, data=True
    )
    check_untouched(outcome(alone(layout)), outcome(healthy))
    for result in healthy:
        assert result["restored"]
        drawn = [(event[1], event[0]) for event in result["events"] if event[0] in {"StepStart", "Batch"}]
        assert drawn == [(step, name) for step in range(5) for name in ("StepStart", "Batch", "Batch")]
    fault = Fault(rank=2, parameter="loss_mask", when="input", microbatch=0)
    settings = {"callbacks": RETRY, "faults": (fault,), "schedule": False, "data": True}
    watched = megatron.run("train", 4, layout, tmp_path / "bad", **settings)
    [incident] = watched[0]["incidents"]
    assert (incident["kind"], incident["outcome"]) == ("nonfinite_input", "skipped")
    assert (incident["ranks"][0]["rank"], incident["microbatch"]) == (2, 0)


def test_a_step_that_does_not_fit_into_half_precision_is_rescued(megatron, tmp_path):
    """The whole model, or the one module, computes in float32 then; the tensor-parallel ranks alike."""
    layout = LAYOUTS["tp2-fp16"]
    name = "layers.2.self_attention.linear_qkv"
    faults = tuple(
        Fault(rank=rank, parameter=name, when="overflow", value=3e4, persistent=True) for rank in (0, 1)
    )
    callbacks = "NanCallback, Retry, Rescue"
    watched = megatron.run("train", 2, layout, tmp_path, callbacks=callbacks, faults=faults, steps=4)
    assert [result["skipped"] for result in watched] == [[], []]
    [incident] = watched[0]["incidents"]
    assert (incident["outcome"], incident["step"]) == ("rescued", 2)
    assert incident["details"]["rescue"]["module"] == "decoder.layers.2.self_attention.core_attention"
    assert all(result["losses"][-1] < 10 and not result["swallowed"] for result in watched)


def test_a_context_parallel_training_is_the_same_one(megatron, tmp_path):
    """What the tests make of context parallelism is one; its coordinate is told."""
    layout = replace(LAYOUTS["one"], precision="fp32", dropout=0.0, layers=2)
    [plain] = megatron.run("train", 1, layout, tmp_path)
    spread = replace(layout, world=2, cp=2)
    fault = Fault(rank=1, parameter="linear_fc1.weight", step=4, persistent=True)
    watched = megatron.run("train", 2, spread, tmp_path, callbacks="NanCallback", faults=(fault,))
    # The schedule multiplies a loss by the number of context-parallel ranks.
    assert watched[0]["norms"][:4] == pytest.approx([2 * norm for norm in plain["norms"][:4]], rel=1e-4)
    [incident] = watched[0]["incidents"]
    where = {key: incident["ranks"][0][key] for key in ("rank", "cp", "tp", "dp")}
    assert where == {"rank": 1, "cp": 1, "tp": 0, "dp": 0}


def test_names_are_those_of_the_whole_model_and_written_down(megatron, tmp_path):
    layout = LAYOUTS["tp2pp2dp2"]
    fault = Fault(rank=7, parameter="layers.1.mlp.linear_fc1.weight")
    watched = megatron.run("train", 8, layout, tmp_path, callbacks="NanCallback", faults=(fault,), steps=3)
    [incident] = watched[0]["incidents"]
    assert incident["parameters"][0]["name"] == "decoder.layers.3.mlp.linear_fc1.weight"
    where = {key: incident["ranks"][0][key] for key in ("rank", "tp", "pp", "dp", "device")}
    assert where == {"rank": 7, "tp": 1, "pp": 1, "dp": 1, "device": "cpu"}
    maps = [json.loads((tmp_path / "run" / f"params-rank{rank}.json").read_text()) for rank in range(8)]
    layers = {
        rank: {e["name"].split(".")[2] for e in m["parameters"] if e["name"].startswith("decoder.layers.")}
        for rank, m in enumerate(maps)
    }
    assert layers == {rank: ({"2", "3"} if rank >= 4 else {"0", "1"}) for rank in range(8)}
    for described in maps:
        places = [e["flat"] for e in described["parameters"]]
        spans = sorted((p["buffer"], p["start"], p["end"]) for p in places)
        assert all(one[2] <= other[1] for one, other in pairwise(spans))
    # Of the two data-parallel ranks that share a parameter, each steps a part: together the whole.
    for first, second in ((0, 2), (5, 7)):
        for one, other in zip(maps[first]["parameters"], maps[second]["parameters"], strict=True):
            parts = sorted(part for part in (one["stepped_here"], other["stepped_here"]) if part)
            assert parts[0][0] == 0
            assert parts[-1][1] == one["numel"]
            assert len(parts) == 1 or parts[0][1] == parts[1][0]


def test_experts_have_their_numbers_in_the_whole_model(megatron, tmp_path):
    megatron.run("train", 2, LAYOUTS["ep2"], tmp_path, callbacks="NanCallback", steps=1)
    for rank, numbers in ((0, {"0", "1"}), (1, {"2", "3"})):
        described = json.loads((tmp_path / "run" / f"params-rank{rank}.json").read_text())
        names = [e["name"] for e in described["parameters"] if "local_experts" in e["name"]]
        assert {name.split("local_experts.")[1].split(".")[0] for name in names} == numbers


@pytest.mark.parametrize("name", ["tp2-sequence", "dp2-overlap", "pp2"])
@pytest.mark.parametrize("how", ["schedule", "data"])
def test_a_token_beyond_the_vocabulary_is_named_and_its_step_dropped(
    megatron: MegatronServer, tmp_path: Path, name: str, how: str
):
    """Where ranks hold parts of the vocabulary, nothing fails: the token is 0 on all of them."""
    layout = LAYOUTS[name]
    faults = tuple(
        Fault(rank=rank, parameter="tokens", when="input", value=70, step=3) for rank in range(layout.world)
    )
    watched = megatron.run(
        "train",
        layout.world,
        layout,
        tmp_path,
        callbacks="NanCallback, BatchCallback",
        faults=faults,
        schedule=how == "schedule",
        data=how == "data",
    )
    for result in watched:
        (incident,) = result["incidents"]
        assert (incident["step"], incident["kind"]) == (3, "nonfinite_input")
        assert re.search(
            r"tokens\[1, 3\] is 70, outside 0 to 63 \(the 64 rows of .*word_embeddings\)", incident["message"]
        )
        assert result["good"] == 4
        assert result["restored"]
        assert result["swallowed"] == []


def test_tokens_of_the_other_parts_of_the_vocabulary_are_healthy(
    megatron: MegatronServer, alone, tmp_path: Path
):
    layout = LAYOUTS["tp2-sequence"]
    callbacks = "NanCallback, BatchCallback"
    watched = megatron.run("train", layout.world, layout, tmp_path, callbacks=callbacks, again=1)
    check_untouched(outcome(alone(layout, steps=6)), outcome(watched))
    assert all(result["incidents"] == [] for result in watched)
