"""A fault in what tensor-parallel ranks exchange within one operation names the rank, and is cured."""

from dataclasses import replace

import pytest
from layouts import LAYOUTS, Fault
from outcomes import Expected, check_cured
from results import outcome

NAN, INF = float("nan"), float("inf")
LOOKED_UP = "what embedding.word_embeddings has looked up"
LOSS = "what the loss adds up over its part of the vocabulary"


def returned(rank, parameter, what="the gradient of the input of ", **more):
    return Fault(rank=rank, parameter=parameter, when="returned", **more), what


def lookup(rank, **more):
    return Fault(rank=rank, parameter="word_embeddings", when="lookup", **more), LOOKED_UP


def loss(rank, kernel, **more):
    return Fault(rank=rank, parameter=kernel, when="loss", **more), LOSS


FAULTS = {
    "tp2dp2": [
        returned(3, "layers.1.mlp.linear_fc1"),
        returned(0, "layers.2.self_attention.linear_qkv", value=INF, microbatch=0),
        returned(2, "output_layer"),
        lookup(1),
        lookup(2, value=-INF, microbatch=0),
        loss(1, "max", value=INF),
        loss(0, "index", microbatch=0),
        loss(3, "sum"),
    ],
    "tp2-sequence": [
        returned(1, "layers.0.mlp.linear_fc1", microbatch=0),
        returned(0, "layers.3.self_attention.linear_qkv", value=-INF),
        lookup(1),
        loss(0, "sum", value=INF),
        # Here something else is finite elsewhere, which tells more.
        returned(1, "layers.2.pre_mlp_layernorm", "where it only arrived, the gradient of "),
        returned(0, "layers.0.input_layernorm", "the gradient of the output of embedding", microbatch=0),
    ],
    "tp2pp2dp2": [
        returned(5, "layers.0.mlp.linear_fc1"),
        returned(0, "layers.1.self_attention.linear_qkv", microbatch=0),
        lookup(3),
        loss(6, "index"),
        returned(7, "layers.0.input_layernorm", "the gradient that pipeline stage 1 hands back"),
    ],
    "pp2": [returned(1, "layers.0.input_layernorm", "the gradient that pipeline stage 1 hands", value=INF)],
    "pp2vpp2": [returned(1, "layers.0.input_layernorm", "the gradient that pipeline stage 1 hands back")],
    "ep2": [
        returned(1, "layers.1.mlp.experts.local_experts.0.linear_fc1"),
        returned(0, "layers.3.mlp.experts.local_experts.1.linear_fc1"),
    ],
    "cp2dp2": [returned(2, "layers.1.self_attention.linear_proj", "the gradient of the output of ")],
}
"""By layout: what goes wrong, and by what the rank is told."""


@pytest.mark.multiprocess
@pytest.mark.xdist_group("megatron")
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if LAYOUTS[name].world > 4 else ()) for name in FAULTS],
)
def test_a_transient_fault_within_an_exchange_names_its_rank(megatron, alone, tmp_path, name):
    layout = LAYOUTS[name]
    faults = tuple(replace(fault, step=2 + number) for number, (fault, _) in enumerate(FAULTS[name]))
    settings = {"callbacks": "NanCallback, Retry(max_retries=100)", "steps": 3 + len(faults)}
    watched = megatron.run("train", layout.world, layout, tmp_path, faults=faults, **settings)
    for rank, result in enumerate(watched):
        assert result["struck"] == sum(fault.rank == rank for fault in faults)
    kinds = ("nonfinite_gradient", "nonfinite_loss")
    expected = [
        Expected(step=fault.step, outcome="retried", rank=fault.rank, kinds=kinds) for fault in faults
    ]
    check_cured(outcome(alone(layout, steps=3 + len(faults))), outcome(watched), expected)
    for (fault, what), incident in zip(FAULTS[name], watched[0]["incidents"], strict=True):
        assert f"; it began on rank {fault.rank}: {what}" in incident["message"]
