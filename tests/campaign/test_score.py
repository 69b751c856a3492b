"""Scores of runs that were written by hand."""

import math

import pytest

from gradsentinel.campaign.goals import goals
from gradsentinel.campaign.score import assign, confusion, places, score, strength
from gradsentinel.campaign.totals import by_bit, by_kind, totals


def fault(step, kind="nan-sample", *, persistent=True):
    return {"step": step, "kind": kind, "persistent": persistent, "seed": 0, "bit": None, "rank": None}


def truth(step, *, finite=False, deviation="inf", target="sample", where="weight", fired=True, **hit):
    return {
        "number": step,
        "fired": fired,
        "finite": finite,
        "loss": 2.5,
        "loss_without": 2.0,
        "deviation": deviation,
        "hit": {"target": target, "where": where, "elements": 1, "index": [3], **hit} if fired else None,
    }


def effect(step, *, unchanged=False, exact=False, finite=True, deviation=0.0):
    return {
        "number": step,
        "unchanged": unchanged,
        "exact": exact,
        "finite": finite,
        "deviation": deviation,
    }


def incident(number, outcome="skipped", cause="data", **more):
    return {
        "number": number,
        "kind": "nonfinite_loss",
        "action": "skip",
        "outcome": outcome,
        "cause": cause,
        "module": None,
        "op": None,
        "parameters": [],
        "samples": [3],
        "ranks": [0],
        **more,
    }


def run(
    policy="gradsentinel", *, faults=(), effects=(), incidents=(), kept=range(100), bad=(), died=(), **more
):
    return {
        "trial": {"workload": "plain"},
        "policy": policy,
        "steps": 100,
        "faults": list(faults),
        "attempts": 100,
        "kept": list(kept),
        "bad": list(bad),
        "interruptions": [{"number": n, "why": ""} for n in died],
        "incidents": list(incidents),
        "effects": list(effects),
        "truths": [],
        "loss": 2.0,
        "weights": "a",
        "clock": {"seconds": 1.0, "step": 0.01, "incidents": [{"detect": 0.25, "diagnose": 1.0}]},
        **more,
    }


def clean(*truths):
    return run("clean", incidents=()) | {"truths": list(truths)}


def scored(result, *truths):
    return score(result, clean(*truths))


def test_a_skipped_step_costs_its_batch_and_nothing_else():
    kept = [n for n in range(100) if n != 40]
    one = scored(
        run(faults=[fault(40)], effects=[effect(40, unchanged=True, deviation=1.0)], kept=kept,
            incidents=[incident(40)]),
        truth(40),
    )  # fmt: skip
    assert (one.sound, one.spoiled, one.lost, one.false_alarms) == (99, 0, 1, 0)
    (verdict,) = one.verdicts
    assert (verdict.strength, verdict.landed, verdict.delay, verdict.found) == ("nonfinite", False, 0, "data")
    assert verdict.right == {"sample": True}


def test_an_update_that_ends_elsewhere_is_spoiled_and_one_that_ends_nearby_is_not():
    for deviation, spoiled in ((0.5, 1), (0.02, 0)):
        one = scored(run(faults=[fault(40)], effects=[effect(40, deviation=deviation)]), truth(40))
        assert (one.spoiled, one.sound) == (spoiled, 100 - spoiled)


def test_a_spoiled_update_that_was_rolled_back_does_not_count():
    kept = [n for n in range(100) if not 30 <= n <= 42]
    one = scored(
        run(faults=[fault(40)], effects=[effect(40, finite=False, deviation=math.inf)], kept=kept,
            incidents=[incident(42, "rolled_back")]),
        truth(40),
    )  # fmt: skip
    (verdict,) = one.verdicts
    assert (verdict.landed, verdict.stayed, verdict.delay) == (True, False, 2)
    assert (one.spoiled, one.lost) == (0, 13)


def test_updates_made_from_nan_are_spoiled_although_nobody_can_compare_them():
    one = scored(
        run("nothing", faults=[fault(40)], effects=[effect(40, finite=False, deviation=math.nan)],
            bad=range(40, 100)),
        truth(40),
    )  # fmt: skip
    assert (one.spoiled, one.sound) == (60, 40)


def test_a_fault_that_did_not_happen_is_no_success():
    one = scored(run(faults=[fault(40)], effects=[effect(40, deviation=0.0)]), truth(40, fired=False))
    assert one.verdicts[0].strength == "void"
    assert totals([one])["faults"] == 0
    assert totals([one])["void"] == 1


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (None, "void"),
        (truth(1), "nonfinite"),
        (truth(1, finite=True, deviation=0.11), "strong"),
        (truth(1, finite=True, deviation=0.09), "faint"),
    ],
)
def test_strength_is_what_a_fault_does_to_an_unguarded_step(facts, expected):
    assert strength(facts) == expected


