"""NVML: a library of the same names that answers like a card, one that lacks half of it, none at all."""

import sys
import types

import pynvml
import pytest

from gradsentinel.devices.health import HealthUnavailable
from gradsentinel.devices.nvml import Nvml

SETTINGS = ("NVML_TEMPERATURE_GPU", "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN", "NVML_VOLATILE_ECC")
SETTINGS += ("NVML_AGGREGATE_ECC", "NVML_MEMORY_ERROR_TYPE_CORRECTED", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED")


class Card:
    """One card behind the library; `lacks` are the questions it does not understand."""

    def __init__(self, *, lacks=(), gone=False):
        self.lacks, self.gone = set(lacks), gone
        self.handles = []
        self.temperature, self.reasons, self.rows = 61, 0, (3, 1, False, False)

    def library(self):
        module = types.ModuleType("pynvml")
        module.NVMLError = pynvml.NVMLError
        for name in SETTINGS:
            setattr(module, name, getattr(pynvml, name))
        ecc = {(0, 0): 12, (1, 0): 0, (0, 1): 90, (1, 1): 2}
        answers = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByIndex": self.handle,
            "nvmlDeviceGetHandleByUUID": self.handle,
            "nvmlDeviceGetHandleByPciBusId": self.handle,
            "nvmlDeviceGetName": lambda handle: b"NVIDIA H200",
            "nvmlDeviceGetTemperature": lambda handle, sensor: self.temperature,
            "nvmlDeviceGetTemperatureThreshold": lambda handle, which: 87,
            "nvmlDeviceGetPowerUsage": lambda handle: 431_250,
            "nvmlDeviceGetTotalEccErrors": lambda handle, kind, since: ecc[kind, since],
            "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: self.reasons,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: self.reasons,
            "nvmlDeviceGetRemappedRows": lambda handle: self.rows,
        }
        for name, answer in answers.items():
            assert callable(getattr(pynvml, name)), f"NVML has no {name}"
            setattr(module, name, self.asked(name, answer))
        return module

    def handle(self, by):
        self.handles.append(by)
        return "handle"

    def asked(self, name, answer):
        def ask(*args):
            if self.gone and name != "nvmlInit":
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            if name in self.lacks:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return answer(*args)

        return ask


@pytest.fixture
def install(monkeypatch):
    def install(card):
        monkeypatch.setitem(sys.modules, "pynvml", card.library())
        return card

    return install


def test_a_reading(install):
    install(Card())
    reading = Nvml(1).read()
    assert (reading.name, reading.temperature, reading.hottest, reading.power) == (
        "NVIDIA H200",
        61,
        87,
        431.25,
    )
    assert reading.health == "OK"
    assert reading.counters == {
        "corrected ECC errors": 12,
        "corrected ECC errors, of its life": 90,
        "uncorrected ECC errors": 0,
        "uncorrected ECC errors, of its life": 2,
        "remapped rows, correctable": 3,
        "remapped rows, uncorrectable": 1,
    }


@pytest.mark.parametrize(("visible", "index", "number"), [("", 2, 2), ("5,7", 1, 7), ("GPU-aa,GPU-bb", 1, 1)])
def test_which_card_is_mine(install, monkeypatch, visible, index, number):
    card = install(Card())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    source = Nvml(index)
    source.read()
    assert (source.card, card.handles) == (f"cuda {number}", [number])


def test_what_a_card_does_not_know_is_left_out(install):
    names = [name for name in Card().library().__dict__ if "DeviceGet" in name and "Handle" not in name]
    install(Card(lacks=set(names) - {"nvmlDeviceGetName"}))
    reading = Nvml(0).read()
    assert (reading.temperature, reading.power, reading.health, reading.counters) == (None, None, None, {})
    assert reading.healthy is None


@pytest.mark.parametrize("missing", ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetRemappedRows"])
def test_an_older_library_lacks_functions(install, missing):
    card = install(Card())
    delattr(sys.modules["pynvml"], missing)
    card.reasons = 0x40
    assert Nvml(0).read().notes == ("slowed down by the hardware: hot",)


@pytest.mark.parametrize(
    ("rows", "word"),
    [((0, 0, True, False), "row remapping pending"), ((0, 9, True, True), "row remapping failed")],
)
def test_rows_that_cannot_be_mapped_are_bad_health(install, rows, word):
    install(Card()).rows = rows
    reading = Nvml(0).read()
    assert (reading.health, reading.healthy) == (word, False)


def test_a_card_that_is_lost_is_looked_for_anew(install):
    card = install(Card())
    source = Nvml(0)
    source.read()
    card.gone = True
    with pytest.raises(HealthUnavailable, match="lost"):
        source.read()
    card.gone = False
    assert source.read().temperature == 61
    assert len(card.handles) == 2


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(HealthUnavailable, match=r"pip install 'gradsentinel\[nvml\]'"):
        Nvml(0).read()


def test_another_package_of_that_name_is_recognised(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
    with pytest.raises(HealthUnavailable, match="is another one"):
        Nvml(0).read()


def test_without_a_driver_the_real_library_says_so():
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        with pytest.raises(HealthUnavailable, match="NVML"):
            Nvml(0).read()
    else:  # a machine that has one
        assert Nvml(0).read().name
