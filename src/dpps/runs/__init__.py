"""One run: its folder, log, checkpoints, and where it is carried out."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.runs.baselines import ALONE, NO_PRIVACY, OWN_EYES, Baseline, compare, gained, read_comparisons
    from dpps.runs.checkpoint import load_checkpoint, save_checkpoint, set_aside_after, whole_rounds
    from dpps.runs.config import OWN_DATA, TrainConfig
    from dpps.runs.config_files import from_json, from_toml
    from dpps.runs.configured import deal, make_run
    from dpps.runs.data_ledger import STATE, Note, Spent, checksum, notes_of, spent
    from dpps.runs.data_totals import Together, alone, together
    from dpps.runs.defaults import planned, shape, suggestion
    from dpps.runs.deployment import TRACKED, Deployment, Here
    from dpps.runs.description import describe, fingerprint, model_facts
    from dpps.runs.folder import RunFolder, model_name
    from dpps.runs.log import COLUMNS, RoundLog, bytes_sent
    from dpps.runs.options import refuse_idle, refuse_idle_training
    from dpps.runs.run import Callback, Run
    from dpps.runs.saved import Saved, choose, load, outputs
    from dpps.runs.start import promise
    from dpps.runs.stopping import last_for_all
    from dpps.runs.summary import chosen, summarise
    from dpps.runs.tensorboard import TensorBoard
    from dpps.runs.torch_distributed import SEEDED, TorchDistributed
    from dpps.runs.tuning import Trial, Tuning, candidates, tune

__getattr__, __dir__, __all__ = lazy_imports(__name__)
