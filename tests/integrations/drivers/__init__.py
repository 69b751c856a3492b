"""A driver per adapter; Megatron's is beside its own tests, since torch is another one there."""

from drivers.bare import Accelerate, Fabric
from drivers.hf import HuggingFace
from drivers.pl import Lightning, Manual, PytorchLightning
from drivers.plain import Attached, Plain

DRIVERS = [
    Plain(),
    Attached(),
    Lightning(),
    PytorchLightning(),
    Manual(),
    Fabric(),
    Accelerate(),
    HuggingFace(),
]
