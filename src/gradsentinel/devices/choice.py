"""Which class stands for which kind of device."""

from __future__ import annotations

import torch

from gradsentinel.devices.cpu import Cpu
from gradsentinel.devices.cuda import Cuda
from gradsentinel.devices.device import Device
from gradsentinel.devices.mps import Mps
from gradsentinel.devices.npu import Npu

_KINDS: dict[str, type[Device]] = {"cpu": Cpu, "meta": Cpu, "cuda": Cuda, "mps": Mps, "npu": Npu}
_known: dict[torch.device, Device] = {}


def device_of(device: torch.device | str) -> Device:
    """Return what stands for a device, the same object each time; starts no device, never fails.

    By the type of the device and nothing else: a program may have been told to call an NPU "cuda"
    (`transfer_to_npu`), and its tensors still say what they lie on. A kind that nobody has described (xpu,
    a vendor's own) gets `Device` itself.

    Raises:
        RuntimeError: from torch, for a name that it does not know.
    """
    device = torch.device(device)
    found = _known.get(device)
    if found is None:
        found = _known[device] = _KINDS.get(device.type, Device)(device)
    return found
