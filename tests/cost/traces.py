"""Models of the zoo, traced once for all tests of costs."""

from functools import cache

import optax

from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model_programs import Share, layer_programs
from jvpipe.programs.optimizer_pieces import OptimizerCut, cut_optimizer
from jvpipe.programs.store import shared_store
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.leaves import abstract
from jvpipe.trace.loss import trace_loss
from tests.zoo import CASES

MICROBATCHES = 4


@cache
def traced(name: str) -> Traced:
    m = CASES[name]()
    return build_graph(trace_loss(m.loss_fn, m.params, m.batch, m.rng, m.state, **m.options))


@cache
def programs(name: str, share: Share = "all") -> tuple[LayerPrograms, ...]:
    return layer_programs(shared_store(), traced(name), share)


@cache
def optimizer(name: str) -> OptimizerCut:
    graph = traced(name).graph
    return cut_optimizer(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        abstract(CASES[name]().params),
        [p.owner for p in graph.parameters],
        [len(p.readers) for p in graph.parameters],
        microbatches=None if graph.weighted else MICROBATCHES,
    )
