"""Trees are taken apart and put together again, layers that are stacked apart."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from jvpipe.programs.optimizer_pieces import cut_optimizer
from jvpipe.runtime.engine.trees import Trees
from jvpipe.trace.stacks import Stacks

PARAMS = {"layers": np.arange(6, dtype=np.float32).reshape(2, 3), "last": np.ones(2, np.float32)}
STATE = {"seen": np.int32(3)}
STACKS = Stacks(jax.tree.structure(PARAMS), (None, 2))  # leaves are sorted by name: last, layers


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


TREES = Trees(shapes(PARAMS), None, None, shapes(STATE), STACKS)


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_each_stacked_layer_is_a_leaf_of_its_own_and_comes_back_into_its_stack() -> None:
    leaves = TREES.split_params(PARAMS)
    assert [leaf.tolist() for leaf in leaves] == [[1, 1], [0, 1, 2], [3, 4, 5]]
    assert_same(TREES.join_params(leaves), PARAMS)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"layers": np.zeros((3, 3)), "last": np.zeros(2)},
            r"params: 'layers' is float32\[3, 3\], it must be",
        ),
        ({"layers": np.zeros((2, 3))}, "params: 'last' is missing"),
        (
            {**PARAMS, "more": np.zeros(2)},
            "params: there is no 'more' in the tree of this pipeline",
        ),
    ],
)
def test_the_first_leaf_that_is_not_the_pipelines_is_named(given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TREES.split_params(given)


def test_the_optimizers_state_is_that_of_the_callers_tree() -> None:
    optimizer = optax.adam(0.1)
    split = TREES.stacks.split(PARAMS)
    cut = cut_optimizer(optimizer, shapes(split), [0, 0, 1], [1, 1, 1], microbatches=1)
    state = optimizer.init(PARAMS)
    leaves = TREES.split_optimizer_state(cut, state)
    assert len(leaves) == 1 + 2 * 3, "a count, and two moments of each leaf"
    assert_same(TREES.join_optimizer_state(cut, leaves), state)
    with pytest.raises(ValueError, match="the optimizer's state: "):
        TREES.split_optimizer_state(cut, optax.sgd(0.1, 0.9).init(PARAMS))


def test_the_model_state_is_joined_as_it_was() -> None:
    assert_same(TREES.join_model_state([np.int32(4)]), {"seen": np.int32(4)})
