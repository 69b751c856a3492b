"""The page of an incident: its story, which ranks, which layers, how it spread, what to do."""

import itertools
import json
import math

import pytest
from runs_on_disk import append, start, train, write_incident, write_norms, write_steps

from gradsentinel.decision import Kind
from gradsentinel.evidence import Diagnosis
from gradsentinel.ranks.topology import Rank
from gradsentinel.views import Views

PRECISION = Diagnosis(
    cause="precision",
    confidence=0.9,
    phase="forward",
    module="blocks.1.attn",
    op="aten.bmm",
    source="m.py",
    evidence=(
        "float16 holds at most 65504",
        "spread: aten.bmm > aten.div.Tensor > ... > aten.sum.default > a.bias, b.bias and 50 more",
    ),
    remedy=("use bfloat16 instead of float16",),
)


def page(run_dir, incident, lang="en"):
    seen = Views(run_dir).incident(".", incident.id, lang)
    json.dumps(seen, allow_nan=False)
    return seen


# -- the story ---------------------------------------------------------------------------------------


def test_the_story_in_english(run_dir):
    incident = write_incident(
        run_dir,
        40,
        diagnosis=PRECISION,
        detector="NanCallback",
        microbatch=2,
        recovery="step dropped (8 of 10 drops left)",
        notes=("one more thing",),
        seconds={"detect": 0.02, "diagnose": 1.5},
    )
    seen = page(run_dir, incident)
    assert seen["story"] == [
        "At step 40 NanCallback found: the gradients of 1 of 9 parameters are not finite.",
        "It happened in micro-batch 2 on rank 0 (node00, npu:0).",
        "The cause is too little precision (90 % sure), in the forward pass: blocks.1.attn, aten.bmm, m.py.",
        "GradSentinel dropped the step: step dropped (8 of 10 drops left).",
        "Also: one more thing.",
        "It took 20 ms to detect, 1.5 s to diagnose.",
    ]
    assert seen["todo"] == ["use bfloat16 instead of float16"]


def test_the_story_in_chinese_quotes_what_was_written(run_dir):
    incident = write_incident(run_dir, 40, diagnosis=PRECISION, detector="NanCallback")
    story = page(run_dir, incident, "zh")["story"]
    assert story[0].startswith("第 40 步，NanCallback 发现梯度为 NaN/Inf：the gradients of 1 of 9")
    assert "原因是精度不足（置信度 90%），前向传播中" in story[2]


def test_an_incident_without_a_diagnosis(run_dir):
    seen = page(run_dir, write_incident(run_dir, 3, ranks=()))
    assert "What caused it is not known." in seen["story"]
    assert (seen["todo"], seen["evidence"], seen["cause_label"]) == ([], [], "unknown")


def test_neighbours_are_in_the_order_they_happened(run_dir):
    ids = [write_incident(run_dir, at).id for at in (5, 7, 7)]
    assert [page(run_dir, one)["neighbours"] for one in map(Named, ids)] == [
        {"previous": None, "next": ids[1]},
        {"previous": ids[0], "next": ids[2]},
        {"previous": ids[1], "next": None},
    ]


class Named:
    def __init__(self, name):
        self.id = name


# -- how it spread -----------------------------------------------------------------------------------


def test_the_spread_of_a_traced_value(run_dir):
    found = page(run_dir, write_incident(run_dir, 1, diagnosis=PRECISION))["spread"]
    assert [(one["kind"], one["name"], one["detail"]) for one in found] == [
        ("operator", "aten.bmm", "blocks.1.attn, m.py"),
        ("operator", "aten.div.Tensor", ""),
        ("gap", "...", ""),
        ("operator", "aten.sum.default", ""),
        ("parameter", "a.bias", ""),
        ("parameter", "b.bias", ""),
        ("gap", "...", "50"),
    ]


def test_without_a_trace_the_spread_is_what_was_found(run_dir):
    incident = write_incident(run_dir, 1, tensors=[f"p{number}" for number in range(20)])
    found = page(run_dir, incident)["spread"]
    assert [one["name"] for one in found] == [f"p{number}" for number in range(8)] + ["..."]
    assert found[-1]["detail"] == "12"
    assert found[0]["detail"] == "3 / 9"


# -- which ranks -------------------------------------------------------------------------------------


def mesh(run_dir, sizes, hot):
    """Write the event logs of a job, and an incident on one rank."""
    names = list(sizes)
    world = math.prod(sizes.values())
    places = {}
    for rank, position in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
        places[rank] = dict(zip(names, position, strict=True))
        append(run_dir / f"events-rank{rank}.jsonl", start(rank, world, **places[rank]))
    guilty = [Rank(rank=rank, host="node00", device=f"npu:{rank}", coordinates=places[rank]) for rank in hot]
    return write_incident(run_dir, 1, ranks=guilty)


def test_the_ranks_of_a_mesh_are_laid_out_and_the_right_one_is_hot(run_dir):
    heat = page(run_dir, mesh(run_dir, {"dp": 2, "pp": 3, "tp": 2}, hot=[7]))["heat"]["ranks"]
    assert heat["axes"] == [{"name": "pp", "size": 3}, {"name": "dp", "size": 2}, {"name": "tp", "size": 2}]
    assert heat["total"] == len(heat["cells"]) == 12
    assert [cell["rank"] for cell in heat["cells"] if cell["hot"]] == [7]
    assert heat["cells"][7]["coordinates"] == {"dp": 1, "pp": 0, "tp": 1}
    assert heat["cells"][7]["why"].endswith("are not finite")


