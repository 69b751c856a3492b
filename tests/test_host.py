"""The plain loop as the sentinel sees it: names, late parameters, several optimizers, what is refused."""

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau, StepLR

from gradsentinel import BeforeClip, ConfigurationError, IncidentEvent, Kind, NanCallback, Sentinel
from gradsentinel.host import TorchHost
from loops import Net, differences, fingerprint, make_batches

NAN = float("nan")


def names_of(host):
    return [name for name, _ in host.named_parameters()]


def sgd(*modules):
    return SGD([p for module in modules for p in module.parameters()], lr=0.1)


# -- names -----------------------------------------------------------------------------------------


def test_one_module_needs_no_prefix():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    assert names_of(TorchHost(model, sgd(model))) == ["0.weight", "0.bias", "1.weight"]
    assert names_of(TorchHost([model], sgd(model))) == ["0.weight", "0.bias", "1.weight"]


def test_several_modules_get_one():
    one, two = nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)
    assert names_of(TorchHost([one, two], sgd(one, two))) == ["0.weight", "1.weight"]
    named = {"generator": one, "critic": two}
    assert names_of(TorchHost(named, sgd(one, two))) == ["generator.weight", "critic.weight"]


def test_a_compiled_module_has_the_names_of_the_user():
    model = nn.Linear(2, 1)
    assert names_of(TorchHost(torch.compile(model, backend="eager"), sgd(model))) == ["weight", "bias"]


def test_tied_parameters_have_the_name_that_comes_first():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    host = TorchHost(model, sgd(model))
    assert names_of(host) == ["0.weight"]
    assert host.name_of(model[1].weight) == "0.weight"


def test_parameters_that_only_an_optimizer_knows_have_names_too():
    model, temperature, other = (
        nn.Linear(2, 1, bias=False),
        nn.Parameter(torch.ones(())),
        nn.Parameter(torch.ones(1)),
    )
    first = SGD([*model.parameters(), temperature], lr=0.1)
    second = SGD([{"params": [model.weight]}, {"params": [other]}], lr=0.1)
    host = TorchHost(model, [first, second])
    assert names_of(host) == ["weight", "optimizer0.group0.1", "optimizer1.group1.0"]
    with pytest.raises(KeyError):
        host.name_of(nn.Parameter(torch.ones(1)))


def test_a_parameter_outside_the_model_is_watched(run_dir):
    model, temperature = nn.Linear(2, 1), nn.Parameter(torch.ones(()))
    optimizer = SGD([*model.parameters(), temperature], lr=0.1)
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir) as sentinel:
        for step, x in enumerate(sentinel.steps([torch.ones(2)] * 3)):
            handle = temperature.register_hook(lambda g, step=step: g * NAN if step == 1 else g)
            sentinel.backward((model(x) * temperature).sum())
            sentinel.step()
            handle.remove()
    (incident,) = sentinel.incidents
    assert incident.step == 1
    assert [tensor.name for tensor in incident.tensors] == ["optimizer0.group0.2"]


# -- parameters that come later --------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a low-rank correction, as LoRA adds it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, layer.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("bad", ["layer.down", "layer.up"])
def test_an_adapter_that_is_added_during_the_run_is_watched(bad, run_dir):
    torch.manual_seed(0)
    model = nn.Module()
    model.layer, model.head = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = AdamW(model.head.parameters(), lr=0.01)
    seen = []
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir) as sentinel:
        sentinel.on(BeforeClip, lambda event: seen.append(event.gradients.names))
        for step, x in enumerate(sentinel.steps([torch.randn(3, 4) for _ in range(8)])):
            if step == 3:
                model.layer = Adapted(model.layer)
                optimizer.add_param_group({"params": [model.layer.down, model.layer.up], "lr": 0.1})
            if step == 5:
                handle = model.get_parameter(bad).register_hook(lambda g: torch.full_like(g, NAN))
                before = [p.detach().clone() for p in model.parameters()]
            sentinel.backward(model.head(model.layer(x)).pow(2).mean())
            sentinel.step(max_norm=1.0)
            if step == 5:
                handle.remove()
                assert differences([p.detach() for p in model.parameters()], before) == []
    assert {"layer.down", "layer.up"} <= set(seen[3])
    (incident,) = sentinel.incidents
    assert (incident.step, incident.kind) == (5, Kind.NONFINITE_GRADIENT)
    assert [tensor.name for tensor in incident.tensors] == [bad]


