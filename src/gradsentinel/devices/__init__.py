"""What GradSentinel needs of a device, behind one small class; who has a tensor asks `device_of` for it."""

from gradsentinel.devices.choice import device_of
from gradsentinel.devices.device import Device
from gradsentinel.switches import Switch

__all__ = ["Device", "Switch", "device_of"]
