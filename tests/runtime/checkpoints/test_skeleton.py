"""A tree's shape survives JSON: its containers, its keys, its types."""

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict

from jvpipe.runtime.state.checkpoints import skeleton
from jvpipe.trace.leaves import abstract


class Moments(NamedTuple):
    mean: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclass
class Averages:
    values: Any
    name: str = field(default="mean", metadata={"static": True})


class Net(nnx.Module):
    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


X = np.zeros((2, 3), np.float32)
TREES = {
    "named tuple": Moments(X, {"n": np.int32(0)}),
    "frozen": FrozenDict({"a": {"b": X}}),
    "ordered": OrderedDict(b=X, a=None),
    "dataclass": Averages([X, (X,)], "median"),
    "whole numbers": {1: X, 2: X},
    "nnx": nnx.split(Net(), nnx.Param, ...)[2],
    "keys": {"typed": jax.random.key(0), "rbg": jax.random.split(jax.random.key(0, impl="rbg"), 3)},
    "bfloat16": jnp.zeros(2, jnp.bfloat16),
    "number": {"a": 1.0},
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_comes_back(name: str) -> None:
    given = abstract(TREES[name])
    loaded = skeleton.load_container(json.loads(json.dumps(skeleton.dump(given))))
    assert jax.tree.structure(loaded) == jax.tree.structure(given)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(given), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def test_a_class_that_is_not_there_is_named() -> None:
    told = json.dumps(skeleton.dump(abstract(TREES["named tuple"])))
    with pytest.raises(
        ValueError, match=r"of class Momenta of .*test_skeleton: import that before restore"
    ):
        skeleton.load_container(json.loads(told.replace("Moments", "Momenta")))


def test_what_cannot_be_written_is_none() -> None:
    assert skeleton.dump(Averages(X, name=object)) is None  # pyright: ignore[reportArgumentType]