def test_frozen_parameters_and_those_without_a_gradient_are_left_out():
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(4)])
    model[1].requires_grad_(False)
    host = TorchHost(model, sgd(model))
    for index in (0, 3):
        model[index].weight.grad = torch.full((2, 2), 1.0 + index)
    view = host.gradients()
    assert view.names == ("0.weight", "3.weight")
    assert view.norms.tolist() == [2.0, 8.0]
    assert host.gradients().names is view.names  # what a step notes of them is held once
    model[2].weight.grad = torch.zeros(2, 2)
    model[0].weight.grad = None
    assert host.gradients().names == ("2.weight", "3.weight")


def test_a_gradient_that_is_kept_elsewhere_counts():
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(3)])
    host = TorchHost(model, sgd(model))
    model[0].weight.grad = torch.ones(2, 2)
    model[2].weight.main_grad = torch.full((2, 2), 2.0)
    view = host.gradients()
    assert view.names == ("0.weight", "2.weight")
    assert view.norms.tolist() == [2.0, 4.0]


def test_optimizers_that_take_turns_may_get_further_parameters():
    one, two = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    first, second = sgd(one), sgd(two)
    host = TorchHost([one, two], [first, second])
    one.weight.grad, two.weight.grad = torch.ones(1, 2), torch.ones(1, 2)
    assert host.gradients([second]).names == ("1.weight",)
    late = nn.Parameter(torch.ones(1))
    late.grad = torch.ones(1)
    second.add_param_group({"params": [late]})
    assert host.gradients([second]).names == ("1.weight", "optimizer1.group1.0")
    assert host.gradients([first]).names == ("0.weight",)


def test_a_parameter_may_leave_again():
    model = nn.Linear(2, 1)
    extra = nn.Parameter(torch.ones(1))
    optimizer = SGD(model.parameters(), lr=0.1)
    host = TorchHost(model, optimizer)
    optimizer.add_param_group({"params": [extra]})
    assert names_of(host) == ["weight", "bias", "optimizer0.group1.0"]
    assert host.name_of(extra) == "optimizer0.group1.0"
    optimizer.param_groups.pop()
    assert names_of(host) == ["weight", "bias"]


# -- two optimizers --------------------------------------------------------------------------------


