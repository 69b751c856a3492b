"""What is kept of the buckets' gradients from before the reduction: numbers at once, names when asked."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel import gradients
from gradsentinel.gradients import GradientView
from gradsentinel.integrations.megatron.gradients import BucketGradients

NAN = float("nan")


def view(**values: list[float]) -> GradientView:
    return GradientView([(name, torch.tensor(value)) for name, value in values.items()])


def test_bad_gradients_are_named_over_all_buckets():
    local = BucketGradients()
    local.begin_step()
    local.record(view(a=[1.0, -3.0], b=[NAN, 1.0]))
    local.record(view(c=[4.0], d=[-float("inf")]))
    assert [peaks.tolist()[0] for peaks in local.peaks()] == [3.0, 4.0]
    assert local.bad_places() == (None, ("b", "d"))
    assert local.bad_places() == (None, ("b", "d"))  # as often as somebody asks


def test_the_norm_is_that_of_all_buckets_and_a_new_step_knows_nothing_of_the_last():
    local = BucketGradients()
    local.begin_step()
    assert local.norm() is None
    local.record(view(a=[3.0]))
    local.record(view(b=[-4.0]))
    assert math.isclose(float(local.norm()), 5.0)
    local.begin_step()
    assert local.norm() is None
    assert local.peaks() == []
    assert local.bad_places() == (None, ())


def test_a_step_that_is_run_again_is_not_recorded():
    local = BucketGradients()
    local.begin_step()
    local.record(view(a=[1.0]))
    with local.suspended():
        local.record(view(a=[NAN]))
    assert local.bad_places() == (None, ())


def test_what_was_overwritten_since_is_remembered_as_it_was():
    """The reduction adds up in place, in the flat buffer itself."""
    gradient = torch.tensor([NAN, 1.0])
    local = BucketGradients()
    local.begin_step()
    local.record(GradientView([("a", gradient)]))
    gradient.zero_()
    assert local.bad_places() == (None, ("a",))


class Operators(TorchDispatchMode):
    """Counts those that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.by_name[func.overloadpacket.__name__] += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("parameters", [3, 400])
def test_a_bucket_group_takes_two_operators_however_many_parameters_are_in_it(monkeypatch, parameters):
    """On a device with list kernels, which this CPU stands for: its own are as many as the parameters."""
    plain = gradients.one_group

    def on_a_device(tensors, _device):
        return replace(plain(tensors, _device), device=torch.device("cuda"), fused=True)

    monkeypatch.setattr(gradients, "one_group", on_a_device)
    flat = torch.arange(16.0 * parameters)
    named = [(f"p{number}", flat[16 * number :][:16].view(4, 4)) for number in range(parameters)]
    local = BucketGradients()
    local.begin_step()
    with Operators() as counted:
        local.record(GradientView(named))
    assert +counted.by_name == {"_foreach_norm": 1, "stack": 1}
    assert local.peaks()[0].tolist() == [16.0 * number + 15.0 for number in range(parameters)]
