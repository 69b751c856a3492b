"""The CPU: nothing is under way when a call returns, so there is nothing to wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradsentinel.devices.device import Device


class Cpu(Device):
    """The CPU; its generator is torch's own and is not among those of devices."""

    name = "cpu"
    has_streams = False
    saturates = False
    initialised = False

    def event(self, stream: Any = None) -> None:
        """Return None: what was asked for is done."""

    def host_memory(self, like: Tensor) -> Tensor:
        """Return memory like a tensor's own."""
        return torch.empty_like(like, device="cpu")

    def send(self, values: Tensor) -> Tensor:
        """Return the values as they are."""
        return values.to(self.device)

    def set_generator_state(self, state: Tensor) -> bool:
        """Return False: the CPU's state is not one of a device."""
        return False
