"""Runs: options, training, results, the run's folder, and the deployment."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.runs.baselines import ALONE, NO_PRIVACY, OWN_EYES, Baseline, compare, gained
    from dpps.runs.callbacks import COLUMNS, Callback, Progress, RoundLog, TensorBoard, bytes_sent
    from dpps.runs.data_ledger import STATE, Note, Spent, alone, checksum, notes_of, spent, together
    from dpps.runs.deployment import TRACKED, Deployment, Simulation
    from dpps.runs.folder import (
        RunFolder,
        load_checkpoint,
        model_name,
        save_checkpoint,
        set_aside_after,
        whole_rounds,
    )
    from dpps.runs.from_options import deal
    from dpps.runs.options import (
        OWN_DATA,
        Options,
        effective,
        ignored,
        planned,
        refuse_ignored,
        shape,
        suggestion,
    )
    from dpps.runs.run import Run
    from dpps.runs.saved_models import Saved, choose, load, outputs
    from dpps.runs.summary import Description, Summary, describe, fingerprint, model_facts
    from dpps.runs.torch_distributed import SEEDED, TorchDistributed
    from dpps.runs.tuning import Trial, Tuning, tune
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
