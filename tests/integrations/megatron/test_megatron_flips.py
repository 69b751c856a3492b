"""Flipped bits in Megatron's gradients: numbers that stay finite, which of them is seen, and by whom."""

import pytest
from layouts import LAYOUTS, Fault, replace
from outcomes import Expected, check_cured, check_nothing_swallowed
from results import outcome

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("megatron"), pytest.mark.timeout(200)]

TOP = {"before": 14, "after": 30}
"""The highest bit of the exponent: of the model's bfloat16 gradients, and of the float32 ones reduced."""
BITS = {"before": (0, 6, 7, 14, 15), "after": (0, 22, 23, 29, 30, 31)}
"""Ends of mantissa and exponent, and the sign."""
BOUND = "MagnitudeCallback(max_value=1.0, action='retry'), SpikeCallback(action='retry', warmup=5)"
BOUNDED = f"NanCallback, {BOUND}, Retry(max_retries=100)"
COMPARED = "CrossRankCallback(every=1, outlier=None), Rollback(every=1, confirm_after=0, max_rollbacks=100)"
FIRST = 6


def flips(when, bits, *, rank=1):
    plain = Fault(rank=rank, parameter="mlp.linear", when=when)
    return tuple(replace(plain, bit=bit, step=FIRST + number) for number, bit in enumerate(bits))


@pytest.mark.parametrize(
    ("name", "rank"), [("tp2dp2", 3), pytest.param("dp2-distributed", 0, marks=pytest.mark.slow)]
)
def test_a_flip_that_makes_a_gradient_huge_is_retried_without_a_trace(megatron, alone, tmp_path, name, rank):
    layout = LAYOUTS[name]
    faults = tuple(
        replace(fault, step=FIRST + number)
        for number, when in enumerate(("before", "after"))
        for fault in flips(when, (TOP[when],), rank=rank)
    )
    settings = {"callbacks": BOUNDED, "faults": faults, "steps": 9}
    watched = megatron.run("train", layout.world, layout, tmp_path, **settings)
    assert sum(result["struck"] for result in watched) == 2
    expected = [
        Expected(step=fault.step, outcome="retried", parameter="mlp.linear", kinds=["magnitude"])
        for fault in faults
    ]
    check_cured(outcome(alone(layout, steps=9)), outcome(watched), expected)


@pytest.mark.parametrize(
    ("name", "when", "compared", "every"),
    [
        ("dp3", "before", False, False),
        ("dp3", "after", True, False),
        ("dp2-distributed", "after", False, False),
        pytest.param("dp3", "before", False, True, marks=pytest.mark.slow),
        pytest.param("dp3", "after", True, True, marks=pytest.mark.slow),
        pytest.param("dp2-distributed", "after", False, True, marks=pytest.mark.slow),
    ],
)
def test_which_bits_are_seen_and_by_whom(megatron, tmp_path, name, when, compared, every):
    """A bound sees the top bit of the exponent; a checksum every bit that is not the same on all replicas.

    What is flipped before the reduction reaches all replicas alike, and a shard has no replica.
    """
    layout = LAYOUTS[name]
    bits = range(16 if when == "before" else 32) if every else BITS[when]
    faults, steps = flips(when, bits), FIRST + len(bits) + 1
    settings = {"callbacks": f"{BOUNDED}, {COMPARED}", "faults": faults, "steps": steps}
    watched = megatron.run("train", layout.world, layout, tmp_path, **settings)
    check_nothing_swallowed(outcome(watched))
    assert [result["struck"] for result in watched] == [
        len(bits) if rank == 1 else 0 for rank in range(layout.world)
    ]
    incidents = watched[0]["incidents"]
    if not compared:  # the others are in the weights of all replicas now, and those are alike
        [top] = incidents
        assert (top["kind"], top["outcome"]) == ("magnitude", "retried")
        assert top["step"] == FIRST + bits.index(TOP[when])
        return
    assert len(incidents) == len(bits)  # one for each, in their order
    for bit, incident in zip(bits, incidents, strict=True):
        expected = ("magnitude", "retried") if bit == TOP[when] else ("rank_divergence", "rolled_back")
        assert (incident["kind"], incident["outcome"]) == expected
        assert [rank["rank"] for rank in incident["ranks"]] == [1]
    for part in ("weights", "optimizer"):  # each was taken back: the replicas are alike
        assert len({result[part] for result in watched}) == 1
