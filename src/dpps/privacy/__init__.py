"""Privacy: who is protected, how much is spent, what was promised, and what accuracy to expect."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.privacy.accountant import NO_PROTECTION, SUM_OF_ROUNDS, Charge, Total, label, noise_for, total
    from dpps.privacy.ledger import Budget, Ledger, LedgerFile, Mark, Release, Witness, unused, witness_of
    from dpps.privacy.outlook import (
        Coalition,
        LimitingNode,
        Outlook,
        certified_bounds,
        foresee,
        refuse_large_delta,
    )
    from dpps.privacy.partners import NOBODY, TRUSTS, Nobody, Pairs, Partners, Trust
    from dpps.privacy.promise import Contract, Privacy, account, charges_ahead, planned_charges
    from dpps.privacy.units import (
        UNITS,
        Calibration,
        Contribution,
        NodeSwap,
        Plan,
        PrivacyOptions,
        Record,
        Unit,
    )
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
