"""How much is compiled: a deep model has few distinct layers, and each is compiled once per
device.
"""

from collections import Counter

import jax
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.models import load
from jvpipe.programs.model_programs import layer_programs
from jvpipe.programs.store import shared_store


@pytest.mark.thorough
def test_a_deep_bert_compiles_its_distinct_layers_only() -> None:
    workload = load("bert", "48", blocks=8, width=16, heads=2, vocabulary=300, tokens=8)
    shapes = workload.abstract_batch(4)
    batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    devices = jax.devices()[:2] * 2
    pipe = jvpipe.Pipeline(
        workload.loss_fn, optax.sgd(1e-3), 4, microbatches=2, planner="even", devices=devices
    )
    state = pipe.init(workload.init, batch, jax.random.key(0, impl="unsafe_rbg"))
    state, metrics = pipe.step(state, batch)
    assert np.isfinite(float(metrics["loss"]))
    distinct = len({id(p) for p in layer_programs(shared_store(), pipe.session.compiled.traced)})
    assert len(pipe.session.graph.layers) > 15
    assert distinct <= 6
    by_device = Counter(device for _, device in pipe.session.compiled.executables)
    # On each device: forward, backward, sums of gradients, update.
    assert max(by_device.values()) <= 4 * distinct
