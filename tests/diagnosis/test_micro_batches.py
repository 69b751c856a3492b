"""Several bad micro-batches in one step are all named; what a diagnosis kept is let go with its step."""

import gc
import json
import weakref

import pytest
import torch
from torch import nn

from gradsentinel import Callback, NanCallback, Sentinel, Skip
from gradsentinel.diagnosis.diagnose import findings_of


def forward(model, batch):
    return (model(batch["x"]).pow(2).mean(1) * batch["w"]).sum() / batch["w"].sum()


def batches(*bad, count=4, what="w"):
    made = []
    for number in range(count):
        batch = {"x": torch.randn(6, 4), "w": torch.ones(6), "id": torch.arange(6) + 10 * number}
        if number in bad and what == "w":
            batch["w"].zero_()
        elif number in bad:
            batch["x"][number, 0] = torch.nan
        made.append(batch)
    return made


def incident_of(data, run_dir, *callbacks, accumulate=4):
    model = nn.Linear(4, 4)
    sentinel = Sentinel(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        callbacks=[NanCallback(), *callbacks],
        run_dir=run_dir,
        forward=forward,
    )
    with sentinel:
        for batch in sentinel.steps(data, accumulate=accumulate):
            sentinel.backward(forward(model, batch))
            sentinel.step()
    return sentinel.incidents[0]


def test_all_that_are_traced_to_an_operator_are_named(run_dir):
    incident = incident_of(batches(1, 3), run_dir)
    assert incident.microbatch == 1
    assert incident.details["bad_microbatches"] == [1, 3]
    assert "micro-batch 3 of the step is not finite either" in "\n".join(incident.diagnosis.evidence)
    assert "the other 2 micro-batch(es) of the step are finite" in "\n".join(incident.diagnosis.evidence)
    assert incident.diagnosis.remedy[0].endswith("look at w")


def test_all_with_bad_records_are_named_and_positions_are_those_of_the_first(run_dir):
    incident = incident_of(batches(1, 3, what="x"), run_dir)
    assert incident.microbatch == 1
    assert incident.details["bad_microbatches"] == [1, 3]
    assert [(s.position, s.id, s.field) for s in incident.samples] == [(1, 11, "x")]
    assert "id 11, id 33" in incident.diagnosis.remedy[0]
    assert "micro-batch 3" in "\n".join(incident.diagnosis.evidence)


@pytest.mark.parametrize("what", ["w", "x"])
def test_one_alone_needs_no_list(what, run_dir):
    incident = incident_of(batches(2, what=what), run_dir)
    assert incident.microbatch == 2
    assert "bad_microbatches" not in incident.details


@pytest.mark.parametrize("what", ["w", "x"])
def test_skip_remembers_all_of_them(what, run_dir):
    incident_of(batches(0, 2, what=what), run_dir, Skip())
    kept = json.loads((run_dir / "skipped-batches.json").read_text(encoding="utf-8"))
    (numbers,) = [value for value in kept.values() if isinstance(value, list)]
    assert len(numbers) == 2


@pytest.mark.slow
def test_what_a_diagnosis_kept_is_let_go_with_its_step(run_dir):
    held = []

    class Keeper(Callback):
        def on_run_start(self, event):
            self.run = event.run

        def on_diagnosis(self, event):
            findings = findings_of(event.incident, self.run)
            held.append(weakref.ref(findings.trace))
            held.append(weakref.ref(findings.origin.args[0]))

        def on_step_start(self, event):
            gc.collect()
            alive.append([reference() is not None for reference in held])

    alive = []
    incident_of(batches(1, count=3), run_dir, Keeper(), accumulate=1)
    assert alive == [[], [], [False, False]]
