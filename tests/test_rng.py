"""Random number generators: captured, restored, stored."""

import dataclasses
import json
import random
import subprocess
import sys
import timeit

import numpy as np
import pytest
import torch

from gradsentinel.state import rng
from gradsentinel.state.rng import RngState, preserved_rng
from gradsentinel.state.tree import flatten, unflatten


def draw():
    python = random.random(), random.gauss(0, 1)
    return torch.rand(3).tolist(), torch.randn(3).tolist(), python, np.random.randn()  # noqa: NPY002


class Accelerators:
    """A module like torch.cuda with two devices."""

    def __init__(self, *, initialised=True):
        self.generators = [torch.Generator().manual_seed(i) for i in range(2)]
        self.initialised = initialised

    def is_initialized(self):
        return self.initialised

    def device_count(self):
        return len(self.generators)

    def get_rng_state(self, device):
        assert self.initialised, "would initialise the device"
        return self.generators[device.index].get_state()

    def set_rng_state(self, state, device):
        self.generators[device.index].set_state(state)

    def draw(self):
        return [torch.rand(2, generator=generator).tolist() for generator in self.generators]


@pytest.fixture
def xpu(monkeypatch):
    module = Accelerators()
    monkeypatch.setattr(torch, "xpu", module)  # a type that every torch can name
    return module


def test_restores_every_generator():
    random.gauss(0, 1)  # leaves a second number waiting
    np.random.randn()  # noqa: NPY002
    state = RngState.capture()
    first = draw()
    assert draw() != first
    assert state.restore() == ()
    assert draw() == first


def test_may_be_restored_again_and_again():
    state = RngState.capture()
    first = draw()
    for _ in range(2):
        state.restore()
        assert draw() == first


def test_capturing_draws_nothing():
    state = RngState.capture()
    first = draw()
    state.restore()
    RngState.capture()
    assert draw() == first


def test_survives_storage():
    random.gauss(0, 1)
    state = RngState.capture()
    tensors, skeleton = flatten(state.to_tree())
    first = draw()
    RngState.from_tree(unflatten(tensors, json.loads(json.dumps(skeleton)))).restore()
    assert draw() == first


@pytest.mark.parametrize("tree", [{}, {"python": 1}, {"python": (3, (), None), "torch_cpu": None}])
def test_refuses_another_nest(tree):
    with pytest.raises(ValueError, match="not the state of random number generators"):
        RngState.from_tree(tree)


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RngState.capture().torch_cpu = None


def test_preserved_rng_restores_after_an_error():
    first = RngState.capture()

    def fail():
        with preserved_rng() as state:
            assert state.python == first.python
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(torch.get_rng_state(), first.torch_cpu)
    assert random.getstate() == first.python


class TestAccelerators:
    def test_all_of_a_type(self, xpu):
        state = RngState.capture(["xpu"])
        assert [name for name, _ in state.devices] == ["xpu:0", "xpu:1"]
        first = xpu.draw()
        assert state.restore() == ()
        assert xpu.draw() == first

    @pytest.mark.parametrize("one", ["xpu:1", torch.device("xpu", 1)])
    def test_one_device(self, xpu, one):
        assert [name for name, _ in RngState.capture([one]).devices] == ["xpu:1"]

    def test_named_twice(self, xpu):
        assert len(RngState.capture(["xpu", "xpu:0"]).devices) == 2

    def test_is_left_alone_until_it_is_initialised(self, xpu):
        xpu.initialised = False
        assert RngState.capture(["xpu"]).devices == ()

    @pytest.mark.parametrize("name", ["cpu", "meta", "cuda", "nonsense", "npu"])
    def test_is_left_out_if_it_is_not_there(self, name):
        if name == "cuda" and torch.cuda.is_initialized():
            pytest.skip("this process uses it")
        assert RngState.capture([name]).devices == ()

    def test_restoring_says_which_are_missing(self, xpu, monkeypatch):
        state = RngState.capture(["xpu"])
        xpu.generators.pop()
        assert state.restore() == ("xpu:1",)
        monkeypatch.delattr(torch, "xpu")
        assert state.restore() == ("xpu:0", "xpu:1")

    def test_survives_storage(self, xpu):
        state = RngState.capture(["xpu"])
        first = xpu.draw()
        RngState.from_tree(unflatten(*flatten(state.to_tree()))).restore()
        assert xpu.draw() == first

    def test_preserved(self, xpu):
        first = RngState.capture(["xpu"])
        with preserved_rng(["xpu"]):
            xpu.draw()
        assert all(
            torch.equal(a, b)
            for (_, a), (_, b) in zip(first.devices, RngState.capture(["xpu"]).devices, strict=True)
        )

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_cuda(self):
        torch.cuda.init()
        state = RngState.capture(["cuda"])
        first = torch.rand(4, device="cuda")
        assert state.restore() == ()
        assert torch.equal(torch.rand(4, device="cuda"), first)


@pytest.mark.slow
def test_numpy_is_not_imported_for_it():
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); sys.modules['numpy'] = None\n"
        "from gradsentinel.state.rng import RngState\n"
        "state = RngState.capture(); assert state.numpy is None; state.restore()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603


def test_capturing_is_cheap():
    assert (
        min(timeit.repeat(RngState.capture, number=100, repeat=5)) / 100 < 1e-3
    )  # some 35 us where it is quiet


GLOBAL = np.random  # what programs use that have no generator of their own


