"""Learning on top of the protocol: algorithms, partition, sampling, evaluation."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.learning.algorithm import ALGORITHMS, Algorithm, Step, TrainState
    from dpps.learning.algorithms import PEDFL, SGP, SGPDP, GradientTracking, PartPSP
    from dpps.learning.evaluation import accuracies
    from dpps.learning.gradients.batch import Engine, Loop, Vectorised
    from dpps.learning.gradients.calling import (
        ModelLoss,
        call_model,
        in_short,
        logits_of,
        loss_of,
        one_number,
        pick,
        swapped,
        tensors_in,
        unwritten,
    )
    from dpps.learning.gradients.chain import Chained, is_chain
    from dpps.learning.gradients.choose import choose_engine, choose_per_example
    from dpps.learning.gradients.clipped import Batched, Chains, OneByOne, PerExample
    from dpps.learning.gradients.contributions import Explicit, Outer, Rows
    from dpps.learning.gradients.layers.rules import Rule, register
    from dpps.learning.inputs import as_datasets, as_unit, check_examples
    from dpps.learning.nodes import Nodes
    from dpps.learning.partition import Partition
    from dpps.learning.preflight import check_model
    from dpps.learning.released import Adam, LocalOptimizers, Momentum
    from dpps.learning.sampling import (
        LARGEST,
        NodeData,
        Poisson,
        announce,
        for_every_node,
        parse_batch,
        parse_sizes,
    )
    from dpps.learning.suggestion import (
        CLIP,
        LONGEST,
        MOMENTUM,
        USUAL_LONGEST,
        suggest,
        suggested_batch,
    )
    from dpps.learning.updates import ClipCount, advice, clip_rows, hopeless, into_ball
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