class Gan:
    """A generator and a critic that take turns, each with its own optimizer and scheduler."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.critic = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        self.of_generator = AdamW(self.generator.parameters(), lr=0.01)
        self.of_critic = AdamW(self.critic.parameters(), lr=0.02)
        self.schedulers = [StepLR(self.of_generator, 2), StepLR(self.of_critic, 3)]

    @property
    def optimizers(self):
        return [self.of_generator, self.of_critic]

    def critic_loss(self, real, noise):
        return self.critic(self.generator(noise).detach()).mean() - self.critic(real).mean()

    def generator_loss(self, noise):
        return -self.critic(self.generator(noise)).mean()

    def state(self):
        return {
            "models": [model.state_dict() for model in (self.generator, self.critic)],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def watch(self, run_dir):
        return Sentinel(
            {"generator": self.generator, "critic": self.critic},
            self.optimizers,
            callbacks=[NanCallback()],
            scheduler=self.schedulers,
            run_dir=run_dir,
        )


def gan_batches(count=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 5, generator=generator).split([3, 2], dim=1) for _ in range(count)]


def train_gan_by_hand(gan, batches, *, without_critic=(), without_generator=()):
    for number, (real, noise) in enumerate(batches):
        for loss, optimizer, scheduler, left_out in (
            (lambda: gan.critic_loss(real, noise), gan.of_critic, gan.schedulers[1], without_critic),  # noqa: B023
            (lambda: gan.generator_loss(noise), gan.of_generator, gan.schedulers[0], without_generator),  # noqa: B023
        ):
            gan.of_generator.zero_grad()
            gan.of_critic.zero_grad()
            if number in left_out:
                continue
            loss().backward()
            own = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(own, 0.5)
            optimizer.step()
            scheduler.step()


def train_gan_watched(gan, sentinel, batches, *, bad_critic=(), bad_generator=()):
    for number, (real, noise) in enumerate(sentinel.steps(batches)):
        for loss, optimizer, bad in (
            (lambda: gan.critic_loss(real, noise), gan.of_critic, bad_critic),  # noqa: B023
            (lambda: gan.generator_loss(noise), gan.of_generator, bad_generator),  # noqa: B023
        ):
            gan.of_generator.zero_grad()
            gan.of_critic.zero_grad()
            sentinel.backward(loss() * (NAN if number in bad else 1))
            sentinel.step(max_norm=0.5, optimizer=optimizer)


@pytest.mark.parametrize(("critic", "generator"), [((), ()), ((2,), ()), ((), (3,)), ((1, 4), (4,))], ids=str)
def test_two_that_take_turns(critic, generator, run_dir):
    """Each step clips, steps, schedules and drops its own optimizer's parameters only."""
    reference, gan = Gan(), Gan()
    train_gan_by_hand(reference, gan_batches(), without_critic=critic, without_generator=generator)
    held = []
    with gan.watch(run_dir) as sentinel:
        sentinel.on(IncidentEvent, lambda event: held.append([m.batch for m in event.scene["microbatches"]]))
        train_gan_watched(gan, sentinel, gan_batches(), bad_critic=critic, bad_generator=generator)
    assert differences(gan.state(), reference.state()) == []
    assert len(sentinel.incidents) == len(critic) + len(generator)
    bad = sorted([*critic, *generator])
    assert differences(held, [[gan_batches()[number]] for number in bad]) == []  # also at the second step
    assert sentinel.applied_steps == 12 - len(sentinel.incidents)


def test_dropping_for_one_leaves_the_gradients_of_the_other():
    gan = Gan()
    host = TorchHost({"generator": gan.generator, "critic": gan.critic}, gan.optimizers)
    gan.generator_loss(torch.ones(4, 2)).backward()
    host.drop([gan.of_generator])
    assert all(p.grad is None for p in gan.generator.parameters())
    assert all(p.grad is not None for p in gan.critic.parameters())
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert host.gradients([gan.of_critic]).names == tuple(f"critic.{name}" for name in names)
    assert host.gradients([gan.of_generator]).names == ()


def fingerprints(states):
    return [fingerprint(state) for state in states]


def test_a_stranger_is_refused(run_dir):
    gan = Gan()
    with gan.watch(run_dir) as sentinel:
        stranger = sgd(nn.Linear(1, 1))
        with pytest.raises(ConfigurationError, match="given at construction"):
            sentinel.step(optimizer=stranger)


def test_the_other_optimizer_may_join_in(run_dir):
    gan = Gan()
    with gan.watch(run_dir) as sentinel:
        sentinel.backward(gan.generator_loss(torch.randn(4, 2)))
        before = gan.state()["optimizers"]
        sentinel.step(optimizer=[gan.of_critic, gan.of_generator])
        after = gan.state()["optimizers"]
        assert all(a != b for a, b in zip(fingerprints(before), fingerprints(after), strict=True))


# -- with a scaler ---------------------------------------------------------------------------------


def test_the_gradients_are_judged_and_clipped_unscaled(run_dir):
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = []
    with Sentinel(
        model, SGD(model.parameters(), lr=1.0), scaler=scaler, callbacks=[NanCallback()], run_dir=run_dir
    ) as sentinel:
        sentinel.on(
            BeforeClip,
            lambda event: seen.append((float(event.gradients.total_norm), float(event.loss_scale))),
        )
        sentinel.backward(model(torch.tensor([3.0, 4.0])).sum())
        norm = sentinel.step(max_norm=1.0)
    assert seen == [(5.0, 1024.0)]
    assert float(norm) == 5.0
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[-0.6, -0.8]]))


