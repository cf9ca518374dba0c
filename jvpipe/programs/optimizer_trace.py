"""An optimizer traced as two lists of equations without calls and branches: `update` and `init`.

The update begins with the sums of the gradients and ends with the new parameters:

    accumulators -> sum, divided by a number -> optimizer.update -> optax.apply_updates

Frozen parameters bypass the optimizer, which sees optax's `MaskedNode` in their place.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe._jax import ClosedJaxpr, TreeDef
from jvpipe.ir.layers import Array
from jvpipe.ir.optimizer import Optimizer
from jvpipe.programs.state_types import at_fixed_types, traced_init
from jvpipe.programs.straight_line import straight_line, straightened
from jvpipe.programs.transformations import call_optimizer
from jvpipe.programs.transformations import transformation as transformation
from jvpipe.trace.leaves import check_leaves
from jvpipe.util.paths import path_name, path_names

Tree = Any
Path = tuple[Any, ...]


@dataclass(frozen=True)
class TracedOptimizer:
    """The equations of an optimizer over a whole tree of parameters.

    Attributes:
        update: takes the gradient accumulators of each parameter, the weight if there is one, the
            parameters and the state, in this order. It returns the parameters, the state and, with
            `grad_norm`, the norm of the gradients.
        init: takes the parameters, and returns the state.
        state: the leaves of the state.
        state_tree: the tree structure of the state.
        parameter_of: for each leaf of the state the parameter that it belongs to, or None.
        frozen: the parameters that are returned unchanged, and whose gradients are not read.
    """

    update: ClosedJaxpr
    init: ClosedJaxpr
    state: tuple[Array, ...]
    state_tree: TreeDef
    parameter_of: tuple[int | None, ...]
    frozen: frozenset[int] = frozenset()


def trace_optimizer(
    optimizer: Optimizer,
    params: Tree,
    readers: Sequence[int],
    microbatches: int | None,
    *,
    grad_norm: bool,
    weight_type: str = "float32",
    frozen: Collection[int] = (),
) -> TracedOptimizer:
    """Traces an optimizer for the shapes of `params`, without computing any array.

    Args:
        optimizer: any `optax.GradientTransformation`.
        params: arrays or `ShapeDtypeStruct`.
        readers: the number of gradient accumulators of each leaf, which are added up.
        microbatches: the number by which the sums are divided. If it is None, the update takes the
            divisor as an input, a scalar.
        grad_norm: whether the update also returns the norm of the gradients.
        weight_type: the type of a divisor that is an input.
        frozen: parameters that the optimizer does not see; it gets optax's `MaskedNode` in their
            place.
    """
    view = _View.of(optimizer, params, frozen)
    leaves = view.leaves
    sums = [[x] * n for x, n in zip(leaves, readers, strict=True)]
    weight = None if microbatches is not None else jax.ShapeDtypeStruct((), weight_type)

    def update(*arguments: Any) -> tuple[list[Any], Tree, Any]:
        sums, weight, values, state = arguments
        by = np.float32(microbatches) if weight is None else weight
        grads = view.gradients(sums, by)
        values, state = view.updated(grads, values, state)
        return values, state, norm(grads) if grad_norm else None

    def traced_at(state: Tree) -> ClosedJaxpr:
        closed = straight_line(update, sums, weight, leaves, state)
        view.check_shapes(closed.out_avals)
        return closed

    of_state = slice(len(leaves), -1 if grad_norm else None)
    init, first = traced_init(view.init, leaves)
    closed, state = at_fixed_types(traced_at, first, of_state)
    if state is not first:
        init, _ = traced_init(view.init, leaves, state)
    return TracedOptimizer(
        update=closed,
        init=straightened(init),
        state=arrays_of(state),
        state_tree=jax.tree.structure(state),
        parameter_of=view.parameter_of(state),
        frozen=frozenset(frozen),
    )


@dataclass(frozen=True)
class _View:
    """An optimizer, and the parameters that it sees: all parameters that are not frozen.

    Attributes:
        optimizer: any `optax.GradientTransformation`.
        leaves: the shapes and types of all parameters.
        tree: the tree of the parameters that the optimizer sees.
        seen: the numbers of these parameters among all parameters.
    """

    optimizer: Optimizer
    leaves: list[jax.ShapeDtypeStruct]
    tree: TreeDef
    seen: list[int]

    @staticmethod
    def of(
        optimizer: Optimizer,
        params: Tree,
        frozen: Collection[int],
    ) -> "_View":
        """Returns the view; in the place of each frozen parameter the tree has a `MaskedNode`.

        Args:
            optimizer: any `optax.GradientTransformation`.
            params: all parameters, as arrays or as shapes and types.
            frozen: the numbers of the frozen parameters among the leaves of `params`.
        """
        leaves = jax.tree.leaves(params)
        return _View(
            optimizer,
            leaves=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves],
            tree=jax.tree.structure(masked(params, frozen)),
            seen=[i for i in range(len(leaves)) if i not in frozen],
        )

    def params(self, values: Sequence[Any]) -> Tree:
        """Returns the tree that the optimizer sees, given the values of all parameters."""
        return self.tree.unflatten([values[i] for i in self.seen])

    def gradients(self, sums: Sequence[Sequence[Any]], by: Any) -> list[jax.Array]:
        """Returns the gradients of the parameters that the optimizer sees.

        Args:
            sums: the gradient accumulators of each parameter.
            by: the number by which the sum of the accumulators is divided.
        """
        return [mean(sums[i], by, self.leaves[i].dtype) for i in self.seen]

    def init(self, values: Sequence[Any]) -> Tree:
        """Returns the optimizer's first state, given the values of all parameters."""
        state = call_optimizer(self.optimizer.init, self.params(values))
        check_leaves(state, "result of the optimizer")
        return state

    def updated(
        self,
        grads: Sequence[Any],
        values: Sequence[Any],
        state: Tree,
    ) -> tuple[list[Any], Tree]:
        """Returns the values of all parameters after an update, and the new state.

        Args:
            grads: the gradients of the parameters that the optimizer sees.
            values: the values of all parameters.
            state: the optimizer's state.

        Raises:
            ValueError: the optimizer does not return updates in the tree of the parameters, or a
                leaf is not an array.
        """
        import optax  # late, because importing optax takes long

        params = self.params(values)
        answer = call_optimizer(
            self.optimizer.update,
            self.tree.unflatten(grads),
            state,
            params,
        )
        updates, state = _checked_answer(answer, self.tree)
        check_leaves((updates, state), "result of the optimizer")
        changed = jax.tree.leaves(optax.apply_updates(params, updates))
        new = list(values)
        for i, x in zip(self.seen, changed, strict=True):
            new[i] = x
        return new, state

    def check_shapes(self, new: Sequence[Any]) -> None:
        """Checks that the optimizer does not change the shape of any parameter.

        Args:
            new: the shapes of all parameters after an update.

        Raises:
            ValueError: a shape has changed.
        """
        before = self.params(self.leaves)
        after = self.params(new)
        pairs = zip(paths_of(before), jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        for path, x, y in pairs:
            if x.shape != y.shape:
                raise ValueError(
                    f"the optimizer changes the shape of parameter '{path_name(path)}' from "
                    f"{x.shape} to {y.shape}: give the parameter that shape, or use another "
                    "optimizer"
                )

    def parameter_of(self, state: Tree) -> tuple[int | None, ...]:
        """Returns, for each leaf of the state, the parameter that it belongs to, or None."""
        params = self.params(self.leaves)
        owners = match_paths(paths_of(state), paths_of(params))
        return tuple(None if i is None else self.seen[i] for i in owners)


def masked(tree: Tree, at: Collection[int]) -> Tree:
    """Returns a tree with an optax `MaskedNode` in place of each leaf whose number is in `at`."""
    import optax  # late, as above

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(optax.MaskedNode() if i in at else x for i, x in enumerate(leaves))


def arrays_of(tree: Tree) -> tuple[Array, ...]:
    """Returns the leaves of a tree of shapes, with their names."""
    return tuple(
        Array(name, leaf.shape, str(leaf.dtype), leaf.size * leaf.dtype.itemsize)
        for name, leaf in zip(path_names(tree), jax.tree.leaves(tree), strict=True)
    )


def paths_of(tree: Tree) -> list[Path]:
    """Returns the paths of a tree's leaves."""
    return [tuple(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def match_paths(state: Sequence[Path], params: Sequence[Path]) -> list[int | None]:
    """Returns the parameter that each leaf of the state belongs to, or None.

    A leaf belongs to a parameter if its path is a prefix followed by the parameter's path, and if
    this prefix mirrors the parameters. A prefix does so if every path that begins with it continues
    with the path of a parameter. So `hyperparams["b1"]` belongs to no parameter, even if a
    parameter is named `b1`, because `hyperparams["eps"]` has the same prefix and no parameter is
    named `eps`.

    >>> match_paths([("mu", "w"), ("mu", "b"), ("hyper", "b"), ("hyper", "c")], [("b",), ("w",)])
    [1, 0, None, None]
    """
    #     path               prefix     rest
    #     ("mu", "w")        "mu"       "w"         "mu" mirrors the parameters
    #     ("hyper", "b")     "hyper"    "b"         "hyper" does not, because of ("hyper", "c")
    leaf_of = {path: leaf for leaf, path in enumerate(params)}

    def mirrors(prefix: Path) -> bool:
        n = len(prefix)
        return all(path[n:] in leaf_of for path in state if path[:n] == prefix)

    cuts = [(path, n) for path in state for n in range(len(path) + 1)]
    prefixes = {path[:n] for path, n in cuts if path[n:] in leaf_of}
    mirrored = {prefix for prefix in prefixes if mirrors(prefix)}
    # If several prefixes of a path mirror the parameters, the shortest one counts, because the
    # longest parameter path follows it.
    owner_of: dict[Path, int] = {}
    for path, n in cuts:
        if path[:n] in mirrored:
            owner_of.setdefault(path, leaf_of[path[n:]])
    return [owner_of.get(path) for path in state]


def _checked_answer(answer: Any, tree: TreeDef) -> tuple[Tree, Tree]:
    """Returns the answer of an optimizer's `update`, which must be (updates, state).

    Args:
        answer: the result of `update`.
        tree: the tree structure of the parameters, which the updates must have.

    Raises:
        ValueError: the answer is not a pair of updates and a state.
    """
    is_pair = isinstance(answer, tuple) and len(answer) == 2
    if is_pair and jax.tree.structure(answer[0]) == tree:
        return answer
    raise ValueError(
        "the optimizer's update must return (updates, state), where updates has the tree structure "
        f"of the parameters; it returned {jax.tree.structure(answer)}"
    )


# `jit` traces leaves of one shape and type only once. With `inline`, the jaxpr is the same as
# without `jit`.
@functools.partial(jax.jit, static_argnums=2, inline=True)
def mean(
    parts: Sequence[jax.Array],
    by: Any,
    dtype: Any,
) -> jax.Array:
    """Returns a gradient: the sum of its accumulators, divided by a number.

    Args:
        parts: the accumulators.
        by: the number.
        dtype: the type of the gradient.
    """
    return (functools.reduce(jnp.add, parts) / by).astype(dtype)


@functools.partial(jax.jit, inline=True)
def _square_sum(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, np.float32))
    return jnp.sum(jnp.square(jnp.abs(wide)))


def norm(grads: Sequence[jax.Array]) -> jax.Array:
    """Returns the norm of all gradients."""
    return jnp.sqrt(sum(map(_square_sum, grads)))
