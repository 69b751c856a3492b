"""The record of an incident, as JSON and back, and how serious it is."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel import Action, Diagnosis, Incident, Kind, NanCallback, Outcome, Severity, StoreError
from gradsentinel.evidence import Sample, TensorEvidence
from gradsentinel.incident import SCHEMA, Rank, fold, jsonable, now
from loops import Spoiler, build, finish, make_batches, train_watched

NAN, INF = float("nan"), float("inf")

text = st.text(max_size=8)
number = st.integers(0, 1000)
real = st.one_of(st.floats(), st.sampled_from([NAN, INF, -INF]))

tensors = st.builds(
    TensorEvidence,
    name=text,
    nonfinite=number,
    numel=number,
    norm=real,
    first_index=st.none() | st.lists(number, max_size=3).map(tuple),
)
ranks = st.builds(
    Rank,
    rank=number,
    host=text,
    device=text,
    coordinates=st.dictionaries(st.sampled_from(["tp", "pp", "dp", "cp", "ep"]), number),
)
diagnoses = st.builds(
    Diagnosis,
    cause=text,
    confidence=st.floats(0, 1),
    phase=st.none() | text,
    module=st.none() | text,
    op=st.none() | text,
    node=st.none() | text,
    source=st.none() | text,
    evidence=st.lists(text, max_size=2).map(tuple),
    remedy=st.lists(text, max_size=2).map(tuple),
)
incidents = st.builds(
    Incident,
    id=text,
    step=number,
    kind=st.sampled_from(Kind),
    action=st.sampled_from(Action),
    message=text,
    severity=st.sampled_from(Severity),
    outcome=st.sampled_from(Outcome),
    time=text,
    detector=text,
    tensors=st.lists(tensors, max_size=2).map(tuple),
    ranks=st.lists(ranks, max_size=2).map(tuple),
    microbatch=st.none() | number,
    samples=st.lists(
        st.builds(Sample, position=number, id=st.none() | number | text, field=text), max_size=2
    ).map(tuple),
    diagnosis=st.none() | diagnoses,
    recovery=text,
    loss=st.none() | real,
    grad_norm=st.none() | real,
    notes=st.lists(text, max_size=2).map(tuple),
    seconds=st.dictionaries(text, st.floats(0, 1e3).map(lambda value: round(value, 6)), max_size=2),
    details=st.dictionaries(text, number | text, max_size=2),
)


@given(incidents)
def test_through_json_and_back(incident):
    stored = json.dumps(incident.as_dict(), allow_nan=False)
    again = Incident.from_dict(json.loads(stored))
    assert repr(again) == repr(incident)  # NaN is not equal to itself, but reads the same
    assert again.as_dict() == incident.as_dict()


@given(
    st.recursive(
        real | text | number | st.none(), lambda inner: st.lists(inner) | st.dictionaries(text, inner)
    )
)
def test_whatever_has_become_jsonable_is_json(value):
    json.dumps(jsonable(value), allow_nan=False)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_numbers_that_json_lacks_are_written_as_text_that_float_reads(value):
    written = jsonable({"loss": [value]})["loss"][0]
    assert isinstance(written, str)
    assert repr(float(written)) == repr(value)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (np.int64(3), 3),
        (True, True),
        (torch.float16, "torch.float16"),
        ((1, 2), [1, 2]),
        ({3: 4}, {"3": 4}),
    ],
)
def test_strangers_are_written_in_their_own_words(value, written):
    assert jsonable(value) == written
    assert type(jsonable(value)) is type(written)


def test_the_keys_are_those_that_are_documented():
    """Programs read this file: a renamed key would break them silently."""
    incident = Incident(
        id="000123-nonfinite_gradient",
        step=123,
        kind=Kind.NONFINITE_GRADIENT,
        action=Action.SKIP,
        message="m",
        tensors=(TensorEvidence(name="w", nonfinite=12, numel=65536, norm=0.81),),
        ranks=(Rank(rank=5, host="node07", device="npu:5", coordinates={"tp": 1, "pp": 0, "dp": 2}),),
        samples=(Sample(position=1, id=13),),
        diagnosis=Diagnosis(cause="math", confidence=0.95),
    )
    data = incident.as_dict()
    documented = {
        *("schema", "id", "step", "time", "kind", "severity", "action", "outcome", "parameters", "ranks"),
        *("microbatch", "samples", "diagnosis", "seconds"),
    }
    assert documented <= set(data)
    assert data["schema"] == SCHEMA
    assert (data["kind"], data["severity"], data["action"]) == ("nonfinite_gradient", "warning", "skip")
    assert {"name", "nonfinite", "numel", "norm"} <= set(data["parameters"][0])
    assert data["ranks"] == [{"rank": 5, "tp": 1, "pp": 0, "dp": 2, "host": "node07", "device": "npu:5"}]
    assert {"position", "id"} <= set(data["samples"][0])
    keys = ("cause", "confidence", "phase", "module", "op", "node", "source", "evidence", "remedy")
    assert set(keys) <= set(data["diagnosis"])


def test_the_kinds_and_outcomes_are_those_that_are_documented():
    kinds = (
        "nonfinite_loss nonfinite_input nonfinite_gradient nonfinite_parameter nonfinite_state saturation "
        "magnitude spike stagnation rank_divergence loss_scale device_health callback_error"
    )
    assert {str(kind) for kind in Kind} == {*kinds.split(), "custom"}
    outcomes = "retried rescued skipped rolled_back aborted reported"
    assert {str(outcome) for outcome in Outcome} == set(outcomes.split())


@pytest.mark.parametrize("broken", [{}, {"schema": "1"}, {"schema": 1}, {"schema": 99, "id": "x"}])
def test_what_is_no_incident_is_refused(broken):
    with pytest.raises(StoreError):
        Incident.from_dict(broken)


def test_where_it_was_in_a_few_words():
    def incident(**fields):
        return Incident(id="", step=0, kind=Kind.CUSTOM, action=Action.SKIP, message="", **fields)

    tensor = TensorEvidence(name="w", nonfinite=1, numel=1, norm=NAN)
    sample = Sample(position=3, id="img-7")
    assert incident().where == ""
    assert incident(tensors=(tensor,)).where == "w"
    assert incident(tensors=(tensor,), samples=(sample,)).where == "sample 3 (id img-7)"
    assert incident(samples=(Sample(position=3),)).where == "sample 3"
    assert incident(diagnosis=Diagnosis(cause="math", confidence=1.0, module="head")).where == "head"
    assert incident(tensors=(tensor,) * 5).where == "w, w, w and 2 more"


def test_a_long_list_is_folded():
    assert fold([]) == ""
    assert fold(["a", "b", "c"]) == "a, b, c"
    assert fold(["a", "b", "c", "d"]) == "a, b, c and 1 more"


def test_the_time_is_utc_to_the_second():
    assert len(now()) == len("2026-01-31T08:15:00Z")
    assert now().endswith("Z")


def severities(run_dir, bad):
    run = build()
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        finish(train_watched(run, sentinel, make_batches(10), spoil=Spoiler("loss", frozenset(bad))))
    return [incident.severity.label for incident in sentinel.incidents]


def test_one_fault_is_a_warning_and_one_that_persists_an_error(run_dir):
    assert severities(run_dir, {2, 5, 6, 9}) == ["warning", "warning", "error", "warning"]


def test_an_incident_names_the_numbers_of_its_step(run_dir):
    run = build()
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        finish(train_watched(run, sentinel, make_batches(3), spoil=Spoiler("gradient", frozenset({1}))))
    (incident,) = sentinel.incidents
    assert incident.loss == pytest.approx(float(run.losses[1]))
    assert math.isnan(incident.grad_norm)
    assert incident.detector == "NanCallback"
    assert [rank.rank for rank in incident.ranks] == [0]
    assert set(incident.seconds) >= {"detect", "recover"}
    assert all(value >= 0 for value in incident.seconds.values())
    (tensor,) = incident.tensors
    assert (tensor.name, tensor.nonfinite, tensor.first_index) == ("head.weight", 1, (1, 2))
