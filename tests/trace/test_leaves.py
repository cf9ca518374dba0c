"""Leaves of pytrees: their names, shapes and types."""

import jax
import numpy as np
import pytest

from jvpipe.trace.leaves import abstract
from jvpipe.util.paths import path_name
from tests.zoo import flax_nnx


def test_the_value_of_a_flax_variable_is_not_named() -> None:
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(flax_nnx(1).params)]
    assert "blocks/0/up/kernel" in paths
    assert path_name((jax.tree_util.DictKey("value"),)) == "value"


def test_shapes_have_the_types_of_a_device() -> None:
    key = jax.random.key(0)
    tree = {
        "numpy": np.zeros((2, 3)),
        "python": 0.5,
        "key": key,
        "none": None,
        "shape": jax.ShapeDtypeStruct((2,), int),
    }
    shapes = abstract(tree)
    assert jax.tree.structure(shapes) == jax.tree.structure(tree)
    assert (shapes["numpy"].shape, shapes["numpy"].dtype) == ((2, 3), np.float32)
    assert (shapes["python"].shape, shapes["python"].dtype, shapes["python"].weak_type) == (
        (),
        np.float32,
        True,
    )
    assert (shapes["key"].shape, shapes["key"].dtype) == ((), key.dtype)
    assert shapes["shape"].dtype == np.int32


def test_a_leaf_that_is_no_array_is_named_with_the_cure() -> None:
    with pytest.raises(
        ValueError,
        match=r"parameter 'act' is of type function, which is not an array: .*eqx.partition\(model, eqx",
    ):
        abstract({"w": np.zeros(2), "act": lambda x: x})
    with pytest.raises(
        ValueError,
        match=r"leaf of the model state '1' is of type str, which is not an array: keep it out",
    ):
        abstract([np.zeros(2), "a"], "leaf of the model state")
    with pytest.raises(ValueError, match="the only batch leaf is of type str"):
        abstract("a", "batch leaf")
    with pytest.raises(
        ValueError, match=r"parameter 'w' is being traced: use jvpipe outside of jax\.jit"
    ):
        jax.jit(lambda w: abstract({"w": w}))(np.zeros(2))
