"""Which of several ranks it began on: who handed over a bad value, and which gradients are bad where."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradsentinel import Evidence, Kind, NanCallback, Sentinel
from gradsentinel.decision import Action
from gradsentinel.evidence import TensorEvidence
from gradsentinel.ranks.blame import LocalGradients, claim_of, judge_origin
from gradsentinel.ranks.handover import Handovers
from gradsentinel.ranks.origin import Claim, began

NAN = float("nan")
NAMES = [f"layer{number}" for number in range(12)]


def claim(leader: int = 0, bad: Any = (), **rest: Any) -> Claim:
    """A claim with these positions of bad gradients, in the order of the backward pass."""
    bits = sum(1 << position for position in bad)
    return Claim(leader=leader, order="same", bad=bits, first=tuple(NAMES[p] for p in sorted(bad)), **rest)


claims = st.builds(
    lambda leader, handed, bad: claim(leader, bad, handed=handed, what=f"value {handed}"),
    leader=st.sampled_from([0, 4]),
    handed=st.none() | st.integers(0, 3),
    bad=st.sets(st.integers(0, 11), max_size=12),
)
jobs = st.dictionaries(st.integers(0, 7), claims, min_size=1)


@pytest.mark.slow
@given(jobs, st.data())
def test_somebody_is_named_in_each_group_that_holds_it_and_nobody_in_another(job, data):
    holders = data.draw(st.sets(st.sampled_from(sorted(job)), min_size=1))
    verdict = began(job, holders)
    groups = {job[rank].leader for rank in holders}
    assert {job[rank].leader for rank in verdict.ranks} == groups
    assert verdict.places == len(groups)
    assert began(dict(reversed(job.items())), sorted(holders)) == verdict


@given(jobs)
def test_groups_that_exchange_nothing_with_each_other_are_judged_apart(job):
    whole = began(job, job)
    apart: set[int] = set()
    for leader in {entry.leader for entry in job.values()}:
        group = {rank: entry for rank, entry in job.items() if entry.leader == leader}
        apart |= began(group, group).ranks
    assert whole.ranks == apart


@given(st.integers(0, 3), st.integers(0, 10), st.data())
def test_who_is_bad_before_the_exchange_that_spread_it_is_named(guilty, start, data):
    """A gradient turns bad at one place of the backward pass of one rank, and at a later one of all."""
    spread = data.draw(st.integers(start + 1, 11))
    job = {rank: claim(bad=range(start if rank == guilty else spread, 12)) for rank in range(4)}
    verdict = began(job, job)
    assert verdict.ranks == {guilty}
    assert verdict.names == tuple(NAMES[start:spread])
    (said,) = verdict.says
    assert said.startswith(
        f"it began on rank {guilty}: where it only arrived, the gradient of {NAMES[start]}"
    )


@given(st.integers(0, 3), st.integers(0, 5), st.sets(st.integers(0, 11)))
def test_who_handed_it_over_first_is_named_whatever_is_bad_later(guilty, number, bad):
    job = {
        rank: claim(bad=bad, handed=number + (rank != guilty), what="the output of down") for rank in range(4)
    }
    verdict = began(job, {0, 1, 2, 3} - {guilty})  # it may be finite again there, and gone on to others
    assert verdict.ranks == {guilty}
    (said,) = verdict.says
    assert said.startswith(f"it began on rank {guilty}: the output of down was not finite there before the")


@pytest.mark.parametrize("handed", [None, 3])
def test_of_equals_nobody_is_singled_out(handed):
    job = {rank: claim(bad=[2, 5], handed=handed) for rank in (0, 1)}
    verdict = began(job, job)
    assert (verdict.ranks, verdict.places, verdict.names) == ({0, 1}, 1, ())
    (said,) = verdict.says
    assert said.startswith("it began on one of ranks 0-1, or on all of them")


def test_a_rank_without_a_part_in_the_last_layer_is_no_receiver():
    """The last place in the backward pass is a sharded embedding: not every rank has one of its rows."""
    job = {0: claim(bad=[3, 4]), 1: claim(bad=[3, 4, 11])}
    assert began(job, job).ranks == {0, 1}


def test_ranks_with_other_parameters_are_not_compared():
    job = {0: claim(bad=[3]), 1: Claim(leader=0, order="other", bad=0b1111, first=("a",))}
    assert began(job, job).ranks == {0, 1}
    unknown = {0: claim(bad=[3]), 1: Claim(leader=0)}
    assert began(unknown, unknown).ranks == {0, 1}


# -- what a rank knows ----------------------------------------------------------------------------------


class Several:
    """The agreement of a job of two, of which only this rank is here."""

    rank, world_size = 0, 2


def a_run(run_dir: Any) -> Any:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 1))
    sentinel = Sentinel(
        model, torch.optim.SGD(model.parameters(), 0.1), callbacks=[NanCallback()], run_dir=run_dir
    )
    run = sentinel._watch.run
    run.consensus = Several()
    return run


def evidence(*names: str, kind: Kind = Kind.NONFINITE_GRADIENT) -> Evidence:
    tensors = tuple(TensorEvidence(name=name, nonfinite=1, numel=2, norm=NAN) for name in names)
    return Evidence(kind=kind, action=Action.SKIP, message="bad", tensors=tensors)


@pytest.mark.parametrize("kind", [Kind.NONFINITE_GRADIENT, Kind.NONFINITE_LOSS])
def test_a_claim_holds_the_bad_gradients_in_the_order_of_the_backward_pass(run_dir, kind):
    run = a_run(run_dir)
    judged = judge_origin(evidence("0.weight", "1.bias", "2.weight", kind=kind), run)
    assert [tensor.name for tensor in judged.tensors] == ["2.weight", "1.bias", "0.weight"]
    found = claim_of(run, speaks=True)
    # 2.bias, 2.weight, 1.bias, 1.weight, 0.bias, 0.weight
    assert (found.bad, found.first) == (0b100110, ("2.weight", "1.bias", "0.weight"))
    assert (found.leader, found.handed) == (0, None)


def test_a_rank_that_saw_nothing_claims_nothing_and_one_that_spread_it_does(run_dir):
    run = a_run(run_dir)
    assert claim_of(run, speaks=False) is None
    run.local.seen.handed += [(f"value {n}", torch.tensor(v)) for n, v in enumerate((1.0, NAN, NAN))]
    run.local.first_peer = 0
    found = claim_of(run, speaks=False)
    assert (found.leader, found.handed, found.what, found.bad) == (0, 1, "value 1", 0)
    run.local.begin_step()
    assert claim_of(run, speaks=False) is None


def test_of_very_many_parameters_it_is_not_told_which_are_bad(run_dir, monkeypatch):
    run = a_run(run_dir)
    monkeypatch.setattr("gradsentinel.ranks.blame._MOST_COMPARED", 5)
    judge_origin(evidence("0.weight"), run)
    found = claim_of(run, speaks=True)
    assert (found.order, found.bad, found.first) == ("", 0, ())


def test_a_loop_that_makes_no_steps_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr("gradsentinel.ranks.blame._MOST_HANDED", 3)
    local = LocalGradients()
    for _ in range(5):
        local._handovers.see("x", torch.ones(2))
    local._handovers.see("whole numbers", torch.ones(2, dtype=torch.int64))
    assert len(local.seen.handed) == 3


@pytest.mark.expects_swallowed
def test_a_hook_that_fails_is_taken_off_and_harms_nothing():
    def note(what: str, own: torch.Tensor) -> None:
        raise ValueError("what now")

    handovers = Handovers(note)
    module = nn.Linear(2, 1)
    look = handovers.quietly(lambda *_: handovers.see("x", torch.ones(1)))
    handovers._handles.append(module.register_forward_hook(look))
    assert module(torch.ones(1, 2)).shape == (1, 1)
    assert not module._forward_hooks
