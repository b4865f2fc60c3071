"""Learning on top of the protocol: algorithms, partition, sampling, evaluation."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.learning.algorithms import (
        ALGORITHMS,
        PEDFL,
        SGP,
        SGPDP,
        Algorithm,
        GradientTracking,
        PartPSP,
        Step,
        TrainState,
    )
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
    from dpps.learning.gradients.chain import Chained, Chains, is_chain
    from dpps.learning.gradients.choose import choose_engine, choose_per_example
    from dpps.learning.gradients.clipped import Batched, OneByOne, PerExample
    from dpps.learning.gradients.layers.contributions import Explicit, Outer, Rows
    from dpps.learning.gradients.layers.rules import Rule, register
    from dpps.learning.inputs import as_datasets, as_unit
    from dpps.learning.nodes import ClipCount, Nodes, advice, clip_rows, hopeless, into_ball
    from dpps.learning.partition import Partition
    from dpps.learning.preflight import check_examples, check_model
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
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
