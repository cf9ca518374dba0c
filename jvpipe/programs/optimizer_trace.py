"""An optimizer traced as two straight lines of equations: its `update` and its `init`.

Calls are inlined, and both sides of a branch run, so that each equation can be placed by itself.
The name scope of each equation ends with the transformation that the equation comes from, such as
`clip_by_global_norm`. Messages and `OptimizerCut.cross_layer` use these names.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, JaxprEqn, TreeDef
from jvpipe.ir.layers import Array
from jvpipe.ir.optimizer import Optimizer
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.inline import JITS, inlined
from jvpipe.util.paths import path_name, path_names

Tree = Any
Path = tuple[Any, ...]
Apply = Callable[[JaxprEqn, list[Any]], list[Any]]


@dataclass(frozen=True)
class TracedOptimizer:
    """The equations of an optimizer over a whole tree of parameters.

    Attributes:
        update: takes the gradient accumulators of each parameter, the weight if there is one, the
            parameters and the state, in this order. It returns the parameters, the state and, if
            asked for, the norm of the gradients.
        init: takes the parameters, and returns the state.
        state: the leaves of the state.
        state_tree: the tree of these leaves.
        parameter_of: for each leaf of the state the parameter that it belongs to, or None.
        frozen: the parameters that are returned unchanged, and whose gradients nobody reads.
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
    frozen: Collection[int] = (),
) -> TracedOptimizer:
    """Traces an optimizer at the shapes of `params`; no array is made.

    Args:
        optimizer: any `optax.GradientTransformation`.
        params: arrays or `ShapeDtypeStruct`.
        readers: the number of gradient accumulators of each leaf, which are added up.
        microbatches: the number by which the sums are divided; None if it is an input (a float32).
        grad_norm: whether the update also returns the norm of the gradients.
        frozen: parameters that the optimizer does not see; in their place it finds optax's
            `MaskedNode`.
    """
    import optax  # late, as in jvpipe/ir/optimizer.py

    leaves, whole_tree = jax.tree.flatten(params)
    leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    masked = [optax.MaskedNode() if i in frozen else x for i, x in enumerate(leaves)]
    params = jax.tree.unflatten(whole_tree, masked)
    # `tree` is what the optimizer sees, `seen` are the numbers of its leaves among all parameters.
    tree = jax.tree.structure(params)
    seen = [i for i in range(len(leaves)) if i not in frozen]
    sums = [[x] * n for x, n in zip(leaves, readers, strict=True)]
    weight = None if microbatches is not None else jax.ShapeDtypeStruct((), np.float32)

    def init(leaves: list[Any]) -> Tree:
        params = tree.unflatten([leaves[i] for i in seen])
        return _call_optimizer(optimizer.init, params)

    def update(
        sums: list[list[Any]],
        weight: Any,
        values: list[Any],
        state: Tree,
    ) -> tuple[list[Any], Tree, Any]:
        by = np.float32(microbatches) if weight is None else weight
        grads = [mean(sums[i], by, leaves[i].dtype) for i in seen]
        params = tree.unflatten([values[i] for i in seen])
        answer = _call_optimizer(
            optimizer.update,
            tree.unflatten(grads),
            state,
            params,
        )
        updates, state = _checked_answer(answer, tree)
        changed = jax.tree.leaves(optax.apply_updates(params, updates))
        return _replaced(values, seen, changed), state, norm(grads) if grad_norm else None

    def traced_at(state: Tree) -> ClosedJaxpr:
        closed = straight_line(update, sums, weight, leaves, state)
        _check_shapes(params, [closed.out_avals[i] for i in seen])
        return closed

    make_init = _standard(functools.partial(jax.make_jaxpr, return_shape=True))
    traced_init, first = make_init(init)(leaves)
    of_state = slice(len(leaves), -1 if grad_norm else None)
    closed, state = _at_fixed_types(traced_at, first, of_state)
    if state is not first:
        # The first state gets the types that later updates give it, so that one program serves all
        # updates.
        settled_init = lambda leaves: jax.tree.map(_cast, init(leaves), state)  # noqa: E731
        traced_init = _standard(jax.make_jaxpr)(settled_init)(leaves)
    owners = match_paths(paths_of(state), paths_of(params))
    return TracedOptimizer(
        update=closed,
        init=_straightened(traced_init),
        state=arrays_of(state),
        state_tree=jax.tree.structure(state),
        parameter_of=tuple(None if i is None else seen[i] for i in owners),
        frozen=frozenset(frozen),
    )


def _at_fixed_types(
    traced_at: Callable[[Tree], ClosedJaxpr],
    state: Tree,
    of_state: slice,
) -> tuple[ClosedJaxpr, Tree]:
    """Traces an update at types of the state that the update does not change.

    Args:
        traced_at: traces the update at a given state.
        state: the shapes and types that `init` gives the state.
        of_state: the positions of the state among the update's results.

    Returns:
        The update, and the state's shapes and types: the object `state` itself, if the
        first update changes no type.

    Raises:
        ValueError: an update changes a shape, or the types still change after three updates.
    """
    for _ in range(3):
        closed = traced_at(state)
        settled = _settled(state, closed.out_avals[of_state])
        if _types(settled) == _types(state):
            return closed, state
        state = settled
    raise ValueError(
        f"the types of the optimizer's state do not settle: after three updates they are {state}"
    )