def test_an_incident_belongs_to_the_last_fault_before_it_and_else_is_a_false_alarm():
    incidents = [incident(n) for n in (5, 10, 12, 40, 71)]
    assigned, alarms = assign(incidents, {10: None, 30: None})
    assert {step: [one["number"] for one in mine] for step, mine in assigned.items()} == {
        10: [10, 12],
        30: [40, 71],
    }
    assert alarms == 1
    assert assign([incident(91)], {30: None}) == ({}, 1)


def test_any_incident_of_a_run_without_faults_is_a_false_alarm():
    assert scored(run("healthy", faults=[fault(40)], incidents=[incident(40)])).false_alarms == 1


@pytest.mark.parametrize(
    ("hit", "found", "right"),
    [
        ({"target": "sample", "elements": 1, "index": [3]}, {"samples": [3]}, {"sample": True}),
        ({"target": "sample", "elements": 1, "index": [3]}, {"samples": [2, 3]}, {"sample": False}),
        ({"target": "sample", "elements": 9, "index": [3]}, {"samples": []}, {}),
        ({"target": "gradient", "where": "a.weight"}, {"parameters": ["a.weight"]}, {"parameter": True}),
        ({"target": "parameter", "where": "a.weight"}, {"parameters": ["b"]}, {"parameter": False}),
        (
            {"target": "activation", "where": "attn", "op": "aten.bmm.default"},
            {"module": "attn", "op": "aten._softmax.default"},
            {"module": True, "op": False},
        ),
        ({"target": "activation", "where": "mlp", "op": "sign_flip"}, {"module": None}, {"module": False}),
    ],
)
def test_a_place_is_right_if_it_is_where_the_fault_was_put(hit, found, right):
    assert places(hit, incident(1, **found), None) == right


def test_the_rank_is_right_if_it_is_the_only_one_named():
    assert places({}, incident(1, ranks=[2]), 2) == {"rank": True}
    assert places({}, incident(1, ranks=[2, 3]), 2) == {"rank": False}


def test_the_confusion_matrix_counts_what_was_noticed():
    one = scored(
        run(
            faults=[fault(10), fault(20), fault(30, "attention-overflow"), fault(40)],
            incidents=[incident(10), incident(20, cause="math"), incident(30, cause=None)],
        ),
        *(truth(step) for step in (10, 20, 30, 40)),
    )
    assert confusion(one.verdicts) == {"data": {"data": 1, "math": 1}, "precision": {"no diagnosis": 1}}
    table = totals([one])
    assert table["cause_right"] == {"right": 1, "of": 2}
    assert table["cause_right_of_all_noticed"] == {"right": 1, "of": 3}
    assert (table["noticed"], table["nonfinite"], table["diagnosis_median"]) == (3, 4, 1.25)
    assert [row["noticed"] for row in by_kind([one])] == [2, 1]


def test_goals_are_missed_where_the_numbers_miss_them():
    ours = totals(
        [
            scored(
                run(faults=[fault(40)], effects=[effect(40, deviation=0.9)], incidents=[incident(40)]),
                truth(40),
            )
        ]
    )
    restart = totals([scored(run("checkpoint", died=[40, 40]))])
    met = {one["goal"]: one["met"] for one in goals(ours, restart, 100, None, hangs=0)}
    assert met["updates spoiled by non-finite faults, in the final weights"] is False
    assert met["fewer interruptions than checkpoint and restart"] is True
    assert met["right rank"] is None
    assert met["useful steps, at one fault in 100 steps"] is True
    assert met["hangs"] is True
    assert {one["goal"]: one["met"] for one in goals(ours, restart, 100, None, hangs=1)}["hangs"] is False


def test_bits_are_told_apart_by_place():
    flips = [
        truth(10, target="gradient", where="w", bit=30, finite=True, deviation=1.4),
        truth(20, target="parameter", where="w", bit=3, finite=True, deviation=1e-6),
    ]
    one = scored(
        run(faults=[fault(10, "flip-gradient", persistent=False), fault(20, "flip-weight")],
            incidents=[incident(10, "retried", "hardware", parameters=["w"])]),
        *flips,
    )  # fmt: skip
    low, high = by_bit([one])
    assert (low["bit"], high["bit"]) == (3, 30)
    assert (low["parameter"]["noticed"], high["gradient"]["noticed"]) == (0, 1)
    assert high["gradient"]["outcomes"] == {"retried": 1}
    assert high["parameter"]["faults"] == 0


def test_an_activation_that_no_operator_is_named_for_is_scored():
    """A fault that puts a module's output in the place of another has no operator of its own."""
    hit = {"target": "activation", "where": "blocks.0.mlp", "op": None}
    named = incident(20, module="blocks.0.mlp")
    assert places(hit, named, None) == {"module": True}
