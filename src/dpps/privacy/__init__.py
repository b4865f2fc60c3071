"""What privacy costs: units, accountant, ledger, statement, audit."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.privacy.accountant import (
        NO_PROTECTION,
        SUM_OF_ROUNDS,
        Charge,
        Total,
        label,
        multiplier_for,
        noise_for,
        total,
    )
    from dpps.privacy.charges import planned_charges
    from dpps.privacy.composition import attempt, pld, rdp
    from dpps.privacy.contract import Contract
    from dpps.privacy.foresight import certified_bounds, foresee
    from dpps.privacy.ledger import Budget, Ledger
    from dpps.privacy.ledger_file import LedgerFile, believed
    from dpps.privacy.limiting import SHOWN, Limits, limits
    from dpps.privacy.plan import Coalition, Outlook, coalition, outlook
    from dpps.privacy.release import Release, Rows
    from dpps.privacy.statement import SIMULATED, Privacy, account, finite_or_none
    from dpps.privacy.trust import NOBODY, TRUSTS, Nobody, Pairs, Partners, Shares, Trust, enough_degree
    from dpps.privacy.units.base import UNITS, Calibration, Plan, PrivacyOptions, Unit, one_of, positive
    from dpps.privacy.units.contribution import Contribution
    from dpps.privacy.units.node_swap import NodeSwap
    from dpps.privacy.units.record import Record
    from dpps.privacy.witness import Mark, Witness, unused, witness_of

__getattr__, __dir__, __all__ = lazy_imports(__name__)
