"""What is measured of a batch is the same with a plan that was laid out for an earlier one and without."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel.callbacks.batch_fields import Bound, Reader, plain_values
from gradsentinel.callbacks.batch_meter import Meter
from gradsentinel.callbacks.batch_reading import IGNORED, NONFINITE, Reading
from gradsentinel.state.tree import tensors_in

NAN, INF = float("nan"), float("inf")
RANGES = {"labels": (0, 50), "given": (-5, 100)}
TABLES = {"ids": Bound(0, 90, "a table")}
NAMES = ("x", "labels", "input_ids", "attention_mask", "key_padding_mask", "loss_mask", "given", "pixels")
SHAPES = ((), (3,), (2, 8), (4, 5), (1, 64), (0, 3), (2, 3, 4))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool)


@st.composite
def tensors(draw: Any) -> Tensor:
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 3)))
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 30
    fill = draw(st.sampled_from([None, None, None, 0.0, -100.0]))
    values = (values if fill is None else torch.full(shape, fill)).to(dtype)
    if dtype.is_floating_point and values.numel():
        values.view(-1)[-1] = draw(st.sampled_from([1.0, 1.0, 1.0, NAN, INF, -INF]))
        values.requires_grad_(draw(st.booleans()))
    return values.transpose(0, 1) if len(shape) == 2 and draw(st.booleans()) else values


fields = st.dictionaries(st.sampled_from(NAMES), tensors(), min_size=1, max_size=4)
nested = st.one_of(
    tensors(),
    fields,
    fields.map(lambda found: tuple(found.values())),
    st.builds(lambda inner, more: {"a": inner, "b": [more, "text"], "n": 3}, fields, tensors()),
)


def told(reading: Reading) -> tuple[Any, ...]:
    """All that is told of a reading; as text, for NaN equals nothing."""
    sheet, bad = reading.sheet.tolist(), reading.suspicion()
    numbers = sheet, reading.statistics(sheet), reading.rows(sheet), reading.sizes(sheet)
    flags = None if bad is None else bool(bad), [bool(flag) for flag in reading.outside]
    return (repr(numbers), reading.marks(sheet), flags)


@settings(deadline=None, max_examples=60)
@given(kinds=st.lists(nested, min_size=1, max_size=3), data=st.data())
def test_a_plan_changes_nothing_that_is_measured(kinds, data):
    """Batches of a few structures come and come again, in any order, and so do the settings."""
    reader, meter, anew = Reader(RANGES, TABLES), Meter(-100), Meter(-100)
    for _ in range(8):
        batch = data.draw(st.sampled_from(kinds))
        allowed, due = frozenset(data.draw(st.sampled_from([(), ("x",)]))), data.draw(st.booleans())
        anew._plans.clear()
        found = meter.measure(reader.read(batch), allowed=allowed, statistics=due)
        expected = anew.measure(Reader(RANGES, TABLES).read(batch), allowed=allowed, statistics=due)
        assert list(map(told, found)) == list(map(told, expected))
        check_against_the_values(batch, found, allowed)


def check_against_the_values(batch: Any, found: list[Reading], allowed: frozenset[str]) -> None:
    """Hold what is told against the values themselves."""
    values = {path: plain_values(tensor) for path, tensor in tensors_in(batch)}
    marks = [mark for reading in found for mark in reading.marks(reading.sheet.tolist())]
    broken = [
        path
        for path, tensor in values.items()
        if tensor.is_floating_point() and bool((tensor.isnan() | (tensor == INF)).any())
    ]
    assert {path for mark, path in marks if mark == NONFINITE} >= {p for p in broken if p not in allowed}
    for mark, path in marks:
        if mark == IGNORED:
            assert bool((values[path] == -100).all())
    for reading in found:
        for path, size in reading.sizes(reading.sheet.tolist()):
            largest = values[path].abs().max().item()
            assert size == largest or (math.isnan(largest) and not size < INF)
        if marks:
            assert any(bool(one.suspicion()) for one in found if one.suspicion() is not None)


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_batch_like_the_last_one_takes_its_range_and_nothing_else():
    reader, meter = Reader({}, {}), Meter(-100)
    plans = []
    for number in range(3):
        batch = torch.full((1, 64), number)
        with Launches() as launches:
            (reading,) = meter.measure(reader.read(batch), allowed=frozenset(), statistics=True)
        plans.append(reading.plan)
        assert reading.sheet.tolist() == [number, number]
    assert launches.names == ["aminmax", "stack", "_to_copy"]
    assert plans[0] is plans[1] is plans[2]