def test_a_loop_may_unscale_itself(run_dir):
    """As it does to clip by value; unscaling twice would be an error of torch."""
    model = Net()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with Sentinel(model, optimizer, scaler=scaler, callbacks=[NanCallback()], run_dir=run_dir) as sentinel:
        for batch in sentinel.steps(make_batches(3)):
            sentinel.backward(nn.functional.cross_entropy(model(batch["x"]), batch["y"]))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            sentinel.step()
    assert sentinel.applied_steps == 3


def test_a_disabled_scaler_is_none():
    model = nn.Linear(1, 1)
    host = TorchHost(model, sgd(model), scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert host.scaler is None
    assert "scaler" not in host.stateful()


# -- what is refused -------------------------------------------------------------------------------


def refused(message, model=None, optimizer=None, **settings):
    model = model or nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match=message):
        TorchHost(model, sgd(model) if optimizer is None else optimizer, **settings)


def test_no_module():
    refused("str is not a torch.nn.Module", model="model", optimizer=sgd(nn.Linear(1, 1)))
    refused("int is not a torch.nn.Module", model=[nn.Linear(1, 1), 3], optimizer=sgd(nn.Linear(1, 1)))


def test_no_optimizer():
    refused("at least one optimizer", optimizer=[])
    refused("dict is not a torch.optim.Optimizer", optimizer={})


def test_the_same_optimizer_twice():
    model = nn.Linear(1, 1)
    optimizer = sgd(model)
    with pytest.raises(ConfigurationError, match="given twice"):
        TorchHost(model, [optimizer, optimizer])


def test_the_same_optimizer_twice_in_a_step(run_dir):
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    first, second = sgd(one), sgd(two)
    with Sentinel([one, two], [first, second], run_dir=run_dir) as sentinel:
        sentinel.backward((one(torch.ones(1)) + two(torch.ones(1))).sum())
        with pytest.raises(ConfigurationError, match="same optimizer twice"):
            sentinel.step(optimizer=[first, first])


def test_nothing_to_watch():
    model = nn.ReLU()
    optimizer = sgd(nn.Linear(1, 1))
    optimizer.param_groups[0]["params"].clear()
    refused("nothing to watch", model=model, optimizer=optimizer)


def test_an_optimizer_that_needs_a_closure():
    model = nn.Linear(2, 1)
    refused("LBFGS.step needs a closure", model=model, optimizer=LBFGS(model.parameters()))


def test_a_scheduler_that_steps_on_a_metric():
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    plateau = ReduceLROnPlateau(optimizer)
    refused("ReduceLROnPlateau steps on a metric", model=model, optimizer=optimizer, scheduler=plateau)
    assert "extra.plateau" in TorchHost(model, optimizer, extra={"plateau": plateau}).stateful()


def test_a_scheduler_of_another_optimizer():
    refused(
        "ConstantLR belongs to an optimizer that was not given", scheduler=ConstantLR(sgd(nn.Linear(1, 1)))
    )


def test_an_extra_without_a_state():
    refused(r"extra 'counter' \(list\) needs state_dict and load_state_dict", extra={"counter": []})


@pytest.mark.parametrize("loss", [torch.ones(2, requires_grad=True), 3.0, None])
def test_a_loss_that_is_no_scalar(loss, run_dir):
    model = nn.Linear(2, 1)
    with Sentinel(model, sgd(model), run_dir=run_dir) as sentinel:
        with pytest.raises(ConfigurationError, match="needs a scalar loss"):
            sentinel.backward(loss)
        with pytest.raises(ConfigurationError, match="needs no gradient"):
            sentinel.backward(torch.tensor(1.0))


def test_an_average_that_cannot_be_updated(run_dir):
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match=r"ema \(list\) needs update_parameters"):
        Sentinel(model, sgd(model), ema=[], run_dir=run_dir)


@pytest.mark.parametrize("accumulate", [0, -1])
def test_a_window_of_nothing(accumulate, run_dir):
    model = nn.Linear(2, 1)
    with (
        Sentinel(model, sgd(model), run_dir=run_dir) as sentinel,
        pytest.raises(ConfigurationError, match=f"accumulate={accumulate}"),
    ):
        sentinel.steps([], accumulate=accumulate)
