"""What a plan will cost when it is carried out."""

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
