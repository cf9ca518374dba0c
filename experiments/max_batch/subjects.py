"""The models of DawnPiper's tables at their real size, and what they cost at any micro-batch size.

Bytes and seconds are affine in the size, but where another kernel becomes the largest: a model is
traced at a few sizes, abstractly, and costs lie on the line between the two that are nearest.

The paper tells neither lengths nor types: records of 512 tokens (BERT), 1024 (GPT-2), 128 that are
read and 128 that are written (T5), and float32 explain its numbers best. Usual implementations of
BERT make logits of every position, not of the masked ones alone: so does this one.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import jax

from experiments.max_batch.saved import saving_operands
from jvpipe import models
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.cost.estimate import estimate
from jvpipe.cost.hardware import Cluster
from jvpipe.ir.optimizer import Optimizer
from jvpipe.models import Workload
from jvpipe.programs.optimizer_pieces import OptimizerCut, cut_optimizer
from jvpipe.programs.store import ProgramStore
from jvpipe.trace.graph import Traced
from jvpipe.trace.model import Model, trace_model

CLUSTER = find_cluster("a100-40gb")
WORKLOADS = {
    "BERT": lambda: models.load("bert", "large", tokens=512, mask_rate=0.998),
    "GPT-2": lambda: models.load("gpt2", "770m"),
    "T5": lambda: models.load("t5", "780m"),
    "AmoebaNet": lambda: models.load("amoebanet", "28m"),
}


ANCHORS = (2, 8, 32, 128, 512)
"""Micro-batch sizes at which a model is traced."""

Costing = Callable[[int], Costs]


def subject(name: str) -> tuple[Costing, Costing]:
    """A model's costs by micro-batch size: as our trace keeps values, and as PyTorch does."""
    workload = WORKLOADS[name]()
    return costings(workload, workload.optimizer(workload.steps), CLUSTER, ANCHORS)


def costings(
    workload: Workload, optimizer: Optimizer, cluster: Cluster, anchors: Sequence[int]
) -> tuple[Costing, Costing]:
    """The same of any model under any optimizer on any cluster, traced at the micro-batch sizes
    `anchors`.
    """
    params = jax.eval_shape(workload.init, jax.eval_shape(lambda: jax.random.key(0)))

    @cache
    def traced(size: int) -> Model:
        present = None if size == anchors[0] else traced(anchors[0]).traced
        batch, state, key = (
            workload.abstract_batch(size),
            workload.initial_state(),
            jax.random.key(0),
        )
        aux, stateful = workload.has_aux, workload.has_state
        return trace_model(
            workload.loss_fn, params, batch, key, state, present, has_aux=aux, has_state=stateful
        )

    @cache
    def pieces() -> OptimizerCut:
        model, graph = traced(anchors[0]), traced(anchors[0]).traced.graph
        owners, readers = (
            [p.owner for p in graph.parameters],
            [len(p.readers) for p in graph.parameters],
        )
        return cut_optimizer(optimizer, model.params, owners, readers, microbatches=None)

    def costing(form: Callable[[Traced], Traced]) -> Costing:
        @cache
        def at(size: int) -> Costs:
            return estimate(form(traced(size).traced), cluster, pieces(), store=ProgramStore())

        @cache
        def costs(size: int) -> Costs:
            above = min(max(bisect_left(anchors, size), 1), len(anchors) - 1)
            low, high = anchors[above - 1], anchors[above]
            return between(at(low), at(high), (size - low) / (high - low))

        return costs

    return costing(lambda traced: traced), costing(saving_operands)


def between(low: Costs, high: Costs, share: float) -> Costs:
    """Costs on the line through two; of a layer's options those that both have."""

    def mixed(a: Any, b: Any, **others: Any) -> Any:
        numbers = {
            f.name: getattr(a, f.name)
            for f in fields(a)
            if type(getattr(a, f.name)) in (int, float)
        }
        line = {name: type(x)(x + share * (getattr(b, name) - x)) for name, x in numbers.items()}
        return replace(a, **line, **others)

    def options(a: LayerCost, b: LayerCost) -> tuple[Option, ...]:
        known = {tuple(option.fates.items()): option for option in b.options}
        pairs = ((option, known.get(tuple(option.fates.items()))) for option in a.options)
        return tuple(mixed(option, other) for option, other in pairs if other)

    return replace(
        low,
        layers=tuple(
            mixed(a, b, options=options(a, b)) for a, b in zip(low.layers, high.layers, strict=True)
        ),
        edges=tuple(mixed(a, b) for a, b in zip(low.edges, high.edges, strict=True)),
        shared=tuple(mixed(a, b) for a, b in zip(low.shared, high.shared, strict=True)),
    )
