"""What a persistent fault is traced to on Megatron: rank, micro-batch, module and operator."""

from itertools import pairwise

import pytest
from layouts import LAYOUTS, Fault, Layout, replace

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("megatron"), pytest.mark.timeout(200)]

TP2 = Layout(world=2, tp=2, precision="bf16")
PP2 = LAYOUTS["pp2"]
BOTH = Layout(world=4, tp=2, pp=2, precision="bf16")
ROOT = Fault(rank=1, parameter="layers.1.mlp", when="operator", persistent=True)
"""The activation function takes the root of negative numbers: NaN, in the forward pass."""
SLOPE = replace(ROOT, value=0.0)
"""It takes the root of zeros: infinite slopes, in the backward pass."""
SCORES = Fault(
    rank=1, parameter="self_attention.linear_qkv", when="overflow", value=3e4, persistent=True, microbatch=0
)
"""Queries and keys are large, and their products do not fit into float16."""
HALF = replace(PP2, precision="fp16")
SQRT, DIV, SCORE = "aten.sqrt.default", "aten.div.Tensor", "aten.baddbmm.default"


def traced(megatron, folder, layout, fault):
    watched = megatron.run(
        "train", layout.world, layout, folder, callbacks="NanCallback, Retry", faults=(fault,), steps=4
    )
    [incident] = watched[0]["incidents"]
    assert watched[0]["skipped"] == [fault.step]
    assert [result["swallowed"] for result in watched] == [[]] * layout.world
    assert [rank["rank"] for rank in incident["ranks"]] == [fault.rank]
    assert incident["microbatch"] == fault.microbatch
    return incident, incident["diagnosis"]


@pytest.mark.parametrize(
    ("layout", "fault", "module", "op"),
    [
        pytest.param(TP2, ROOT, "decoder.layers.1.mlp", SQRT, id="tp2-forward"),
        pytest.param(TP2, SLOPE, "decoder.layers.1.mlp", DIV, id="tp2-backward"),
        pytest.param(PP2, replace(ROOT, microbatch=0), "decoder.layers.3.mlp", SQRT, id="pp2-forward"),
        pytest.param(PP2, SLOPE, "decoder.layers.3.mlp", DIV, id="pp2-backward", marks=pytest.mark.slow),
        pytest.param(BOTH, replace(ROOT, rank=2), "decoder.layers.3.mlp", SQRT, id="tp2pp2-forward"),
        pytest.param(BOTH, replace(SLOPE, rank=0), "decoder.layers.1.mlp", DIV, id="tp2pp2-backward"),
        pytest.param(LAYOUTS["tp2-sequence"], ROOT, "decoder.layers.1.mlp", SQRT, id="sequence-forward"),
        pytest.param(
            *(LAYOUTS["tp2-sequence"], SLOPE, "decoder.layers.1.mlp", DIV),
            id="sequence-backward",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(LAYOUTS["pp2vpp2"], replace(ROOT, rank=0, parameter="mlp"), "decoder.layers.0.mlp", SQRT),
            id="interleaved",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(LAYOUTS["ep2"], replace(ROOT, parameter="local_experts.1")),
            *("decoder.layers.0.mlp.experts.local_experts.3", SQRT),
            id="experts",
            marks=pytest.mark.slow,
        ),
        pytest.param(LAYOUTS["dp2-overlap"], SLOPE, "decoder.layers.1.mlp", DIV, id="overlap"),
    ],
)
def test_an_operator_is_named_with_its_rank_microbatch_and_module(
    megatron, tmp_path, layout, fault, module, op
):
    incident, found = traced(megatron, tmp_path, layout, fault)
    assert (found["module"], found["op"]) == (module, op)
    assert found["phase"] == ("backward" if fault is SLOPE or fault.value == 0.0 else "forward")
    assert (found["cause"], found["node"]) == ("math", "SqrtBackward0")
    assert found["source"].startswith("injection.py:")
    assert f"it began on rank {fault.rank}" in incident["message"] or layout.world == 2
    text = " ".join(found["evidence"])
    assert f"not finite either: on rank {fault.rank}, " in text
    assert f"micro-batch {fault.microbatch}" in text


@pytest.mark.parametrize(
    ("layout", "fault", "layer"),
    [
        pytest.param(LAYOUTS["tp2-fp16"], SCORES, 0, id="tp2"),
        pytest.param(HALF, SCORES, 2, id="pp2"),
        pytest.param(
            replace(BOTH, precision="fp16"), replace(SCORES, rank=3), 2, id="tp2pp2", marks=pytest.mark.slow
        ),
    ],
)
def test_scores_that_overflow_half_precision_are_a_matter_of_precision(
    megatron, tmp_path, layout, fault, layer
):
    _, found = traced(megatron, tmp_path, layout, fault)
    assert found["module"] == f"decoder.layers.{layer}.self_attention.core_attention"
    assert (found["op"], found["cause"], found["phase"]) == (SCORE, "precision", "forward")
    assert found["source"].startswith("dot_product_attention.py:")
    assert any("computed in float32 it is finite" in fact for fact in found["evidence"])


@pytest.mark.parametrize(
    ("layout", "rank"), [(TP2, 1), (PP2, 1), pytest.param(BOTH, 2, marks=pytest.mark.slow)]
)
def test_a_bad_number_in_the_batch_is_found_before_anything_is_run(megatron, tmp_path, layout, rank):
    fault = Fault(rank=rank, parameter="loss_mask", when="input", microbatch=0)
    incident, found = traced(megatron, tmp_path, layout, fault)
    assert (incident["kind"], found["cause"], found["phase"]) == ("nonfinite_input", "data", "input")
    assert incident["samples"] == [{"position": 1, "id": None, "field": "loss_mask"}]


def test_a_mask_that_leaves_nothing_to_average_is_the_data_s_fault(megatron, tmp_path):
    """0 / 0 in the loss, of numbers that come from the batch alone."""
    fault = Fault(rank=1, parameter="loss_mask", when="empty", microbatch=0)
    _, found = traced(megatron, tmp_path, PP2, fault)
    assert (found["cause"], found["op"]) == ("data", DIV)
    assert any("loss_mask of the batch" in fact for fact in found["evidence"]), found["evidence"]


def test_the_guilty_ranks_bundle_holds_the_operator(megatron, tmp_path):
    settings = {"callbacks": "NanCallback, SnapshotSaver", "faults": (replace(ROOT, rank=2),), "steps": 3}
    watched = megatron.run("train", 4, BOTH, tmp_path, **settings)
    [incident] = watched[0]["incidents"]
    [repro] = (tmp_path / "run" / "incidents" / incident["id"]).glob("repro*.py")
    text = repro.read_text()
    assert "aten::sqrt" in text or "aten.sqrt" in text
    assert all(one != other for one, other in pairwise(sorted(rank["rank"] for rank in incident["ranks"])))
