"""Makes sure that all processes of a run begin with the same values."""

from typing import Any

import jax

from jvpipe.ir.lazy_array import LazyArray
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.trace.digests import array_digest, leaf_lines, made_lines, shape_lines
from jvpipe.trace.leaves import is_initializer

Tree = Any


def agree_on_given(
    hosts: Hosts, params: Tree, batch: Tree, rng: jax.Array | None, model_state: Tree
) -> None:
    """Makes sure that all processes give `init` the same values.

    Every byte of parameters and model state is compared. If a function makes the parameters,
    the equations of the function are compared. For the batch, the shapes are compared, and
    also the bytes of each leaf that all processes give as an array. Batches of later steps are
    not compared, because reading them in full would take longer than some steps.

    Args:
        hosts: the processes.
        params: arrays, or a function that makes them.
        batch: a batch, or the shapes of its leaves.
        rng: the key of the run.
        model_state: arrays.

    Raises:
        Disagreement: two processes give different values.
    """
    if is_initializer(params):
        assert rng is not None
        parameters = made_lines(params, rng)
    else:
        parameters = leaf_lines(params)
    shapes = shape_lines(batch, "batch leaf")
    key = "None" if rng is None else f"{rng.dtype} {array_digest(rng)}"
    state = leaf_lines(model_state, "leaf of the model state")
    parts = [
        ("the key", key),
        ("the batch", "\n".join(shapes)),
        ("parameters", "\n".join(parameters)),
        ("model state", "\n".join(state)),
    ]
    hosts.agree("what init is given", parts)
    mine = leaf_lines(jax.tree.map(_unread, batch), "batch leaf")
    all_lines = hosts.exchange_json("batch", mine)
    # A leaf's values are compared only if every process has them. If a process has only the
    # leaf's shape, it has sent the same line as in `shapes`.
    by_all: list[str] = []
    for i, shape in enumerate(shapes):
        if all(lines[i] != shape for lines in all_lines):
            by_all.append(mine[i])
    hosts.agree("what init is given", [("the values of the batch", "\n".join(by_all))])


def _unread(leaf: Any) -> Any:
    """Returns a leaf, or only the shape of a lazy leaf, so that its values are not read here."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, LazyArray) else leaf
