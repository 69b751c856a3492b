"""What the benchmarks count and how they write it down; times are measured by `make bench`, not here."""

from __future__ import annotations

import random
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gradsentinel import MagnitudeCallback, NanCallback, Sentinel, SpikeCallback

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import launches  # noqa: E402 - scripts, not a package
import page  # noqa: E402
from race import Estimate  # noqa: E402


def net(layers):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))


def batches():
    return [torch.randn(4, 16, generator=torch.Generator().manual_seed(n)) for n in range(20)]


def plain(model, max_norm, *, fused):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)

    def step(batch):
        model(batch).square().mean().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def watched(model, max_norm, callbacks, run_dir, *, guard):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=guard == "device" or None)
    sentinel = Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir, guard=guard)
    feed = []

    def loader():
        while True:
            yield feed.pop()

    loop = iter(sentinel.steps(loader()))

    def step(batch):
        feed.append(batch)
        sentinel.backward(model(next(loop)).square().mean())
        sentinel.step(max_norm=max_norm)

    return step


def counted(step):
    """Counts of the steps 15 to 19: the state is looked at in the first ten."""
    for batch in batches()[:15]:
        step(batch)
    with launches.counting() as counts:
        for batch in batches()[15:]:
            step(batch)
    return counts.launches / 5, counts.waits / 5, counts.bytes / 5


def extra(run_dir, *, max_norm, guard="host", layers=4, callbacks=(NanCallback,)):
    """What the watch adds to a step."""
    fused = guard == "device" or None
    base = counted(plain(net(layers), max_norm, fused=fused))
    mine = counted(watched(net(layers), max_norm, [make() for make in callbacks], run_dir, guard=guard))
    return tuple(a - b for a, b in zip(mine, base, strict=True))


def three():
    return (NanCallback, lambda: MagnitudeCallback(max_global_norm=1e9), SpikeCallback)


@pytest.mark.parametrize("callbacks", [(NanCallback,), three()], ids=["nan", "three"])
def test_a_healthy_step_with_a_clip_costs_a_few_launches_on_scalars_and_one_wait(callbacks, run_dir):
    launched, waits, read = extra(run_dir, max_norm=1e-3, callbacks=callbacks)
    assert launched <= 6
    assert waits == 1
    assert read < 200


def test_without_a_clip_the_norms_are_read_once(run_dir):
    model = net(4)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    launched, waits, read = extra(run_dir, max_norm=None)
    assert launched <= 8
    assert waits == 1
    assert size <= read < 1.1 * size


def test_a_norm_within_the_bound_saves_the_multiplication(run_dir):
    model = net(4)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    launched, _, read = extra(run_dir, max_norm=1e6)
    assert launched <= 0
    assert read < -0.9 * size


@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_the_device_guard_waits_for_nothing(max_norm, run_dir):
    _, waits, _ = extra(run_dir, max_norm=max_norm, guard="device", callbacks=three())
    assert waits == 0


@pytest.mark.parametrize("guard", ["host", "device"])
def test_neither_launches_nor_waits_grow_with_the_number_of_tensors(guard, run_dir):
    few = extra(run_dir / "few", max_norm=1e-3, guard=guard, layers=2, callbacks=three())
    many = extra(run_dir / "many", max_norm=1e-3, guard=guard, layers=40, callbacks=three())
    assert few[:2] == many[:2]


def test_launches_hardly_grow_with_the_number_of_callbacks(run_dir):
    few = extra(run_dir / "few", max_norm=1e-3)
    bounds = [lambda n=n: MagnitudeCallback(max_global_norm=1e9 + n) for n in range(20)]
    many = extra(run_dir / "many", max_norm=1e-3, callbacks=(NanCallback, *bounds))
    assert many[0] <= few[0] + 1
    assert many[1] == few[1]


def test_the_counts_are_those_of_what_is_known():
    x = torch.ones(1000)
    with launches.counting() as counts:
        y = x.view(10, 100)
        y = y + 1.0
        y.sum().item()
        y.tolist()
    assert (counts.launches, counts.waits) == (2, 2)
    assert counts.bytes == 2 * 4000


@pytest.mark.parametrize("size", [5, 6, 20, 61])
def test_the_interval_holds_the_median_as_often_as_it_says(size):
    dice = random.Random(size)
    held = 0
    for _ in range(600):
        found = Estimate.of([dice.expovariate(1.0) for _ in range(size)])
        assert found.low <= found.median <= found.high
        held += found.low <= 0.6931 <= found.high
    assert held / 600 > (0.9 if size > 5 else 0.88)  # five values cannot do better than 94 %


def test_an_estimate_is_a_median():
    assert Estimate.of([3.0, 1.0, 2.0]).median == statistics.median([1.0, 2.0, 3.0])


def one(median, *, in_place=True, ratio=1.5):
    spread = {"median": median, "low": median - 0.001, "high": median + 0.001, "pairs": 9}
    whole = {"median": ratio, "low": ratio - 0.1, "high": ratio + 0.1, "pairs": 9}
    return {"baseline": "plain", "in_place": in_place, "added": spread, "ratio": whole}


def test_small_effects_are_taken_from_the_timed_part_and_large_ones_from_whole_steps():
    assert page.percent(one(0.0021)) == "+0.21 % (+0.11 to +0.31)"
    assert page.percent(one(0.3)) == "+50 %° (+40 to +60)"
    assert page.percent(one(0.001, in_place=False)) == "+50 %° (+40 to +60)"


def test_tables_go_between_their_marks(tmp_path):
    results = {
        "counts": {s: {"NanCallback": {"launches": 1.0, "waits": 1.0, "bytes": 12.0}} for s in page.SETTINGS}
    }
    copy = tmp_path / "performance.md"
    copy.write_text("before\n<!-- counts: begin -->\nold\n<!-- counts: end -->\nafter\n", encoding="utf-8")
    page.write(results, copy)
    page.write(results, copy)
    text = copy.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- counts: begin -->\n| variant")
    assert text.endswith("<!-- counts: end -->\nafter\n")
    assert text.count("| NanCallback | 1 | 1 | 12 B | 1 | 1 | 12 B |") == 1
    assert "old" not in text


def test_the_page_has_a_place_for_each_table():
    marks = re.findall(r"<!-- (\w+): begin -->", page.PAGE.read_text(encoding="utf-8"))
    assert sorted(marks) == sorted(page.TABLES)
