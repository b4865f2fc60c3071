"""summary.json: what came out of a run."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from dpps.privacy.promise import finite_or_none
from dpps.version import versions

if TYPE_CHECKING:
    from dpps.runs.run import Run


def summarise(run: Run) -> dict[str, Any]:
    """The summary of the nodes held here."""
    logs, nodes = run.log, run.nodes
    real = [log.real for log in logs if log.real is not None]
    estimated = [log.estimated for log in logs if log.estimated is not None]
    both = [(log.real, log.estimated) for log in logs if log.real is not None and log.estimated is not None]
    return {
        "test_accuracy": run.accuracy,
        "accuracy_by_epoch": run.accuracy_by_epoch,
        "accuracy_by_node": run.accuracy_by_node,
        "own_accuracy": run.own_accuracy,
        "own_accuracy_by_node": run.own_accuracy_by_node,
        "held_out_examples": sum(len(targets) for _, targets in run._held_out),
        "metrics_by_node": run.metrics_by_node,
        "metrics_by_epoch": run.metrics_by_epoch,
        "by_class": run.by_class,
        "rounds": len(logs),
        "clipped_share": run.clipped,
        "update_to_noise": run.update_to_noise,
        "final_loss": finite_or_none(logs[-1].loss) if logs else None,
        "shared_parameters": nodes.partition.shared_size,
        "local_parameters": nodes.partition.local_size,
        "own_statistics": run.own_statistics,
        "real_sensitivity_mean": fmean(real) if real else None,
        "real_sensitivity_max": max(real, default=None),
        "estimated_sensitivity_mean": fmean(estimated) if estimated else None,
        "estimated_sensitivity_max": max(estimated, default=None),
        "rounds_real_above_estimated": sum(r > e for r, e in both) if both else None,
        "privacy": run.privacy.to_json(),
        "bytes_sent_per_node": sum(log.bytes for log in logs),
        "seconds": run.seconds,
        "gradients": type(nodes.engine).__name__.lower(),
        **run.remarks,
        "chosen": chosen(run),
        "config": run.description.config,
        "versions": versions(),
    }


def chosen(run: Run) -> dict[str, Any]:
    """What the run chose itself, because nobody did: epochs, batch and rates, by their options' names."""
    plan = run.plan
    part = f"{plan.sampling[0]:.3g} of every node's examples"
    found = {
        "epochs": run.epochs,
        "batch-size": part if plan.batches and len(set(plan.sampling)) == 1 else plan.batch_size,
        "lr-shared": plan.lr_shared,
    }
    if run.nodes.partition.local_size:
        found["lr-local"] = plan.lr_local
    return {name: value for name, value in found.items() if run.description.config.get(name) is None}
