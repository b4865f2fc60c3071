"""The paper's models, as chains of stages."""

from dpps.models.mlp import MLP, MLPResidual
from dpps.models.stages import Staged, call_stages, run_stages, stage_parameters

__all__ = ["MLP", "MLPResidual", "Staged", "call_stages", "run_stages", "stage_parameters"]
