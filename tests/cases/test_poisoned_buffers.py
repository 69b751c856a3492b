"""State that the forward pass writes: running statistics, spectral norms, running minima, masks."""

import pytest
import torch
from torch import nn

from gradsentinel import NanCallback, Rollback, TrainingAborted


def squared(model):
    return lambda x: model(x).pow(2).mean()


def poisoned(steps, at, value=torch.inf, shape=(8, 4)):
    batches = [torch.randn(shape) for _ in range(steps)]
    batches[at][3, 2] = value
    return batches


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_running_statistics_of_a_bad_batch(value, watch, drive, told, nonfinite):
    """pytorch#88474, #1206: the step is skipped, but BatchNorm had updated its statistics in forward.

    Training goes on with a good loss; only evaluation shows that they are NaN for ever.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = watch(model, optimizer)
    actions = drive(sentinel, poisoned(4, 1, value), squared(model))
    assert actions == ["continue", "skip", "continue", "continue"]
    assert [step for step, _, _ in told(sentinel)] == [1]
    assert nonfinite(model, optimizer) == []
    assert model[1].num_batches_tracked.item() == 3  # as if the bad batch had never been seen
    model.eval()
    assert model(torch.randn(2, 4)).isfinite().all()


class Observed(nn.Module):
    """Statistics of the raw input in a branch that the loss does not depend on."""

    def __init__(self, observer: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.observer = observer
        self.lin = nn.Linear(width, 1)

    def forward(self, x):
        with torch.no_grad():
            self.observer(x)
        return self.lin(torch.nan_to_num(x, 0.0, 0.0, 0.0))


class RunningMinimum(nn.Module):
    """Starts at inf, as min-max observers of quantisation do."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.register_buffer("least", torch.full((width,), torch.inf))

    def forward(self, x):
        self.least = torch.minimum(self.least, x.amin(0))


OBSERVERS = {"batch norm": nn.BatchNorm1d, "running minimum": RunningMinimum}
WIDE = 1 << 15
"""So large a buffer is not looked at in every step."""


