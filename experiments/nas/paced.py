"""An Evolved-Transformer-like supernet whose blocks also sleep, in the proportions of its real
size.

The arrays are tiny. What a block's branches make sleeps for the seconds that a roofline of an A100
gives for the block at 768 units and 1024 tokens, so scaled that blocks take 16 ms on average; a
tanh behind it needs the result, so that computing it again costs the sleep again.
"""

import statistics
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.migration.naps import nap
from jvpipe import models
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.estimate import estimate
from jvpipe.models.architecture import Block, Supernet
from jvpipe.models.evolved_transformer import EvolvedTransformerConfig, TwoBranches, supernet
from jvpipe.models.kinds import Kind
from jvpipe.models.workload import Workload
from jvpipe.programs.store import ProgramStore
from jvpipe.trace.model import Model, trace_model

LEFT, RIGHT = ("attention4", "glu", "conv7_swish", "ffn4_relu"), ("none", "ffn1_relu")
"""Of the branches' operations, those of this search: eight kinds of blocks, to be compiled for
every device.
"""
MEAN_S = 16e-3
MICRO_BATCH = 2


def paced_workload(slots: int) -> tuple[Workload, Supernet]:
    """The tiny workload with so many slots, and its supernet of sleeping blocks."""
    workload, seconds = (
        models.load("evolved-transformer", "tiny", blocks=slots),
        seconds_of_blocks(),
    )

    @cache
    def kind_of(config: EvolvedTransformerConfig, block: Block) -> Kind:
        return Kind(lambda rngs: PacedBlock(config, block, seconds[block], rngs=rngs))

    return workload, smaller(supernet(workload.config, kind_of))


def smaller(found: Supernet) -> Supernet:
    """With fewer operations to choose from."""
    return replace(found, space=replace(found.space, left=LEFT, right=RIGHT))


def traced(workload: Workload, found: Supernet, architecture: Any, micro_batch: int) -> Model:
    """An architecture, traced from shapes alone."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(lambda key: found.params_of(architecture, key), key)
    batch = workload.abstract_batch(micro_batch)
    return trace_model(
        found.loss_of(architecture), params, batch, jax.random.key(0), None, has_state=False
    )


@cache
def seconds_of_blocks() -> dict[Block, tuple[float, float]]:
    """What the forward and the backward of each block sleep."""
    workload = models.load(
        "evolved-transformer", "small", blocks=len(LEFT) * len(RIGHT), dropout=0.0
    )
    assert workload.supernet is not None
    found, seconds = smaller(workload.supernet), dict[Block, tuple[float, float]]()
    for architecture in found.space.covering():
        model = traced(workload, found, architecture, MICRO_BATCH)
        costs = estimate(model.traced, find_cluster("a100-40gb"), fates=False, store=ProgramStore())
        labels = map(model.traced.graph.label, model.traced.graph.layers)
        named = dict(zip(labels, costs.layers, strict=True))
        seconds |= {
            block: (named[name].forward_s, named[name].backward_s)
            for _, name, block in architecture.blocks()
        }
    scale = MEAN_S / statistics.mean(map(sum, seconds.values()))
    return {
        block: (scale * forward_s, scale * backward_s)
        for block, (forward_s, backward_s) in seconds.items()
    }


class PacedBlock(TwoBranches):
    """A block whose branches' sum sleeps, forward and backward."""

    def __init__(
        self,
        config: EvolvedTransformerConfig,
        block: Block,
        seconds: tuple[float, float],
        *,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(config, block, rngs=rngs)
        self.seconds = seconds

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """The tokens after the block."""
        return x + jnp.tanh(nap(super().__call__(x, key) - x, *self.seconds))
