"""The judge: all findings compared with their bounds at once, agreed, and read once."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel import Action, Finding, Kind
from gradsentinel.judge import Filed, Judge
from gradsentinel.ranks.consensus import LocalConsensus

NAN, INF = float("nan"), float("inf")
CPU = torch.device("cpu")
NOTHING: dict[str, torch.Tensor] = {}


class Ranks(LocalConsensus):
    """Other ranks of the job whose levels are given; remembers what was asked."""

    world_size = 2

    def __init__(self, *others):
        self.others = [torch.tensor(levels, dtype=torch.int32) for levels in others]
        self.asked = []

    def agree(self, levels):
        self.asked.append(levels.clone())
        for other in self.others:
            levels = torch.maximum(levels, other)
        return levels


def filed(value, limit=None, *, slot=0, action=Action.SKIP, step=0):
    value = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    return Filed(slot, step, Finding(kind=Kind.CUSTOM, value=value, limit=limit, action=action))


def fires(value, limit=None):
    judge = Judge(LocalConsensus(), slots=1)
    ruling = judge.rule([filed(value, limit)], NOTHING, CPU)
    assert bool(ruling.fired) == ruling.suspicious == (ruling.levels == (Action.SKIP,))
    return ruling.suspicious


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=lambda d: str(d)[6:]
)
def test_without_a_limit_only_finite_numbers_are_fine(dtype):
    fine = [0.0, -1.0, torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny]
    assert not any(fires(torch.tensor(value, dtype=dtype)) for value in fine)
    assert all(fires(torch.tensor(value, dtype=dtype)) for value in (NAN, INF, -INF))


def test_a_bool_must_be_false():
    assert not fires(False)
    assert fires(True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_an_integer_is_a_number(dtype):
    assert not fires(torch.tensor(7, dtype=dtype))
    assert not fires(torch.tensor(7, dtype=dtype), 7)
    assert fires(torch.tensor(8, dtype=dtype), 7)


@pytest.mark.parametrize(
    ("value", "limit", "expected"),
    [
        (1.0, 1.0, False),
        (-1.0, 1.0, False),
        (1.0000001, 1.0, True),
        (-1.0000001, 1.0, True),
        (0.0, 0.0, False),
        (1e-30, 0.0, True),
        (NAN, 1.0, True),
        (INF, 1.0, True),
        (-INF, 1e30, True),
        (NAN, INF, True),
        (INF, INF, True),
        (3e38, INF, False),
        (INF, 1e300, True),
        (3e38, 1e300, False),
    ],
)
def test_a_limit_is_on_the_magnitude_and_nonfinite_breaks_every_one(value, limit, expected):
    assert fires(value, limit) is expected


def test_a_limit_is_compared_in_the_precision_of_the_value():
    """0.1 is not a float32: the bound is rounded like the value, so the equal is within."""
    assert not fires(torch.tensor(0.1), 0.1)
    assert not fires(torch.tensor(0.1, dtype=torch.float64), 0.1)
    assert fires(torch.nextafter(torch.tensor(0.1), torch.tensor(1.0)), 0.1)


def test_a_float64_value_is_not_narrowed():
    assert not fires(torch.tensor(1e300, dtype=torch.float64))
    assert fires(torch.tensor(1 + 1e-12, dtype=torch.float64), 1.0)


def test_one_element_of_any_shape_will_do():
    assert fires(torch.full((1, 1), NAN))
    assert not fires(torch.ones(1, requires_grad=True))


def test_each_slot_gets_its_own_most_severe_level():
    judge = Judge(LocalConsensus(), slots=4)
    findings = [
        filed(NAN, slot=0, action=Action.WARN),
        filed(1.0, slot=0, action=Action.ABORT),
        filed(5.0, 2.0, slot=2, action=Action.SKIP, step=3),
        filed(True, slot=2, action=Action.ROLLBACK, step=3),
        filed(1.0, slot=3, action=Action.ROLLBACK),
    ]
    ruling = judge.rule(findings, NOTHING, CPU)
    assert ruling.levels == (Action.WARN, Action.CONTINUE, Action.ROLLBACK, Action.CONTINUE)
    assert ruling.fired == (findings[0], findings[2], findings[3])


def test_the_numbers_come_along():
    norm = torch.tensor(2.5)
    judge = Judge(LocalConsensus(), slots=1)
    extras = {"norm": norm, "loss": torch.tensor(0.5, dtype=torch.float16), "bad": torch.tensor(NAN)}
    ruling = judge.rule([filed(norm, 1.0)], extras, CPU)
    assert (ruling.values["norm"], ruling.values["loss"]) == (2.5, 0.5)
    assert math.isnan(ruling.values["bad"])
    assert len(ruling.fired) == 1


def test_nothing_to_judge():
    assert Judge(LocalConsensus(), slots=0).rule([], NOTHING, CPU).levels == ()
    ruling = Judge(LocalConsensus(), slots=2).rule([], {"norm": torch.tensor(1.0)}, CPU)
    assert ruling.levels == (Action.CONTINUE, Action.CONTINUE)
    assert not ruling.suspicious
    assert ruling.values == {"norm": 1.0}


def test_another_rank_may_know_better():
    """The levels are agreed; what fired is this rank's own."""
    ranks = Ranks([0, 3])
    ruling = Judge(ranks, slots=2).rule([filed(1.0)], NOTHING, CPU)
    assert ruling.levels == (Action.CONTINUE, Action.SKIP)
    assert ruling.suspicious
    assert ruling.fired == ()
    assert [levels.tolist() for levels in ranks.asked] == [[0, 0]]
    assert ranks.asked[0].dtype is torch.int32


