"""What stands for a device: the CPU, unknown kinds, and an NPU as far as one can ask without it."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from gradsentinel.checks import State, check_determinism
from gradsentinel.devices import device_of
from gradsentinel.devices.cpu import Cpu
from gradsentinel.devices.cuda import Cuda
from gradsentinel.devices.device import Device
from gradsentinel.devices.mps import Mps
from gradsentinel.devices.npu import Npu
from gradsentinel.diagnosis.environment import environment

META = torch.device("meta")
"""Stands in for a device that this process does not have."""


@pytest.mark.parametrize(
    ("name", "kind"), [("cpu", Cpu), ("cuda", Cuda), ("cuda:3", Cuda), ("xpu", Device), ("mps", Mps)]
)
def test_the_type_of_the_device_decides(name, kind):
    found = device_of(name)
    assert type(found) is kind
    assert device_of(torch.device(name)) is found
    assert found.device == torch.device(name)


def test_a_name_that_torch_does_not_know_is_torchs_error():
    with pytest.raises(RuntimeError):
        device_of("nonsense")


def test_nothing_is_started_by_asking():
    if torch.cuda.is_initialized():
        pytest.skip("this process uses CUDA")
    found = device_of("cuda:0")
    assert (found.name, found.generator_states(), found.saturates) == ("cuda:0", {}, False)
    assert not torch.cuda.is_initialized()


def test_on_the_cpu_nothing_is_under_way():
    cpu = device_of("cpu")
    values = torch.arange(6.0).reshape(2, 3).t()
    assert cpu.event() is None
    assert not cpu.has_streams
    assert cpu.host_memory(values).stride() == values.stride()
    assert cpu.send(values) is values
    assert cpu.in_plain_format(values) is values
    assert (cpu.overflow_flag(), cpu.generator_states(), cpu.settings()) == (None, {}, {})
    assert not cpu.set_generator_state(torch.get_rng_state())
    assert cpu.health_source() is None
    tensors = [torch.full((2,), 3.0), torch.full((1,), 5.0)]
    cpu.scale_(tensors, torch.tensor(2.0))
    assert [tensor.tolist() for tensor in tensors] == [[6, 6], [10]]


class Saturating(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        floating = isinstance(result, torch.Tensor) and result.is_floating_point()
        return result.nan_to_num() if floating else result


def test_an_unknown_device_is_asked_whether_it_saturates_and_only_once():
    found = Device(torch.device("cpu"))
    with Saturating():
        assert found.saturates
    assert found.saturates
    assert not Device(torch.device("cpu")).saturates


def test_one_that_cannot_compute_in_float16_does_not_saturate(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(torch, "full", fail)
    assert not Device(torch.device("cpu")).saturates


def test_an_unknown_device_without_memory_to_pin_copies_all_the_same(monkeypatch):
    monkeypatch.setattr(torch, "xpu", SimpleNamespace())
    found = device_of("xpu")
    assert not found.has_streams
    assert not found.initialised
    memory = found.host_memory(torch.ones(3))
    assert (memory.device.type, memory.shape) == ("cpu", (3,))
    with found.mark("gradsentinel/test"):
        pass


@pytest.mark.parametrize("name", ["mps", "npu"])
def test_some_devices_have_no_double_precision(name):
    found = Npu(META) if name == "npu" else device_of(name)
    assert found.wide is torch.float32
    assert device_of("cpu").wide is device_of("cuda").wide is torch.float64


class Values:
    """As much of a tensor as is asked for before its bits are read."""

    def __init__(self, number):
        self.format = number


@pytest.mark.parametrize("number", [0, 2, 3, 29])
def test_on_an_npu_the_bits_of_the_plain_format_count(monkeypatch, number):
    npu = SimpleNamespace(
        get_npu_format=lambda values: values.format, npu_format_cast=lambda values, to: Values(to)
    )
    monkeypatch.setitem(sys.modules, "torch_npu", npu)
    values = Values(number)
    plain = Npu(META).in_plain_format(values)
    assert plain.format in {0, 2}
    assert (plain is values) == (number in {0, 2})
    monkeypatch.delitem(sys.modules, "torch_npu")
    assert Npu(META).in_plain_format(values) is values


@pytest.mark.parametrize("place", ["given", "returned"])
@pytest.mark.parametrize("overflowed", [False, True])
def test_the_flag_is_read_wherever_a_release_writes_it(monkeypatch, place, overflowed):
    asked = []

    def get(status):
        written = status if place == "given" else torch.zeros(8)
        written[0] = float(overflowed)
        return written if place == "returned" else torch.zeros(8)

    npu = SimpleNamespace(
        npu=SimpleNamespace(utils=SimpleNamespace(is_support_inf_nan=lambda: False)),
        npu_get_float_status=get,
        npu_clear_float_status=lambda status: asked.append(status.shape),
    )
    monkeypatch.setitem(sys.modules, "torch_npu", npu)
    device = Npu(torch.device("cpu"))
    assert device.saturates
    flag = device.overflow_flag()
    assert (flag.shape, flag.item()) == ((), overflowed)
    device.clear_overflow_flag()
    assert asked == [(8,)]


def test_in_inf_nan_mode_nobody_asks_for_the_flag(monkeypatch):
    def fail(_status):
        raise AssertionError("it raises there")

    npu = SimpleNamespace(
        npu=SimpleNamespace(utils=SimpleNamespace(is_support_inf_nan=lambda: True)),
        npu_get_float_status=fail,
        npu_clear_float_status=fail,
    )
    monkeypatch.setitem(sys.modules, "torch_npu", npu)
    device = Npu(torch.device("cpu"))
    device.clear_overflow_flag()
    assert (device.saturates, device.overflow_flag()) == (False, None)


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_the_switches_for_determinism_say_what_they_cost(kind, monkeypatch):
    switches = Device(SimpleNamespace(type=kind)).switches
    assert switches
    for switch in switches:
        assert switch.cost
        for value in ("", "false", "nonsense"):
            given = {switch.variable: value}
            assert not switch.is_set(given)
            advice = check_determinism({"cpu", kind}, given)
            assert advice.state is State.NOTE
            assert f"{switch.variable}={switch.values[0]}" in advice.remedy
            assert f"{switch.variable}: {switch.cost}" in advice.remedy
            assert (f"{switch.variable}={value} is not" in advice.found) == bool(value)
        for value in switch.values:
            assert switch.is_set({switch.variable: value.upper()})
            assert check_determinism({kind}, {switch.variable: value}).state is State.OK
        monkeypatch.setenv(switch.variable, switch.values[0])
        assert environment()["variables"][switch.variable] == switch.values[0]  # in every bundle


def test_what_a_bundle_says_of_a_device_is_what_the_device_says(monkeypatch):
    monkeypatch.setenv("GRADSENTINEL_MARKS", "1")
    found = environment()
    assert {name: found[name] for name in ("cudnn", "matmul")} == device_of("cuda").settings()
    assert found["matmul"]["allow_tf32"] is torch.backends.cuda.matmul.allow_tf32
    assert found["cudnn"]["deterministic"] is torch.backends.cudnn.deterministic
    assert found["variables"]["GRADSENTINEL_MARKS"] == "1"


def test_the_doctor_knows_the_switches_without_torch():
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from gradsentinel.checks import check_determinism\n"
        "print(check_determinism({'cuda'}, {}).remedy)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603 - this interpreter, our own code
    assert found.returncode == 0, found.stderr
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in found.stdout


@pytest.mark.slow
def test_an_installation_that_cannot_be_imported_breaks_nothing(tmp_path):
    """torch_npu without CANN raises ImportError or OSError as soon as somebody imports it."""
    (tmp_path / "torch_npu.py").write_text("raise OSError('libhccl.so: cannot open shared object file')\n")
    code = (
        "import torch, gradsentinel\n"
        "from torch import nn\n"
        "model = nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        f"with gradsentinel.Sentinel(model, optimizer, run_dir={str(tmp_path / 'run')!r}) as sentinel:\n"
        "    for batch in sentinel.steps([torch.ones(3, 2)] * 3):\n"
        "        sentinel.backward(model(batch).mean())\n"
        "        sentinel.step(1.0)\n"
        "print(sentinel.incidents)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = subprocess.run(  # noqa: S603 - this interpreter, our own code
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert (found.returncode, found.stdout.strip()) == (0, "()"), found.stderr