def numpy_states_agree() -> bool:
    """Whether what is captured is what NumPy itself says."""
    told, captured = GLOBAL.get_state(legacy=False), RngState.capture().numpy
    return (
        (told["state"]["key"] == captured["state"]["key"]).all()
        and told["state"]["pos"] == captured["state"]["pos"]
        and (told["has_gauss"], told["gauss"]) == (captured["has_gauss"], captured["gauss"])
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda: None,
        GLOBAL.rand,
        GLOBAL.randn,  # every second one is kept for later
        lambda: GLOBAL.randn(2),
        lambda: GLOBAL.rand(700),  # a whole round of the generator
        lambda: GLOBAL.seed(3),
        lambda: GLOBAL.shuffle(list(range(5))),
    ],
    ids=["nothing", "uniform", "normal", "two normals", "many", "seed", "shuffle"],
)
def test_what_numpy_drew_meanwhile_is_seen(use):
    for _ in range(4):
        assert numpy_states_agree()
        use()
    assert numpy_states_agree()


@pytest.mark.skipif(not hasattr(GLOBAL, "set_bit_generator"), reason="NumPy before 1.24")
def test_another_generator_of_numpy_is_captured_too():
    before = GLOBAL.get_bit_generator()
    try:
        GLOBAL.set_bit_generator(GLOBAL.PCG64(1))
        first = RngState.capture().numpy
        GLOBAL.rand()
        assert RngState.capture().numpy["state"] != first["state"]
        GLOBAL.set_bit_generator(GLOBAL.MT19937(2))
        assert numpy_states_agree()
        GLOBAL.rand()
        assert numpy_states_agree()
    finally:
        GLOBAL.set_bit_generator(before)


@pytest.mark.parametrize(
    "use",
    [
        lambda: None,
        random.random,
        lambda: random.gauss(0, 1),  # every second one is kept for later
        lambda: [random.random() for _ in range(700)],
        lambda: random.seed(5),
        lambda: random.shuffle(list(range(5))),
        lambda: random.setstate(random.Random(7).getstate()),
    ],
    ids=["nothing", "uniform", "normal", "many", "seed", "shuffle", "another state"],
)
def test_what_python_drew_meanwhile_is_seen(use):
    for _ in range(4):
        assert RngState.capture().python == random.getstate()
        use()
    assert RngState.capture().python == random.getstate()


def test_a_state_that_did_not_change_is_not_read_again():
    first, second = RngState.capture(), RngState.capture()
    assert second.python is first.python
    assert second.numpy is first.numpy


class Elsewhere:
    """A read of the state during which another thread does something with the generators."""

    def __init__(self, read, meanwhile):
        self.read, self.meanwhile = read, meanwhile

    def __call__(self, **kwargs):
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return self.read(**kwargs)


def test_what_is_drawn_while_the_state_is_read_spoils_no_later_one(monkeypatch):
    """The state that was looked at comes back later: it must not be taken for the one that was read."""
    rng._python.forget()
    before = random.getstate()
    real = rng._python.state
    monkeypatch.setattr(
        rng._python, "state", lambda g, a, r, read: real(g, a, r, Elsewhere(read, random.random))
    )
    RngState.capture()
    monkeypatch.undo()
    random.setstate(before)
    assert RngState.capture().python == before


@pytest.mark.skipif(not hasattr(GLOBAL, "set_bit_generator"), reason="NumPy before 1.24")
def test_a_generator_that_is_replaced_while_the_state_is_read_spoils_no_later_one(monkeypatch):
    rng._numpy.forget()
    first, other = GLOBAL.get_bit_generator(), GLOBAL.MT19937(9)
    read = Elsewhere(GLOBAL.get_state, lambda: GLOBAL.set_bit_generator(other))
    try:
        monkeypatch.setattr(GLOBAL, "get_state", read)
        RngState.capture()
        monkeypatch.undo()
        GLOBAL.set_bit_generator(first)
        assert numpy_states_agree()
    finally:
        GLOBAL.set_bit_generator(first)


def test_a_generator_that_only_has_the_name_is_not_looked_into(monkeypatch):
    class MT19937:
        @property
        def ctypes(self):
            raise AssertionError("its memory may be of any size")

    monkeypatch.setattr(GLOBAL, "get_bit_generator", MT19937)
    assert RngState.capture().numpy["state"]["pos"] == GLOBAL.get_state(legacy=False)["state"]["pos"]


def test_functions_that_somebody_has_replaced_are_asked(monkeypatch):
    monkeypatch.setattr(random, "getstate", lambda: "theirs")
    assert RngState.capture().python == "theirs"


@pytest.mark.parametrize("index", [8, 100, 623])
def test_every_word_counts(index):
    """Two states that differ in one word only: a program may set any."""
    version, numbers, gauss = random.getstate()
    try:
        first = RngState.capture().python
        changed = list(numbers)
        changed[index] ^= 1
        random.setstate((version, tuple(changed), gauss))
        assert RngState.capture().python != first
        assert RngState.capture().python == random.getstate()
    finally:
        random.setstate((version, numbers, gauss))


def test_a_memory_that_looks_otherwise_is_not_trusted():
    twister = rng._Twister(words=4, place=0, listed=lambda state: (range(624), state))
    states = iter(range(10))
    generator = random._inst
    found = [twister.state(generator, id(generator), None, lambda: next(states)) for _ in range(3)]
    assert found == [0, 1, 2]
