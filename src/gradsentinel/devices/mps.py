"""Apple's GPUs."""

from __future__ import annotations

import torch

from gradsentinel.devices.device import Device


class Mps(Device):
    """A GPU as torch.mps drives it; it has no double precision."""

    wide = torch.float32
