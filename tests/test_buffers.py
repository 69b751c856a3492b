"""The copy of the buffers from before the step."""

import pytest
import torch
from torch import nn

from gradsentinel import NanCallback, Rollback, Sentinel
from gradsentinel.state.buffers import _SMALL, _TRIAL_STEPS, BufferShadow

LARGE = _SMALL // 4 + 1  # elements of float32


class Holder(nn.Module):
    def __init__(self, **buffers) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def shadow_of(module, prefix=""):
    shadow = BufferShadow([(prefix, module)])
    shadow.capture()
    return shadow


def test_batch_norm_is_put_back():
    """It writes its statistics without raising their version."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    shadow = shadow_of(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.full((5, 3), float("nan")))
    assert not torch.isfinite(model[1].running_mean).any()
    assert int(model[1].num_batches_tracked) == 1
    shadow.restore()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


@pytest.mark.parametrize(
    "write",
    [
        lambda buffer: buffer.add_(1),
        lambda buffer: buffer.data.add_(1),
        lambda buffer: buffer.detach().numpy().__iadd__(1),
    ],
    ids=["in place", "through .data", "through NumPy"],
)
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_small_buffer_is_put_back_however_it_was_written(write, step):
    holder = Holder(count=torch.arange(4.0))
    shadow = shadow_of(holder)
    for _ in range(step):
        write(holder.count)
        shadow.capture()
    expected = holder.count.clone()
    write(holder.count)
    shadow.restore()
    assert torch.equal(holder.count, expected)
    assert torch.equal(expected, torch.arange(4.0) + step)


def test_a_large_buffer_is_copied_when_it_changed_only():
    holder = Holder(mask=torch.zeros(LARGE))
    shadow = shadow_of(holder)
    (kept,) = shadow._kept.values()
    for _ in range(_TRIAL_STEPS + 2):
        shadow.capture()
    written = kept.copy._version
    shadow.capture()
    assert kept.copy._version == written, "nothing changed, so nothing was copied"
    holder.mask.add_(1)
    shadow.capture()
    holder.mask.add_(1)
    shadow.restore()
    assert float(holder.mask[0]) == 1.0


def test_a_large_buffer_that_is_written_silently_in_the_first_steps_is_copied_from_then_on():
    holder = Holder(mean=torch.zeros(LARGE))
    shadow = shadow_of(holder)
    for step in range(1, 10):
        holder.mean.data.fill_(step)
        shadow.capture()
    holder.mean.data.fill_(99)
    shadow.restore()
    assert float(holder.mean[0]) == 9.0


def test_the_object_stays_the_same():
    """Others may hold a reference to it."""
    holder = Holder(count=torch.zeros(2))
    buffer, shadow = holder.count, shadow_of(holder)
    holder.count = torch.full((2,), 7.0)  # assigned by the forward pass instead of written to
    shadow.restore()
    assert holder.count is buffer
    assert torch.equal(buffer, torch.zeros(2))


def test_a_replaced_buffer_is_followed():
    holder = Holder(count=torch.zeros(2))
    shadow = shadow_of(holder)
    holder.count = torch.ones(3, dtype=torch.float64)
    shadow.capture()
    holder.count.add_(1)
    shadow.restore()
    assert torch.equal(holder.count, torch.ones(3, dtype=torch.float64))


def test_names_are_full_and_shared_modules_count_once():
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.Sequential(norm))
    names = ["running_mean", "running_var", "num_batches_tracked"]
    assert [name for name, _ in BufferShadow([("", model)]).named()] == [f"0.{name}" for name in names]
    prefixed = BufferShadow([("net", model), ("other", norm)])
    assert [name for name, _ in prefixed.named()] == [f"net.0.{name}" for name in names]


def test_buffers_that_are_not_persistent_or_not_there():
    holder = Holder(kept=torch.zeros(1), absent=None)
    holder.register_buffer("scratch", torch.zeros(1), persistent=False)
    shadow = shadow_of(holder)
    assert [name for name, _ in shadow.named()] == ["kept", "scratch"]
    holder.scratch.add_(1)
    holder.absent = torch.ones(1)
    shadow.restore()
    assert float(holder.scratch) == 0.0
    assert holder.absent is None  # the forward pass that is taken back had filled it
    assert [name for name, _ in shadow.named()] == ["kept", "scratch"]


def sparse_identity(size):
    indices = torch.arange(size).repeat(2, 1)
    return torch.sparse_coo_tensor(indices, torch.ones(size), (size, size), check_invariants=True)


ODD = {
    "expanded": lambda: torch.ones(1).expand(8),
    "expanded as for positions": lambda: torch.arange(5).expand(1, -1),
    "sparse": lambda: sparse_identity(4),
    "large sparse": lambda: sparse_identity(2000),
    "conjugated": lambda: torch.tensor([1 + 2j, 3j]).conj(),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "0-dim": lambda: torch.tensor(3),
    "empty": lambda: torch.zeros(0, 3),
    "meta": lambda: torch.ones(2, device="meta"),
    "large": lambda: torch.zeros(LARGE),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_a_model_with_an_odd_buffer_can_be_watched_dropped_and_rolled_back(make, run_dir):
    model = nn.Sequential(nn.Linear(2, 1), Holder(odd=make()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callbacks = [NanCallback(), Rollback(every=1, confirm_after=0, after=2)]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir) as sentinel:
        for step, x in enumerate(sentinel.steps([torch.ones(2)] * 8)):
            sentinel.backward(model[0](x).sum() * (float("nan") if step in {2, 3, 6} else 1))
            sentinel.step()
    assert [str(incident.outcome) for incident in sentinel.incidents] == ["skipped", "rolled_back", "skipped"]
    odd, expected = model[1].odd, make()
    assert (odd.shape, odd.dtype, odd.layout) == (expected.shape, expected.dtype, expected.layout)
    if odd.device.type != "meta":
        dense = [t.to_dense() if t.is_sparse else t for t in (odd, expected)]
        assert torch.equal(*[t.float() if t.dtype.itemsize == 1 else t for t in dense])