@pytest.mark.parametrize("observer", OBSERVERS)
def test_buffer_poisoned_while_loss_and_gradients_are_fine(observer, watch, drive, told, named, nonfinite):
    """pytorch#88474 without any other sign: nothing but the state itself shows it.

    The look at the buffers before the step finds it; they are put back, and the step is dropped.
    """
    model = Observed(OBSERVERS[observer](4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = watch(model, optimizer, NanCallback(), Rollback(every=1, confirm_after=0))
    drive(sentinel, poisoned(5, 3, torch.nan), squared(model))
    assert told(sentinel) == [(3, "nonfinite_state", "skipped")]
    assert named(sentinel.incidents[0]) <= {"observer.running_mean", "observer.running_var", "observer.least"}
    assert nonfinite(model, optimizer) == []
    assert (sentinel.step_count, sentinel.applied_steps) == (5, 4)  # of five batches one was lost


@pytest.mark.parametrize("observer", OBSERVERS)
def test_buffer_poisoned_and_no_snapshot_is_needed(observer, watch, drive, told, nonfinite):
    """The same without Rollback: what the buffers were before the step is remembered anyway."""
    model = Observed(OBSERVERS[observer](4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = watch(model, optimizer)
    drive(sentinel, poisoned(5, 3, torch.nan), squared(model))
    assert told(sentinel) == [(3, "nonfinite_state", "skipped")]
    assert nonfinite(model, optimizer) == []


@pytest.mark.parametrize("observer", OBSERVERS)
def test_buffer_poisoned_long_ago_and_nowhere_to_go_back_to(observer, watch, drive, told, nonfinite):
    """Found some steps later, without Rollback: the run stops, and says which buffer."""
    model = Observed(OBSERVERS[observer](WIDE), WIDE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    sentinel = watch(model, optimizer, NanCallback(state_warmup=2, state_every=5))
    with pytest.raises(TrainingAborted, match="observer"):
        drive(sentinel, poisoned(14, 6, torch.nan, (8, WIDE)), squared(model))
    assert told(sentinel)[-1][1:] == ("nonfinite_state", "aborted")


def test_buffer_poisoned_between_two_checks(watch, drive, told, nonfinite):
    """Later in the run the state is looked at every so many steps: found at the next check, at the latest."""
    model = Observed(nn.BatchNorm1d(WIDE), WIDE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    callbacks = NanCallback(state_warmup=2, state_every=5), Rollback(every=3, confirm_after=0)
    sentinel = watch(model, optimizer, *callbacks)
    drive(sentinel, poisoned(14, 6, shape=(8, WIDE)), squared(model))
    assert told(sentinel) == [(8, "nonfinite_state", "rolled_back")]
    assert "to step 6" in sentinel.incidents[0].recovery  # no snapshot can be taken at step 8
    assert nonfinite(model, optimizer) == []


def test_small_statistics_are_looked_at_in_every_step(watch, drive, told, nonfinite):
    """Between two looks at the state, too: found before the update, and nothing but the batch is lost."""
    model = Observed(nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = watch(model, optimizer, NanCallback(state_warmup=2, state_every=5))
    drive(sentinel, poisoned(14, 6), squared(model))
    assert told(sentinel) == [(6, "nonfinite_state", "skipped")]
    assert nonfinite(model, optimizer) == []


def test_poisoned_statistics_make_a_later_loss_nan(watch, drive, told, named, nonfinite):
    """A frozen BatchNorm uses statistics that an earlier batch poisoned: the batch at hand is innocent.

    Dropping it would never help; the incident must name the buffer and go back.
    """

    class Frozen(Observed):
        def forward(self, x):
            self.observer.train()
            clean = super().forward(x)
            self.observer.eval()
            return clean + self.observer(torch.zeros(1, WIDE)).mean() * self.late

    model = Frozen(nn.BatchNorm1d(WIDE), WIDE)
    model.late = 0  # 0 * NaN would show at once, so the branch is left out until later
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    callbacks = NanCallback(state_warmup=0, state_every=0), Rollback(every=100)
    sentinel = watch(model, optimizer, *callbacks)

    def loss_of(batch):
        step, x = batch
        model.observer.train()
        out = Observed.forward(model, x)
        if step >= 4:
            model.observer.eval()
            out = out + model.observer(torch.zeros(1, WIDE)).mean()
        return out.pow(2).mean()

    assert drive(sentinel, enumerate(poisoned(8, 2, shape=(8, WIDE))), loss_of)[4] == "rollback"
    assert told(sentinel) == [(4, "nonfinite_state", "rolled_back")]
    assert named(sentinel.incidents[0]) == {"observer.running_mean", "observer.running_var"}
    assert nonfinite(model, optimizer) == []


def test_half_precision_running_variance_overflows(watch, drive, told, named, nonfinite):
    """A BatchNorm converted by .half(): activations of 300 are fine, their variance of 1e5 is not.

    In training the batch's own statistics are used, so the loss stays finite.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sentinel = watch(model, optimizer, NanCallback(), Rollback(every=1, confirm_after=0))
    batches = [torch.randn(8, 4).half() for _ in range(4)]
    batches[2] = batches[2] * 5000

    def loss_of(x):
        loss = model(x).float().pow(2).mean()
        assert loss.isfinite()
        return loss

    drive(sentinel, batches, loss_of)
    assert told(sentinel) == [(2, "nonfinite_state", "skipped")]
    assert "1.running_var" in named(sentinel.incidents[0])
    assert nonfinite(model, optimizer) == []


def test_bad_from_the_very_first_batch_in_a_loop_of_ones_own(watch, told, nonfinite):
    """Without sentinel.steps the run is first heard of after a forward pass, and that may be the bad one.

    What a rollback restores then must still be the statistics from before it.
    """
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = watch(model, optimizer, NanCallback(), Rollback(after=3))
    for step in range(6):
        x = torch.randn(8, 4)
        if step < 3:
            x[0] = torch.nan
        sentinel.backward(squared(model)(x))
        sentinel.step()
    assert told(sentinel) == [
        (0, "nonfinite_loss", "skipped"),
        (1, "nonfinite_loss", "skipped"),
        (2, "nonfinite_loss", "rolled_back"),
    ]
    assert model[0].num_batches_tracked.item() == 3
    assert nonfinite(model, optimizer) == []


def test_nan_in_a_buffer_at_the_start(watch, drive, told, nonfinite):
    """A buffer that was never filled: told by name before any training; does it matter? The user knows."""
    model = nn.Linear(4, 1)
    model.register_buffer("scale", torch.full((3,), torch.nan))
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert told(sentinel) == [(0, "nonfinite_state", "reported")]
    assert "'scale'" in sentinel.incidents[0].message
    assert drive(sentinel, poisoned(3, 1), squared(model)) == ["continue", "skip", "continue"]


@pytest.mark.parametrize("callbacks", [(NanCallback(),), (NanCallback(), Rollback(every=1, confirm_after=0))])
def test_masks_of_minus_infinity_in_buffers(callbacks, watch, drive, nonfinite):
    """returnn#1446: a causal mask of -inf is part of the model, in snapshots and rollbacks too."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1), persistent=False)

        def forward(self, x):
            h = self.lin(x)
            return torch.softmax(h @ h.T + self.mask, -1) @ h

    model = Masked()
    optimizer = torch.optim.AdamW(model.parameters())
    sentinel = watch(model, optimizer, *callbacks)
    assert drive(sentinel, [torch.randn(8, 4) for _ in range(4)], squared(model)) == ["continue"] * 4
    assert sentinel.incidents == ()
    if len(callbacks) > 1:
        assert callbacks[1].known_good_steps == (2, 3, 4)
    assert nonfinite(model, optimizer) == ["0:mask"]


def test_running_minimum_that_starts_at_infinity(watch, drive, nonfinite):
    """An observer's buffer is inf until the first batch: no incident, neither before nor after."""
    model = Observed(RunningMinimum())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = watch(model, optimizer, NanCallback(), Rollback(every=1, confirm_after=0))
    assert drive(sentinel, [torch.randn(8, 4) for _ in range(3)], squared(model)) == ["continue"] * 3
    assert sentinel.incidents == ()
    assert nonfinite(model, optimizer) == []


@pytest.mark.parametrize("shape", [(4,), (600, 600)], ids=["small", "large"])
@pytest.mark.parametrize("how", ["in place", "through .data", "replaced"])
def test_teacher_kept_in_buffers(how, shape, watch, drive, nonfinite):
    """A momentum teacher in buffers is written by the forward pass, whichever way, however large it is."""

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 1)
            self.register_buffer("teacher", torch.zeros(shape))

        def forward(self, x):
            target = x.mean().detach()
            if how == "in place":
                self.teacher.lerp_(target.expand(shape), 0.5)
            elif how == "through .data":
                self.teacher.data.mul_(0.5).add_(target * 0.5)
            else:
                self.teacher = self.teacher * 0.5 + target * 0.5
            return self.lin(x) - self.teacher.flatten()[0]

    model = Student()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = watch(model, optimizer)
    actions = drive(sentinel, poisoned(4, 1, torch.nan), squared(model))
    assert actions == ["continue", "skip", "continue", "continue"]
    assert nonfinite(model, optimizer) == []


def test_spectral_norm_keeps_its_vectors(watch, drive, nonfinite):
    """Power iteration writes its vectors in every forward pass; a dropped step puts them back."""
    lin = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU(), lin)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = watch(model, optimizer)
    actions = drive(sentinel, poisoned(4, 1, torch.nan), squared(model))
    assert actions == ["continue", "skip", "continue", "continue"]
    assert nonfinite(model, optimizer) == []


def test_a_buffer_that_is_registered_in_the_run_is_looked_after_from_the_next_look_on(watch, drive, told):
    model = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sentinel = watch(model, optimizer, NanCallback(state_every=5))

    def loss(x):
        out = model(x)
        if hasattr(model, "total"):
            model.total += x.sum()
        elif sentinel.step_count >= 12:
            model.register_buffer("total", torch.zeros(()))
        return torch.nan_to_num(out).pow(2).mean()

    batches = [torch.randn(8, 4) for _ in range(24)]
    batches[20][3, 2] = torch.nan
    drive(sentinel, batches, loss)
    assert [step for step, *_ in told(sentinel)] == [20]
    assert torch.isfinite(model.total)