def arrays_of(tree: Tree) -> tuple[Array, ...]:
    """Returns the leaves of a tree of shapes, by name."""
    names = path_names(paths_of(tree))
    return tuple(
        Array(name, leaf.shape, str(leaf.dtype), leaf.size * leaf.dtype.itemsize)
        for name, leaf in zip(names, jax.tree.leaves(tree), strict=True)
    )


def paths_of(tree: Tree) -> list[Path]:
    """Returns the paths of a tree's leaves."""
    return [tuple(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def match_paths(state: Sequence[Path], params: Sequence[Path]) -> list[int | None]:
    """Returns the parameter that each leaf of the state belongs to, or None.

    A leaf belongs to a parameter if its path is a prefix followed by the parameter's path. Every
    other path that begins with this prefix must also go on with the path of a parameter. So
    `hyperparams["b1"]` belongs to no parameter, even if a parameter is named `b1`:
    `hyperparams["eps"]` has the same prefix, and no parameter is named `eps`.

    >>> match_paths([("mu", "w"), ("mu", "b"), ("hyper", "b"), ("hyper", "c")], [("b",), ("w",)])
    [1, 0, None, None]
    """
    #     path               prefix     rest
    #     ("mu", "w")        "mu"       "w"         "mu" mirrors: after it, all paths are parameters
    #     ("hyper", "b")     "hyper"    "b"         "hyper" does not, because of ("hyper", "c")
    leaf_of = {path: leaf for leaf, path in enumerate(params)}

    def mirrors(prefix: Path) -> bool:
        n = len(prefix)
        return all(path[n:] in leaf_of for path in state if path[:n] == prefix)

    cuts = [(path, n) for path in state for n in range(len(path) + 1)]
    prefixes = {path[:n] for path, n in cuts if path[n:] in leaf_of}
    mirrored = {prefix for prefix in prefixes if mirrors(prefix)}
    # If several prefixes of a path mirror, the shortest counts, because the longest parameter path
    # follows it.
    owner_of: dict[Path, int] = {}
    for path, n in cuts:
        if path[:n] in mirrored:
            owner_of.setdefault(path, leaf_of[path[n:]])
    return [owner_of.get(path) for path in state]


def straight_line(fn: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Traces `fn` without calls and branches.

    All branches of a `cond` run, and `select_n` picks the results of one of them. Running the other
    branches changes nothing: an optimizer with side effects is refused (`ownership.py`).
    """
    return _straightened(_standard(jax.make_jaxpr)(fn)(*args))


def _straightened(traced: ClosedJaxpr) -> ClosedJaxpr:
    closed = inlined(traced, JITS)
    if not any(map(_jax.inner_jaxprs, closed.jaxpr.eqns)):
        return closed
    # An expanded body may have calls of its own. The loop ends, because each turn removes a level
    # of nesting.
    closed = _retraced(traced)
    while any(eqn.primitive.name in _EXPANDED for eqn in closed.jaxpr.eqns):
        closed = _retraced(closed)
    return closed


def transformation(eqn: JaxprEqn) -> str:
    """Returns the transformation that an equation comes from, such as `clip_by_global_norm`."""
    return scope_of(eqn).rpartition("/")[2]


def scope_of(eqn: JaxprEqn) -> str:
    """Returns the name scope of an equation, which ends with its transformation."""
    return "/".join(filter(None, (_jax.scope(eqn), _traced_in(eqn))))


def _retraced(closed: ClosedJaxpr) -> ClosedJaxpr:
    def run(*values: Any) -> list[Any]:
        return jaxprs.evaluate(closed, values, _expand)

    return flatten(run, *closed.in_avals)


def straight_body(scan: JaxprEqn) -> ClosedJaxpr:
    """Returns the body of a scan without calls and branches, as `straight_line` does."""
    traced = scan.params["jaxpr"]
    return straight_line(lambda *values: jaxprs.evaluate(traced, values), *traced.in_avals)


def _expand(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    with jax.named_scope(scope_of(eqn)):
        return _EXPANDED.get(eqn.primitive.name, _jax.bind)(eqn, values)


def _cond(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    index, *operands = values
    branches = eqn.params["branches"]
    results = [jaxprs.evaluate(branch, operands, _expand) for branch in branches]
    last = np.int32(len(branches) - 1)
    which = jax.lax.clamp(np.int32(0), index, last)
    return [jax.lax.select_n(which, *cases) for cases in zip(*results, strict=True)]


def _primal(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Runs a function without its own derivative rule, because no derivative is taken here."""
    return jaxprs.evaluate(eqn.params["call_jaxpr"], values, _expand)


_EXPANDED: dict[str, Apply] = {
    "cond": _cond,
    "custom_jvp_call": _primal,
    "custom_vjp_call": _primal,
}


def _call_optimizer(method: Callable[..., Any], *args: Tree) -> Any:
    """Calls `init` or `update`; in a call stack, the frames inside this one are the optimizer's."""
    try:
        return method(*args)
    except TypeError as error:
        # Optimizers that take the value of the loss, or the loss itself, say so in their signature.
        if "required keyword-only argument" not in str(error):
            raise
        raise ValueError(
            f"{error}: gradients, state and parameters are all that an update of a pipeline knows. "
            "Use an optimizer that needs no more (for L-BFGS: linesearch=None)"
        ) from error


def _replaced(values: Sequence[Any], at: Sequence[int], changed: Sequence[Any]) -> list[Any]:
    """Returns values, with those at some positions replaced."""
    new = list(values)
    for i, x in zip(at, changed, strict=True):
        new[i] = x
    return new


def _checked_answer(answer: Any, tree: TreeDef) -> tuple[Tree, Tree]:
    """Returns the answer of an optimizer's `update`.

    Raises ValueError unless it is (updates, state), the updates in the tree of the parameters.
    """
    is_pair = isinstance(answer, tuple) and len(answer) == 2
    if is_pair and jax.tree.structure(answer[0]) == tree:
        return answer
    raise ValueError(
        "the optimizer's update must return (updates, state), the updates in the containers of the parameters, not "
        f"{jax.tree.structure(answer)}"
    )


def _traced_in(eqn: JaxprEqn) -> str:
    """Returns the factory of the innermost `update` or `init` that traced an equation.

    The factory is the function that returned the `update` or `init`: `adam` is the factory of
    `adam.<locals>.update_fn`. The equation's call stack is searched from the inside out. If no
    frame is an `update` or `init`, the outermost function of the optimizer is returned.
    """
    factory, outer = "", ""
    for file, function in _jax.call_stack(eqn):
        if function == _call_optimizer.__name__ and file == __file__:
            return factory or outer
        name, _, method = function.rpartition(".")
        is_traced = method in ("update", "update_fn", "init", "init_fn")
        if name and is_traced and not factory:
            factory = name.partition(".")[0]
        outer = function.partition(".")[0]
    return ""


def _standard(trace: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `trace` under the promotion rules that optax is written for, not under the user's."""

    def traced(fn: Callable[..., Any], *args: Any) -> Any:
        def standard(*args: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return fn(*args)

        return trace(standard, *args)

    return traced


# Under `jit` leaves that are alike are traced once. With `inline` the jaxpr is what it would be
# without `jit`.
@functools.partial(jax.jit, static_argnums=2, inline=True)
def mean(
    parts: Sequence[jax.Array],
    by: Any,
    dtype: Any,
) -> jax.Array:
    """Returns a gradient: the sum of its accumulators, divided by a number."""
    return (functools.reduce(jnp.add, parts) / by).astype(dtype)


@functools.partial(jax.jit, inline=True)
def _square_sum(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, np.float32))
    return jnp.sum(jnp.square(jnp.abs(wide)))


def norm(grads: Sequence[jax.Array]) -> jax.Array:
    """Returns the norm of all gradients."""
    return jnp.sqrt(sum(map(_square_sum, grads)))


def _check_shapes(params: Tree, new: Sequence[Any]) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, before), after in zip(leaves, new, strict=False):
        if before.shape != after.shape:
            raise ValueError(
                f"the optimizer changes the shape of parameter '{path_name(path)}' from {before.shape} to "
                f"{after.shape}: give the parameter that shape, or use another optimizer"
            )


def _settled(old: Tree, new: Sequence[Any]) -> Tree:
    """Returns the types of the state after an update, by the rules that a scan has for its carry.

    Args:
        old: the state before the update.
        new: the types of its leaves after the update.

    Raises:
        ValueError: the update changes a shape, or the number of leaves.
    """

    def settle(
        path: Path,
        before: Any,
        after: Any,
    ) -> jax.ShapeDtypeStruct:
        if before.shape != after.shape:
            raise ValueError(
                f"the optimizer changes the shape of its state '{path_name(path)}' from {before.shape} to {after.shape}"
            )
        # A weak type may become strong, but a strong type never becomes weak.
        weak = _type(before)[1] and _type(after)[1]
        return jax.ShapeDtypeStruct(
            before.shape,
            after.dtype,
            weak_type=weak,
        )

    leaves, tree = jax.tree_util.tree_flatten_with_path(old)
    if len(leaves) != len(new):
        raise ValueError(
            f"the optimizer's state has {len(leaves)} leaves and {len(new)} after an update"
        )
    pairs = zip(leaves, new, strict=True)
    return tree.unflatten(settle(path, before, after) for (path, before), after in pairs)


def _types(tree: Tree) -> list[tuple[Any, bool]]:
    return list(map(_type, jax.tree.leaves(tree)))


def _type(leaf: Any) -> tuple[Any, bool]:
    return leaf.dtype, bool(getattr(leaf, "weak_type", False))


def _cast(value: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    array = jnp.asarray(value)
    if array.dtype == like.dtype:
        return array
    return jax.lax.convert_element_type(array, like.dtype)
