"""What privacy costs: units, accountant, ledger, statement, audit."""
