"""A model is traced, and layers stacked for a scan are taken apart, with their parameters."""

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe.trace.model import trace_model

X = np.ones((2, 3), np.float32)


def stacked(params: dict[str, jax.Array], x: jax.Array, rng: None) -> jax.Array:
    return jnp.sum(
        jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])[0] @ params["head"]
    )


def test_a_plain_model_keeps_its_parameters() -> None:
    params = [np.eye(3, dtype=np.float32)] * 2
    model = trace_model(lambda p, x, rng: jnp.sum(jnp.tanh(x @ p[0]) @ p[1]), params, X, None)
    assert not model.stacks
    assert [leaf.shape for leaf in jax.tree.leaves(model.params)] == [(3, 3), (3, 3)]
    assert [len(p.readers) for p in model.traced.graph.parameters] == [1, 1]


def test_stacked_layers_are_layers_with_slices_of_their_own() -> None:
    params = {"w": np.zeros((4, 3, 3), np.float32), "head": np.eye(3, dtype=np.float32)}
    model = trace_model(stacked, params, X, None)
    assert model.stacks
    assert [leaf.shape for leaf in jax.tree.leaves(model.params)] == [(3, 3)] * 5
    assert len(model.traced.graph.layers) == 5


def test_an_earlier_traces_cuts_give_its_layers() -> None:
    params = {"w": np.zeros((4, 3, 3), np.float32), "head": np.eye(3, dtype=np.float32)}
    first = trace_model(stacked, params, X, None).traced
    assert trace_model(stacked, params, X, None, present=first).traced.graph == first.graph
