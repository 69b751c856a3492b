"""Where clipping hides the culprit, and where the norm overflows although no gradient does."""

import pytest
import torch
from torch import nn

from gradsentinel import MagnitudeCallback, NanCallback


class Chosen(nn.Module):
    """Parameters of the given shapes, all ones."""

    def __init__(self, dtype=torch.float32, **shapes) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=dtype)))


@pytest.fixture
def given(term):
    """A finite loss whose gradients will be exactly the given ones, by name."""
    return lambda model, gradients: sum(term(getattr(model, n), g.clone()) for n, g in gradients.items())


@pytest.fixture
def three():
    return Chosen(a=8, b=8, c=8)


def gradients_with(value):
    gradients = {name: torch.full((8,), 0.5) for name in "abc"}
    gradients["b"][3] = value
    return gradients


def test_huge_finite_gradient_is_clipped_by_its_true_norm(three, watch, drive, nonfinite, given):
    """pytorch#46849, variant A: 1e20 squares to inf, the coefficient becomes 0, all gradients are zeroed.

    No NaN anywhere and no progress. Clipped by the true norm instead, b[3] moves by lr * max_norm.
    """
    optimizer = torch.optim.SGD(three.parameters(), lr=0.25)
    sentinel = watch(three, optimizer)
    drive(sentinel, [0], lambda _: given(three, gradients_with(1e20)), max_norm=1.0)
    assert sentinel.incidents == ()
    assert three.b[3].item() == pytest.approx(1 - 0.25)
    assert three.a.tolist() == [1.0] * 8  # 0.5 / 1e20 of the step is below float32
    assert nonfinite(three, optimizer) == []


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("max_norm", [1.0, None])
def test_culprit_is_named_before_clipping_spreads_it(
    value, max_norm, three, watch, drive, told, nonfinite, given
):
    """pytorch#46849, variants B and C: one Inf zeroes the other gradients, one NaN makes all of them NaN.

    After clipping the culprit is lost, so it must be found before.
    """
    optimizer = torch.optim.SGD(three.parameters(), lr=0.1, momentum=0.9)
    sentinel = watch(three, optimizer)
    assert drive(sentinel, [0], lambda _: given(three, gradients_with(value)), max_norm=max_norm) == ["skip"]
    assert told(sentinel) == [(0, "nonfinite_gradient", "skipped")]
    (tensor,) = sentinel.incidents[0].tensors
    assert (tensor.name, tensor.nonfinite, tensor.numel, tensor.first_index) == ("b", 1, 8, (3,))
    assert nonfinite(three, optimizer) == []


def test_one_nan_beside_a_norm_that_overflows(three, watch, drive, told, named, given):
    """A real NaN must not pass as one more overflowed norm, nor the huge but finite neighbour be blamed."""
    gradients = gradients_with(1e30)
    gradients["c"][0] = float("nan")
    sentinel = watch(three, torch.optim.SGD(three.parameters(), lr=0.1))
    assert drive(sentinel, [0], lambda _: given(three, gradients), max_norm=1.0) == ["skip"]
    assert told(sentinel) == [(0, "nonfinite_gradient", "skipped")]
    assert named(sentinel.incidents[0]) == {"c"}


@pytest.mark.parametrize(
    ("dtype", "value", "shape"),
    [
        pytest.param(torch.float16, 300.0, (64,), id="fp16 squares overflow"),
        pytest.param(torch.float16, 300.0, (300, 300), id="fp16 norm overflows"),
        pytest.param(torch.float16, 65504.0, (4, 4), id="fp16 largest"),
        pytest.param(torch.bfloat16, 3e38, (8,), id="bf16 largest"),
        pytest.param(torch.float32, 3e19, (4,), id="fp32 squares overflow"),
        pytest.param(torch.float32, 3.4e38, (16,), id="fp32 largest"),
        pytest.param(torch.float32, -3.4e38, (16,), id="fp32 most negative"),
        pytest.param(torch.float64, 1e300, (4,), id="fp64 squares overflow"),
        pytest.param(torch.float32, 1e-42, (4,), id="subnormal"),
        pytest.param(torch.float16, 6e-8, (4,), id="fp16 subnormal"),
        pytest.param(torch.float32, -0.0, (4,), id="minus zero"),
        pytest.param(torch.complex64, 3e38, (4,), id="complex largest"),
    ],
)
@pytest.mark.parametrize("max_norm", [1.0, None])
def test_extreme_but_finite_gradients_are_no_incident(
    dtype, value, shape, max_norm, watch, drive, nonfinite, given
):
    """burn#5699, fairscale#263, Automodel#825: the detector's own arithmetic overflows, not the gradients.

    With clipping the update has the norm that was asked for, whatever the dtype.
    """
    model = Chosen(dtype, w=shape)
    gradient = torch.full(shape, value, dtype=dtype)
    lr = 1.0 if max_norm else 1e-39  # so that the weights themselves stay finite without clipping
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    sentinel = watch(model, optimizer)
    model.w.data.zero_()
    assert drive(sentinel, [0], lambda _: given(model, {"w": gradient}), max_norm=max_norm) == ["continue"]
    assert sentinel.incidents == ()
    assert nonfinite(model, optimizer) == []
    if max_norm:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        true_norm = gradient.numel() ** 0.5 * abs(value)
        moved = torch.linalg.vector_norm(model.w.detach().to(wide)).item()
        assert moved == pytest.approx(min(true_norm, 1.0), rel=2e-2, abs=1e-12)


