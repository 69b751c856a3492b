"""A loss scale that itself makes the gradients non-finite."""

import math
from types import SimpleNamespace

import pytest
import torch

from gradsentinel.diagnosis.diagnose import _collapsed_scale


def run_with(scale):
    return SimpleNamespace(host=SimpleNamespace(scaler=SimpleNamespace(_scale=scale)))


@pytest.mark.parametrize("scale", [None, 1.0, 65536.0, torch.tensor(2.0**-126), torch.tensor([2.0])])
def test_a_scale_that_has_an_inverse_explains_nothing(scale):
    assert _collapsed_scale(run_with(scale)) is None


@pytest.mark.parametrize("scale", [0.0, torch.tensor(0.0), torch.tensor(2.0**-149)])
def test_a_scale_next_to_zero_has_an_infinite_inverse(scale):
    found = _collapsed_scale(run_with(scale))
    assert found.cause == "precision"
    assert found.evidence[0].startswith(
        f"the loss scale is {float(scale):g}: gradients are multiplied by its"
    )


@pytest.mark.parametrize("scale", [math.nan, torch.tensor(math.inf)])
def test_of_a_scale_that_is_not_finite_no_inverse_is_spoken(scale):
    found = _collapsed_scale(run_with(scale))
    assert found.evidence == (f"the loss scale itself is {float(scale):g}: the loss is multiplied by it",)


class Float32Only(torch.Tensor):
    """As on a device without float64."""

    def double(self):
        raise TypeError("no float64 here")


def test_a_device_without_float64_can_tell_too():
    scale = torch.zeros(()).as_subclass(Float32Only)
    assert _collapsed_scale(run_with(scale)).cause == "precision"
