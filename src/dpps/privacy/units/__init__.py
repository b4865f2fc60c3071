"""Who is protected: the privacy units, one file each. They differ only in where the sensitivity comes from.

A unit turns what a user says (noise parameters, or a target epsilon and delta) and the plan of a run into `Calibration`: the
mechanism, the sensitivity and the clipping that the run must keep to. docs/extending.md adds one.
"""

from dpps.privacy.units.base import UNITS, Calibration, Plan, PrivacyOptions, Unit
from dpps.privacy.units.contribution import Contribution
from dpps.privacy.units.node_swap import NodeSwap
from dpps.privacy.units.record import Record

__all__ = ["UNITS", "Calibration", "Contribution", "NodeSwap", "Plan", "PrivacyOptions", "Record", "Unit"]