def test_complex_gradient_whose_modulus_overflows(watch, drive, given):
    """Both parts are finite, only |z| is beyond float32: no incident, and clipping must not zero it."""
    model = Chosen(torch.complex64, w=2)
    model.w.data.zero_()
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=1.0))
    huge = torch.full((2,), 3e38 + 3e38j, dtype=torch.complex64)
    assert drive(sentinel, [0], lambda _: given(model, {"w": huge}), max_norm=1.0) == ["continue"]
    assert sentinel.incidents == ()
    assert model.w.abs().pow(2).sum().sqrt().item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_by_another_norm_that_overflows(norm_type, watch, drive, given):
    """The norm that is clipped is the one that was asked for, also where its usual formula overflows."""
    model = Chosen(w=16)
    model.w.data.zero_()
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=1.0))
    huge = torch.full((16,), 3e38)
    assert drive(sentinel, [0], lambda _: given(model, {"w": huge}), max_norm=1.0, norm_type=norm_type) == [
        "continue"
    ]
    assert sentinel.incidents == ()
    assert torch.linalg.vector_norm(model.w.detach(), norm_type).item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 0.5, 0.0, -1.0, float("inf"), -float("inf")])
def test_culprit_is_found_whatever_norm_is_clipped(norm_type, value, three, watch, drive, told, named, given):
    """A norm of order 0 counts a NaN as one element, a negative order makes 0 of an Inf."""
    sentinel = watch(three, torch.optim.Adam(three.parameters()))
    gradients = gradients_with(value)
    actions = drive(sentinel, [0], lambda _: given(three, gradients), max_norm=1.0, norm_type=norm_type)
    assert actions == ["skip"]
    assert told(sentinel) == [(0, "nonfinite_gradient", "skipped")]
    assert named(sentinel.incidents[0]) == {"b"}


def test_clipping_overflowed_norm_over_mixed_dtypes(watch, drive, nonfinite, given):
    """One fp16 parameter whose norm overflows in fp16 beside an fp32 one: one true norm for both."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Parameter(torch.zeros(300, 300, dtype=torch.float16))
            self.wide = nn.Parameter(torch.zeros(4))

    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sentinel = watch(model, optimizer)
    gradients = {"narrow": torch.full((300, 300), 300.0).half(), "wide": torch.full((4,), 9e4)}
    assert drive(sentinel, [0], lambda _: given(model, gradients), max_norm=100.0) == ["continue"]
    true_norm = (90000.0**2 + 180000.0**2) ** 0.5
    assert sentinel.incidents == ()
    assert model.wide.detach().norm().item() == pytest.approx(100 * 180000 / true_norm, rel=1e-3)
    assert model.narrow.detach().float().norm().item() == pytest.approx(100 * 90000 / true_norm, rel=1e-2)
    assert nonfinite(model, optimizer) == []


def test_magnitude_bound_is_not_broken_by_an_overflowing_formula(watch, drive, given):
    """fairscale#263: an fp16 norm of 2400 reads as inf in some formulas; a bound of 5000 still holds."""
    model = Chosen(torch.float16, w=64)
    sentinel = watch(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        NanCallback(),
        MagnitudeCallback(max_global_norm=5000.0, max_parameter_norm=5000.0, max_value=400.0, action="skip"),
    )
    gradient = torch.full((64,), 300.0, dtype=torch.float16)
    assert drive(sentinel, [0], lambda _: given(model, {"w": gradient})) == ["continue"]
    assert sentinel.incidents == ()


def test_healthy_clipping_is_that_of_torch(watch, drive):
    """The fix for overflowed norms must not touch ordinary steps: bit-identical to clip_grad_norm_."""

    def train(clip):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        clip(model, optimizer, [torch.randn(8, 4) for _ in range(5)])
        return [p.detach().clone() for p in model.parameters()]

    def plain(model, optimizer, batches):
        for x in batches:
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    def watched(model, optimizer, batches):
        drive(watch(model, optimizer), batches, lambda x: model(x).pow(2).mean(), max_norm=0.1)

    assert all(torch.equal(a, b) for a, b in zip(train(plain), train(watched), strict=True))