def test_it_asks_the_other_ranks_even_if_it_has_nothing_to_say():
    ranks = Ranks([0, 0, 4])
    assert Judge(ranks, slots=3).rule([], NOTHING, CPU).levels[2] is Action.ROLLBACK
    assert len(ranks.asked) == 1


def test_the_plan_follows_the_findings():
    """The lay-out of one step is kept for the next; another set of findings must not be judged by it."""
    judge = Judge(LocalConsensus(), slots=2)
    for _ in range(3):
        assert judge.rule([filed(3.0, 5.0)], NOTHING, CPU).levels == (0, 0)
        assert judge.rule([filed(3.0, 2.0)], NOTHING, CPU).levels == (Action.SKIP, 0)
        assert judge.rule([filed(3.0, 2.0, action=Action.WARN)], NOTHING, CPU).levels == (Action.WARN, 0)
        assert judge.rule([filed(3.0, 2.0, slot=1)], NOTHING, CPU).levels == (0, Action.SKIP)
        both = [filed(3.0, 2.0, slot=1), filed(1.0, 2.0, slot=0)]
        assert judge.rule(both, NOTHING, CPU).levels == (0, Action.SKIP)
        assert judge.rule(both[::-1], NOTHING, CPU).fired == (both[0],)
        wide = [filed(torch.tensor(3.0, dtype=torch.float64), 2.0)]
        assert judge.rule(wide, NOTHING, CPU).levels == (Action.SKIP, 0)
    judge.slots = 3
    assert judge.rule([filed(3.0, 2.0)], NOTHING, CPU).levels == (Action.SKIP, 0, 0)


def test_one_value_under_several_bounds():
    value = torch.tensor(3.0)
    judge = Judge(LocalConsensus(), slots=3)
    findings = [filed(value, limit, slot=slot) for slot, limit in enumerate([2.0, 3.0, None])]
    ruling = judge.rule(findings, {"norm": value}, CPU)
    assert ruling.fired == (findings[0],)
    assert ruling.levels == (Action.SKIP, 0, 0)


numbers = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 2.0, NAN, INF, -INF, 3e38]), st.floats(width=32))
limits = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 2.0, INF]), st.floats(0, width=32))


@given(
    st.lists(st.tuples(st.integers(0, 3), numbers, limits, st.sampled_from(Action)), max_size=8),
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_against_one_comparison_at_a_time(rows, elsewhere):
    judge = Judge(Ranks(elsewhere), slots=4)
    findings = [filed(value, limit, slot=slot, action=action) for slot, value, limit, action in rows]
    expected = list(elsewhere)
    fired = []
    for finding, (slot, value, limit, action) in zip(findings, rows, strict=True):
        if not math.isfinite(value) or (limit is not None and abs(value) > limit):
            fired.append(finding)
            expected[slot] = max(expected[slot], action)
    ruling = judge.rule(findings, NOTHING, CPU)
    assert ruling.levels == tuple(expected)
    assert list(ruling.fired) == fired


# -- what it costs ---------------------------------------------------------------------------------


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


class CountReads(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.reads += func in {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__}
        return func(*args, **(kwargs or {}))


def cost(detectors, values=1):
    """Launches and reads of the second of two steps, on which the lay-out is known."""
    tensors = [torch.tensor(1.0) for _ in range(values)]
    findings = [
        filed(tensor, 5.0 + slot + place, slot=slot)
        for slot in range(detectors)
        for place, tensor in enumerate(tensors)
    ]
    extras = {"norm": tensors[0], "loss": torch.tensor(1.0)}
    judge = Judge(LocalConsensus(), slots=detectors)
    judge.rule(findings, extras, CPU)
    ops, reads = CountOps(), CountReads()
    with ops, reads:
        judge.rule(findings, extras, CPU)
    return ops.ops, reads.reads


def test_fifty_detectors_cost_what_one_does():
    assert cost(50) == cost(1)
    assert cost(50, values=3) == cost(1, values=3)
    assert cost(50, values=3)[1] == 1