def test_ranks_that_are_only_counted_are_hot_too(run_dir):
    ranks = [Rank(rank=rank, host="n", device="d") for rank in range(0, 300, 2)]
    incident = write_incident(run_dir, 1, ranks=ranks)
    append(run_dir / "events-rank0.jsonl", start(world_size=512))
    heat = page(run_dir, incident)["heat"]["ranks"]
    assert [cell["rank"] for cell in heat["cells"] if cell["hot"]] == list(range(0, 300, 2))
    assert heat["total"] == len(heat["cells"]) == 512


def test_of_a_very_large_job_all_hot_ranks_and_the_first_others_are_shown(run_dir):
    append(run_dir / "events-rank0.jsonl", start(world_size=100_000))
    incident = write_incident(run_dir, 1, ranks=[Rank(rank=99_999, host="n", device="d")])
    heat = page(run_dir, incident)["heat"]["ranks"]
    assert heat["total"] == 100_000
    assert len(heat["cells"]) == 16_384
    assert [cell["rank"] for cell in heat["cells"] if cell["hot"]] == [99_999]


# -- which layers ------------------------------------------------------------------------------------


def test_layers_by_steps_of_a_trained_run(run_dir):
    (incident,) = train(run_dir, steps=90, bad=(80,))
    seen = page(run_dir, incident)["heat"]["layers"]
    assert seen["names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert seen["iterations"] == list(range(17, 81))
    assert seen["hot"] == ["1.weight"]
    rows = dict(zip(seen["names"], seen["values"], strict=True))
    assert [name for name, row in rows.items() if row[-1] == "nan"] == ["1.weight"]
    assert all(isinstance(value, float) for row in rows.values() for value in row[:-1])


def test_many_parameters_are_folded_by_module_and_what_is_hot_stands_alone(run_dir):
    parts = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down")
    names = [f"blocks.{block}.{part}.weight" for block in range(60) for part in parts]
    hot = "blocks.7.mlp.up.weight"
    columns = [[3.0] * len(names), [4.0 if name != hot else math.inf for name in names]]
    incident = write_incident(run_dir, 9, tensors=[hot])
    write_norms(run_dir, incident, names, [[jsonable(value) for value in column] for column in columns])
    seen = page(run_dir, incident)["heat"]["layers"]
    rows = dict(zip(seen["names"], seen["values"], strict=True))
    assert len(rows) <= 80
    assert (rows[hot], seen["hot"]) == ([0.4771, "inf"], [hot])
    together = [round(math.log10(norm * math.sqrt(6)), 4) for norm in (3, 4)]
    assert rows["blocks.3.*"] == together
    assert sum(seen["counts"]) == seen["parameters"] == 360


def test_flat_names_are_folded_with_their_neighbours(run_dir):
    names = [f"p{number}" for number in range(1000)]
    incident = write_incident(run_dir, 9, tensors=["p500"])
    write_norms(run_dir, incident, names, [[1.0] * 1000])
    seen = page(run_dir, incident)["heat"]["layers"]
    assert len(seen["names"]) <= 81
    assert "p500" in seen["hot"]


def test_norms_of_zero_and_parameters_without_a_gradient(run_dir):
    incident = write_incident(run_dir, 9, kind=Kind.SPIKE, tensors=["a"])
    write_norms(run_dir, incident, ["a", "b"], [[0.0, None], ["-inf", 100.0]])
    assert page(run_dir, incident)["heat"]["layers"]["values"] == [["-inf", "inf"], [None, 2.0]]


def test_the_norms_of_the_rank_that_is_named_are_looked_at(run_dir):
    incident = write_incident(run_dir, 9, ranks=[Rank(rank=3, host="n", device="d")])
    for rank in (0, 3):
        write_norms(run_dir, incident, [f"of rank {rank}"], [[1.0]], rank=rank, local=True)
    seen = page(run_dir, incident)["heat"]["layers"]
    assert (seen["names"], seen["rank"], seen["local"]) == (["of rank 3"], 3, True)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": 99}',
        '{"schema": 1, "names": ["a"], "iterations": [1], "values": [[1, 2]]}',
        '{"schema": 1, "names": ["a"], "iterations": ["x"], "values": [[1]]}',
        '{"schema": 1, "names": "a", "iterations": [], "values": []}',
    ],
)
def test_damaged_norms_are_said_to_be(run_dir, text):
    incident = write_incident(run_dir, 9)
    (run_dir / "incidents" / incident.id / "norms.json").write_text(text)
    seen = page(run_dir, incident)["heat"]["layers"]
    assert seen["names"] == []
    assert "norms.json" in seen["why"]


# -- what to do next ---------------------------------------------------------------------------------


def test_commands_are_lines_for_a_shell(tmp_path):
    run_dir = tmp_path / "a run; rm -rf $HOME"
    write_steps(run_dir, [1.0])
    incident = write_incident(run_dir, 1)
    for name in ("scene", "operator"):
        (run_dir / "incidents" / incident.id / name).mkdir()
    (run_dir / "incidents" / incident.id / "repro.py").touch()
    lines = {one["what"]: one["line"] for one in page(run_dir, incident)["commands"]}
    assert list(lines) == ["repro", "replay_step", "verify", "show", "report"]
    assert all(f"'{run_dir}" in line for line in lines.values())


def jsonable(value):
    return value if math.isfinite(value) else str(value)
