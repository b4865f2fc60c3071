"""Learning on top of the protocol: algorithms, partition, sampling, evaluation."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.learning.algorithm import ALGORITHMS, Algorithm, Step, TrainState
    from dpps.learning.algorithms import PEDFL, SGP, SGPDP, GradientTracking, PartPSP
    from dpps.learning.evaluation import (
        EVALUATED,
        accuracies,
        accuracies_of_some,
        accuracy_of,
        are_classes,
        by_class,
        measured,
        own_accuracies,
        unless_it_fails,
    )
    from dpps.learning.gradients.batch import Engine, EngineName, Loop, Vectorised
    from dpps.learning.gradients.calling import (
        FAILURES,
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
    from dpps.learning.gradients.layers.rule import Rule, register
    from dpps.learning.inputs import (
        Batch,
        as_datasets,
        as_examples,
        as_topology,
        as_unit,
        check_examples,
        tell_unscaled,
    )
    from dpps.learning.nodes import Nodes, check_record
    from dpps.learning.partition import Partition
    from dpps.learning.preflight import check_model, refuse_mixing
    from dpps.learning.released import Adam, Averaging, LocalOptimizers, Momentum
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
        USUAL_BATCH,
        USUAL_CLIP,
        USUAL_EPOCHS,
        USUAL_LONGEST,
        Suggestion,
        suggest,
        suggested_batch,
    )
    from dpps.learning.updates import ClipCount, advice, clip_rows, hopeless, into_ball
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
