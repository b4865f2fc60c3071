"""What a plan will cost when it is carried out."""

from dataclasses import replace

from dpps.noise.events import sampled
from dpps.privacy.accountant import Charge
from dpps.privacy.units import Calibration, Plan


def planned_charges(calibration: Calibration, plan: Plan) -> list[Charge]:
    """What the ledger will hold for the node that draws most often."""

    def charge(rate: float, count: int) -> Charge:
        cost = calibration.mechanism.cost(1.0, calibration.mechanism.scale(1.0) * rate)
        return Charge(sampled(calibration.sampling, cost), count)

    if not calibration.sensitivity.noise_decays:
        return [charge(1.0, plan.paid)]
    return [charge(rate, count) for rate, count in plan.rounds]


def charges_ahead(calibration: Calibration, plan: Plan, position: int, messages: int) -> list[Charge]:
    """What a node may still be charged before the last planned round, rounds that were paid for as spare ones included.

    Args:
        calibration: the noise.
        plan: the whole of it.
        position: complete rounds.
        messages: what was charged already, rounds repeated after a crash included.
    """
    left = plan.count - position
    if left <= 0:
        return []
    if calibration.sensitivity.noise_decays:
        return planned_charges(calibration, plan.after(position))
    rounds = ((1.0, max(left, plan.paid - messages)),)
    return planned_charges(calibration, replace(plan, rounds=rounds, spare=0))
