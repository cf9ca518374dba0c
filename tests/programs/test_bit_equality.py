"""Layers in two programs are told from layers in one by their bits: equal ones, and ones that
differ on purpose.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jvpipe.programs.bit_equality import same_bits, same_update
from jvpipe.programs.optimizer_pieces import OptimizerCut, cut_optimizer
from jvpipe.programs.store import shared_store
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.layer_split import split_layers, split_points
from jvpipe.trace.loss import trace_loss

W, X = np.eye(4, dtype=np.float32), np.ones((2, 4), np.float32)
DEVICE = jax.devices()[0]


def model(act: Any = jnp.tanh) -> tuple[Traced, Traced]:
    """A layer of two products as one, and as two."""
    loss = trace_loss(lambda p, x, rng: jnp.sum(act(x @ p[0]) @ p[1]), [W, W], X, None)
    whole = build_graph(loss, cuts=[])
    return whole, split_layers(
        whole, {0: split_points(whole, 0, lambda eqns, outputs: [1.0] * len(eqns))[0]}
    )


def test_halves_that_compute_the_same_have_the_same_bits() -> None:
    whole, halves = model()
    assert len(halves.bodies) == 2
    assert same_bits(shared_store(), DEVICE, whole, 0, halves)


def test_halves_of_a_layer_that_gives_no_numbers_cannot_be_told() -> None:
    whole, halves = model(lambda x: jnp.tanh(x) / 0.0)
    assert not same_bits(shared_store(), DEVICE, whole, 0, halves)


WHOLE, HALVES = [0, 0, 1], [0, 1, 2]
"""Who owns three parameters: the first two a layer, or its halves."""


def cut(optimizer: optax.GradientTransformation, owners: list[int]) -> OptimizerCut:
    shapes = [jax.ShapeDtypeStruct((4, 4), np.float32)] * 3
    return cut_optimizer(optimizer, shapes, owners, [1, 1, 1], microbatches=2)


def test_an_update_is_the_same_whoever_owns_the_parameters_unless_it_is_another() -> None:
    plain, store = optax.sgd(0.1), shared_store()
    assert same_update(store, DEVICE, cut(plain, WHOLE), 0, cut(plain, HALVES))
    assert not same_update(store, DEVICE, cut(plain, WHOLE), 0, cut(optax.sgd(0.2), HALVES))


def test_what_layers_tell_of_a_norm_is_compared_in_any_order() -> None:
    clipped, store = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), shared_store()
    assert same_update(store, DEVICE, cut(clipped, WHOLE), 0, cut(clipped, HALVES))
