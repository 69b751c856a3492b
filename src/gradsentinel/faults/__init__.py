"""Faults on purpose: for tests, for campaigns, and for fire drills of one's own run."""

from gradsentinel.faults.bit import FlipBit
from gradsentinel.faults.draw import random_faults
from gradsentinel.faults.fault import Fault
from gradsentinel.faults.field import SpoilField
from gradsentinel.faults.injection import Injection
from gradsentinel.faults.overflow import MatmulOverflow
from gradsentinel.faults.plan import Attachment, FaultPlan
from gradsentinel.faults.poison import PoisonActivation, PoisonGradient
from gradsentinel.faults.sample import PoisonSample
from gradsentinel.faults.setting import ChangeSetting
from gradsentinel.faults.wrong_operator import WrongOperator

__all__ = [
    "Attachment",
    "ChangeSetting",
    "Fault",
    "FaultPlan",
    "FlipBit",
    "Injection",
    "MatmulOverflow",
    "PoisonActivation",
    "PoisonGradient",
    "PoisonSample",
    "SpoilField",
    "WrongOperator",
    "random_faults",
]
