"""An optimizer as two straight lines of equations, its update and its init.

The name scope of each equation ends with the transformation that it comes from.
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
from jvpipe.ir.paths import path_name, path_names
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.inline import JITS, inlined

Tree = Any
Path = tuple[Any, ...]
Apply = Callable[[JaxprEqn, list[Any]], list[Any]]


@dataclass(frozen=True)
class TracedOptimizer:
    """The equations of an optimizer over a whole tree of parameters.

    `update` takes the gradient accumulators of each parameter, the weight if there is one, the parameters and the
    state; it returns parameters, state and, if asked for, the gradient norm. `init` takes the parameters.
    `parameter_of` says which parameter each leaf of the state belongs to, if to any. The `frozen` ones are returned as
    they came, and their gradients read by nobody.
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
        readers: per leaf, how many gradient accumulators there are to be summed.
        microbatches: what the sums are divided by; None if it is an input, a float32.
        grad_norm: also return the norm of the gradients.
        frozen: parameters that the optimizer does not see: in their place it finds optax's own sign of nothing.
    """
    import optax  # late, as in jvpipe/ir/optimizer.py

    leaves, tree = jax.tree.flatten(params)
    leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    masked = [optax.MaskedNode() if i in frozen else x for i, x in enumerate(leaves)]
    params = jax.tree.unflatten(tree, masked)
    tree, seen = jax.tree.structure(params), [i for i in range(len(leaves)) if i not in frozen]
    sums = [[x] * n for x, n in zip(leaves, readers, strict=True)]
    weight = None if microbatches is not None else jax.ShapeDtypeStruct((), np.float32)

    def init(leaves: list[Any]) -> Tree:
        return _call_optimizer(optimizer.init, tree.unflatten([leaves[i] for i in seen]))

    def update(
        sums: list[list[Any]], weight: Any, values: list[Any], state: Tree
    ) -> tuple[list[Any], Tree, Any]:
        by = np.float32(microbatches) if weight is None else weight
        grads = [mean(sums[i], by, leaves[i].dtype) for i in seen]
        params = tree.unflatten([values[i] for i in seen])
        answer = _call_optimizer(optimizer.update, tree.unflatten(grads), state, params)
        updates, state = _checked_answer(answer, tree)
        changed = zip(seen, jax.tree.leaves(optax.apply_updates(params, updates)), strict=True)
        new = dict(enumerate(values)) | dict(changed)
        return list(new.values()), state, norm(grads) if grad_norm else None

    traced_init, first = _standard(functools.partial(jax.make_jaxpr, return_shape=True))(init)(
        leaves
    )
    state = first
    for _ in range(3):
        closed = straight_line(update, sums, weight, leaves, state)
        _check_shapes(params, [closed.out_avals[i] for i in seen])
        new_state = closed.out_avals[len(leaves) : len(closed.out_avals) - grad_norm]
        settled = _settled(state, new_state)
        if list(map(_type, jax.tree.leaves(settled))) == list(map(_type, jax.tree.leaves(state))):
            break
        state = settled
    else:
        raise ValueError(
            f"the types of the optimizer's state do not settle: after three updates they are {state}"
        )
    if state is not first:
        traced_init = _standard(jax.make_jaxpr)(
            lambda leaves: jax.tree.map(_cast, init(leaves), state)
        )(leaves)
    return TracedOptimizer(
        closed,
        _straightened(traced_init),
        arrays_of(state),
        jax.tree.structure(state),
        tuple(
            None if i is None else seen[i] for i in match_paths(paths_of(state), paths_of(params))
        ),
        frozenset(frozen),
    )


def arrays_of(tree: Tree) -> tuple[Array, ...]:
    """The leaves of a tree of shapes, by name."""
    return tuple(map(_array, path_names(paths_of(tree)), jax.tree.leaves(tree)))


def paths_of(tree: Tree) -> list[Path]:
    """The paths of a tree's leaves."""
    return [tuple(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def match_paths(state: Sequence[Path], params: Sequence[Path]) -> list[int | None]:
    """The parameter that each leaf of the state belongs to: the path of the one ends with the path of the other.

    It has to do so for all leaves under what stands before: in `hyperparams["b1"]`, `hyperparams["eps"]` the former
    does not belong to a parameter `b1`.

    >>> match_paths([("mu", "w"), ("mu", "b"), ("hyper", "b"), ("hyper", "c")], [("b",), ("w",)])
    [1, 0, None, None]
    """
    leaf_of = {path: leaf for leaf, path in enumerate(params)}

    def mirrors(prefix: Path) -> bool:
        n = len(prefix)
        return all(path[n:] in leaf_of for path in state if path[:n] == prefix)

    prefixes = dict.fromkeys(
        path[:n] for path in state for n in range(len(path) + 1) if path[n:] in leaf_of
    )
    mirrored = {prefix for prefix in prefixes if mirrors(prefix)}
    splits = ([n for n in range(len(path) + 1) if path[:n] in mirrored] for path in state)
    return [leaf_of[path[ns[0] :]] if ns else None for path, ns in zip(state, splits, strict=True)]


def straight_line(fn: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Traces `fn` without calls and branches: of a `cond` both branches run and `select_n` picks.

    Both are free of side effects, so the results have the same bits.
    """
    return _straightened(_standard(jax.make_jaxpr)(fn)(*args))


def _straightened(traced: ClosedJaxpr) -> ClosedJaxpr:
    closed = inlined(traced, JITS)
    if not any(map(_jax.inner_jaxprs, closed.jaxpr.eqns)):
        return closed
    closed = _retraced(traced)
    while any(eqn.primitive.name in _EXPANDED for eqn in closed.jaxpr.eqns):
        closed = _retraced(closed)
    return closed


def transformation(eqn: JaxprEqn) -> str:
    """Finds the optax transformation that an equation of `straight_line` belongs to, such as `clip_by_global_norm`."""
    return scope(eqn).rpartition("/")[2]


def scope(eqn: JaxprEqn) -> str:
    """Gives the name scope of an equation, which ends with its transformation."""
    return "/".join(filter(None, (_jax.scope(eqn), _traced_in(eqn))))


def evaluate(closed: ClosedJaxpr, args: Sequence[Any], apply: Apply = _jax.bind) -> list[Any]:
    """Runs a jaxpr on values, each equation through `apply`.

    Args:
        closed: the jaxpr.
        args: its arguments.
        apply: runs an equation on values.
    """
    env = dict(
        zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *args], strict=True)
    )
    jaxprs.run(closed.jaxpr.eqns, env, apply)
    return jaxprs.read(closed.jaxpr.outvars, env)


def _retraced(closed: ClosedJaxpr) -> ClosedJaxpr:
    return flatten(lambda *xs: evaluate(closed, xs, _expand), *closed.in_avals)


def _expand(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    with jax.named_scope(scope(eqn)):
        return _EXPANDED.get(eqn.primitive.name, _jax.bind)(eqn, values)


def _cond(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    index, *operands = values
    results = [evaluate(branch, operands, _expand) for branch in eqn.params["branches"]]
    which = jax.lax.clamp(np.int32(0), index, np.int32(len(results) - 1))
    return [jax.lax.select_n(which, *cases) for cases in zip(*results, strict=True)]


def _primal(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """A function with a derivative rule of its own: no derivative is taken here."""
    return evaluate(eqn.params["call_jaxpr"], values, _expand)


_EXPANDED: dict[str, Apply] = {
    "cond": _cond,
    "custom_jvp_call": _primal,
    "custom_vjp_call": _primal,
}


def _call_optimizer(method: Callable[..., Any], *args: Tree) -> Any:
    """Calls `init` or `update`; frames inside this one are the optimizer's."""
    try:
        return method(*args)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise ValueError(
            f"{error}: gradients, state and parameters are all that an update of a pipeline knows. "
            "Use an optimizer that needs no more (for L-BFGS: linesearch=None)"
        ) from error


def _checked_answer(answer: Any, tree: TreeDef) -> tuple[Tree, Tree]:
    """What an optimizer's `update` returned; ValueError unless that is (updates, state)."""
    if isinstance(answer, tuple) and len(answer) == 2 and jax.tree.structure(answer[0]) == tree:
        return answer
    raise ValueError(
        "the optimizer's update must return (updates, state), the updates in the containers of the parameters, not "
        f"{jax.tree.structure(answer)}"
    )


def _traced_in(eqn: JaxprEqn) -> str:
    """The factory of the innermost `update` or `init` that traced an equation: `adam` of `adam.<locals>.update_fn`."""
    factory, outer = "", ""
    for file, function in _jax.call_stack(eqn):
        if function == _call_optimizer.__name__ and file == __file__:
            return factory or outer
        name, _, method = function.rpartition(".")
        if not factory and name and method in ("update", "update_fn", "init", "init_fn"):
            factory = name.partition(".")[0]
        outer = function.partition(".")[0]
    return ""


def _standard(trace: Callable[..., Any]) -> Callable[..., Any]:
    """`trace` under the promotion rules that optax is written for, whatever the user has set."""

    def traced(fn: Callable[..., Any], *args: Any) -> Any:
        def standard(*args: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return fn(*args)

        return trace(standard, *args)

    return traced


# Leaves alike are traced once: inlined, the jaxpr is what it would be without `jit`.
@functools.partial(jax.jit, static_argnums=2, inline=True)
def mean(parts: Sequence[jax.Array], by: Any, dtype: Any) -> jax.Array:
    """A gradient: the sum of its accumulators, divided."""
    return (functools.reduce(jnp.add, parts) / by).astype(dtype)


@functools.partial(jax.jit, inline=True)
def _square_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(jnp.abs(x.astype(jnp.promote_types(x.dtype, np.float32)))))


def norm(grads: Sequence[jax.Array]) -> jax.Array:
    """The norm of all gradients."""
    return jnp.sqrt(sum(map(_square_sum, grads)))


def _check_shapes(params: Tree, new: Sequence[Any]) -> None:
    for (path, before), after in zip(
        jax.tree_util.tree_leaves_with_path(params), new, strict=False
    ):
        if before.shape != after.shape:
            raise ValueError(
                f"the optimizer changes the shape of parameter '{path_name(path)}' from {before.shape} to "
                f"{after.shape}: give the parameter that shape, or use another optimizer"
            )


def _settled(old: Tree, new: Sequence[Any]) -> Tree:
    """The types of the state after an update, as a scan would have its carry: weak types give way to strong ones."""

    def settle(path: Path, before: Any, after: Any) -> jax.ShapeDtypeStruct:
        if before.shape != after.shape:
            raise ValueError(
                f"the optimizer changes the shape of its state '{path_name(path)}' from {before.shape} to {after.shape}"
            )
        weak = _type(before)[1] and _type(after)[1]
        return jax.ShapeDtypeStruct(before.shape, after.dtype, weak_type=weak)

    leaves, tree = jax.tree_util.tree_flatten_with_path(old)
    if len(leaves) != len(new):
        raise ValueError(
            f"the optimizer's state has {len(leaves)} leaves and {len(new)} after an update"
        )
    return tree.unflatten(
        [settle(path, before, after) for (path, before), after in zip(leaves, new, strict=True)]
    )


def _type(leaf: Any) -> tuple[Any, bool]:
    return leaf.dtype, bool(getattr(leaf, "weak_type", False))


def _cast(value: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    array = jnp.asarray(value)
    return array if array.dtype == like.dtype else jax.lax.convert_element_type(array, like.dtype)


def _array(name: str, leaf: jax.ShapeDtypeStruct) -> Array:
    return Array(name, tuple(leaf.shape), str(leaf.dtype), leaf.size * leaf.dtype.itemsize)
