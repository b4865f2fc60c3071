"""Learning on top of the protocol: algorithms, partition, sampling, evaluation."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.learning.algorithm import ALGORITHMS, Algorithm, Step, TrainState
    from dpps.learning.algorithms import PEDFL, SGP, SGPDP, GradientTracking, PartPSP
    from dpps.learning.batch_sizes import parse_batch
    from dpps.learning.batches import NodeData, Poisson
    from dpps.learning.clipping import ClipCount, advice, hopeless
    from dpps.learning.comparison import (
        CONFIDENCE,
        Change,
        Comparison,
        change,
        compare_by_node,
        compare_on_one_set,
    )
    from dpps.learning.engines.calling import (
        FAILURES,
        ModelLoss,
        call_model,
        in_short,
        logits_of,
        loss_of,
        pick,
        tensors_in,
        unwritten,
    )
    from dpps.learning.engines.chain import Chained, is_chain
    from dpps.learning.engines.choice import choose_engine, refuse_writing
    from dpps.learning.engines.gradients import Engine, EngineName, Loop, Vectorised
    from dpps.learning.engines.known_code import keeps_nothing
    from dpps.learning.engines.per_example import per_example
    from dpps.learning.engines.per_example.adding import squared_norms, sum_of_products, weighted_sum
    from dpps.learning.engines.per_example.base import PerExample
    from dpps.learning.engines.per_example.book import BookKeeping
    from dpps.learning.engines.per_example.calls import (
        Call,
        IrregularModel,
        replace_tensors,
        start_graph,
        tensors_of,
    )
    from dpps.learning.engines.per_example.chains import Chains
    from dpps.learning.engines.per_example.contributions import (
        Explicit,
        Outer,
        Rows,
        Tied,
        cautious,
        combine,
        gram_matrix,
    )
    from dpps.learning.engines.per_example.fallback import General
    from dpps.learning.engines.per_example.losses import ExampleLosses
    from dpps.learning.engines.per_example.madeup import Batches, moved
    from dpps.learning.engines.per_example.objective import Objective
    from dpps.learning.engines.per_example.picking import Constants, picked
    from dpps.learning.engines.per_example.plan import make_plan, run
    from dpps.learning.engines.per_example.probe import refuse_mixing
    from dpps.learning.engines.per_example.recorder import (
        CallSite,
        Observer,
        Recorder,
        Sites,
        body_of,
        name_of,
    )
    from dpps.learning.engines.per_example.rules.base import Rule, register, rule_for
    from dpps.learning.engines.per_example.rules.conv import Conv, ConvTransposed, each
    from dpps.learning.engines.per_example.rules.elementwise import Broadcast, Repeated
    from dpps.learning.engines.per_example.rules.embedding import Embedding, EmbeddingBag
    from dpps.learning.engines.per_example.rules.linear import AddedProduct, Linear, RightProduct
    from dpps.learning.engines.per_example.rules.loops import gru, lstm, plain
    from dpps.learning.engines.per_example.rules.norm import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
    from dpps.learning.engines.per_example.rules.recurrent import Recurrent
    from dpps.learning.engines.per_example.single import OneByOne, add_to, gradient_of_one, leaves_of
    from dpps.learning.engines.per_example.weights import Origin, Weights
    from dpps.learning.engines.workers import Workers, suits
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
    from dpps.learning.inputs import (
        Batch,
        as_datasets,
        as_examples,
        as_topology,
        as_unit,
        check_examples,
        tell_unscaled,
    )
    from dpps.learning.losses import one_number, refuse_inseparable
    from dpps.learning.metrics import METRICS, ClassRow, Metric, by_name, of_classes, per_class, rehearse
    from dpps.learning.nodes import Nodes, check_record
    from dpps.learning.partition import Partition
    from dpps.learning.released import Adam, Averaging, LocalOptimizers, Momentum
    from dpps.learning.schedules import FORMS, Constant, Cosine, Schedule, StepDecay, WarmUp, parse_schedule
    from dpps.learning.sizes import LARGEST, announce, for_every_node, parse_sizes
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
    from dpps.learning.updates import clip_rows, into_ball

__getattr__, __dir__, __all__ = lazy_imports(__name__)
