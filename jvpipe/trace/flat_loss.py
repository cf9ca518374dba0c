"""A user's loss as a flat function, which returns a list of arrays, and its jaxpr.

The user's function gets a random key that is made from a seed. Its result is split into the loss,
the model state and aux. They are checked while the function is traced, so that the traceback of an
error still shows the user's function.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, TreeDef
from jvpipe.ir.weighted import Weighted
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.keys import is_key
from jvpipe.trace.leaves import Role, check_leaves, named_leaves
from jvpipe.util.paths import path_name

Tree = Any


@dataclass(frozen=True)
class FlatLoss:
    """A user's loss, to be traced.

    Args:
        function: the user's loss, a function of (params, [model state,] batch, key).
        key_of: makes the key of a micro-batch from a seed; None if the user gave no key.
        has_aux: whether the loss returns aux besides its value.
        has_state: whether the loss takes the model state and returns a new one.
    """

    function: Callable[..., Any]
    key_of: Callable[[jax.Array], jax.Array] | None
    has_aux: bool
    has_state: bool

    def traced(
        self,
        params: Tree,
        state: Tree,
        batch: Tree,
        seed: jax.ShapeDtypeStruct | None,
    ) -> tuple[ClosedJaxpr, TreeDef, TreeDef]:
        """Traces the loss at the given shapes.

        Args:
            params: the shapes of the parameters.
            state: the shapes of the model state; used only with `has_state`.
            batch: the shapes of a micro-batch.
            seed: the shape of the seed; None if the user gave no key.

        Returns:
            A jaxpr from the leaves of the arguments to the leaves of (loss, model state, aux); the
            tree of the loss; the tree of aux.

        Raises:
            ValueError: a result of the loss has a wrong form or type, or the loss has effects that
                a pipeline does not support.
        """
        returned: list[TreeDef] = []  # `flat` stores trees here, because it returns only arrays

        @_named_as(self.function)
        def flat(params: Tree, *rest: Any) -> list[Any]:
            *states, batch, seed = rest
            rng = None if self.key_of is None else self.key_of(seed)
            out = self.function(params, *states, batch, rng)
            loss, new_state, aux = _parts(out, self.has_aux, self.has_state)
            _check_loss(loss)
            _check_state(state, new_state)
            check_returned(aux, "leaf of aux")
            returned.append(jax.tree.structure((loss, aux)))
            return jax.tree.leaves((loss, new_state, aux))

        states = [state] if self.has_state else []
        closed = _traced(
            flat,
            [params, *states, batch, seed],
            with_key=self.key_of is not None,
        )
        _check_effects(closed)
        loss_tree, aux_tree = returned[-1].children()
        return closed, loss_tree, aux_tree


def _traced(
    flat: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    with_key: bool,
) -> ClosedJaxpr:
    """Traces a flat loss; adds hints to errors that are likely to be a user's mistake.

    Args:
        flat: the function.
        arguments: the shapes of its arguments.
        with_key: whether the user gave a key.
    """
    try:
        return flatten(flat, *arguments, keep_rules=True)
    except Exception as error:
        # Without a key, the loss gets None, which is then the likely cause of a TypeError.
        may_lack_key = not with_key and isinstance(error, TypeError)
        if may_lack_key and "PRNG key" in str(error):
            raise ValueError(
                "the loss uses its rng, but no key was given: give one to init, init(params, "
                "batch, jax.random.key(0))"
            ) from error
        if may_lack_key and ("key" in str(error) or "None" in str(error)):
            error.add_note(
                "The loss was traced without a key: if it needs a key, give one to init, such as "
                "jax.random.key(0)."
            )
        if isinstance(error, TypeError):  # a loss of (params, x, y) would get the key as its y
            error.add_note(
                "The loss was called with (params, batch, rng), or (params, model_state, batch, "
                "rng) with has_state; a loss with other arguments needs a wrapper: lambda params, "
                "batch, rng: loss(params, *batch)."
            )
        raise


def _named_as(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that makes errors show the name, place and arguments of `function`."""
    # Partials are unwrapped. For a callable object, errors show its `__call__`.
    while isinstance(function, functools.partial):
        function = function.func
    plain = inspect.unwrap(function)
    shown = plain if hasattr(plain, "__code__") else type(plain).__call__
    return functools.wraps(shown, assigned=(), updated=())


def _parts(
    out: Any,
    has_aux: bool,
    has_state: bool,
) -> tuple[Any, Any, Any]:
    """Returns value, model state and aux of a loss; None for a part that the loss does not have.

    Args:
        out: the result of the user's function.
        has_aux: whether it has aux.
        has_state: whether it has a model state.

    Raises:
        ValueError: the result is not a tuple with the right number of parts.
    """
    count = 1 + has_aux + has_state
    if count == 1:
        return out, None, None
    is_plain_tuple = isinstance(out, tuple) and not isinstance(out, Weighted)
    if not is_plain_tuple or len(out) != count:
        names = ["loss"] + ["new_model_state"] * has_state + ["aux"] * has_aux
        raise ValueError(
            f"with has_aux={has_aux}, has_state={has_state} the loss must return "
            f"({', '.join(names)})"
        )
    new_state = out[1] if has_state else None
    aux = out[-1] if has_aux else None
    return out[0], new_state, aux


def _check_loss(loss: Any) -> None:
    """Checks that the value of a loss is a real scalar, or a `Weighted` of two scalars."""
    for part in loss if isinstance(loss, Weighted) else (loss,):
        if not isinstance(part, (jax.Array, int, float, np.ndarray, np.generic)):
            hint = "; set has_aux=True if it returns (loss, aux)" if isinstance(part, tuple) else ""
            raise ValueError(
                f"the loss must be a scalar or jvpipe.Weighted, not {type(part).__name__}{hint}"
            )
        if np.shape(part) != ():
            raise ValueError(
                f"the loss must be a scalar, not of shape {np.shape(part)}: take its mean or sum"
            )
    first = loss.total if isinstance(loss, Weighted) else loss
    if not jnp.issubdtype(jnp.result_type(first), jnp.floating):
        raise ValueError(
            f"the loss must be a real floating-point scalar, not of type {jnp.result_type(first)}"
        )
    if not isinstance(loss, Weighted):
        return
    check_leaves(loss, "part of the loss")
    weight_type = jnp.result_type(loss.weight)
    if weight_type == np.bool_ or jnp.issubdtype(weight_type, jnp.complexfloating):
        raise ValueError(
            f"the weight of jvpipe.Weighted must be a real number, not of type {weight_type}: "
            "if it is a mask, take its sum"
        )


def check_returned(values: Tree, role: Role) -> None:
    """Checks that returned values are arrays that a device can hold, and no typed keys.

    Args:
        values: what the user's function returns.
        role: what messages call a leaf of the values.
    """
    check_leaves(values, role)
    for path, leaf in jax.tree_util.tree_leaves_with_path(values):
        if isinstance(leaf, jax.Array) and is_key(leaf):
            named = named_leaves(path, role)
            raise ValueError(f"{named} is a key: return jax.random.key_data(key)")


def _check_state(old: Tree, new: Tree) -> None:
    """Checks that the new model state has the structure, shapes and types of the old one."""
    old_tree = jax.tree.structure(old)
    new_tree = jax.tree.structure(new)
    if old_tree != new_tree:
        raise ValueError(
            f"the loss changes the structure of the model state from {old_tree} to {new_tree}"
        )
    old_leaves = jax.tree_util.tree_leaves_with_path(old)
    new_types = map(jax.typeof, jax.tree.leaves(new))
    for (path, before), after in zip(old_leaves, new_types, strict=True):
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise ValueError(
                f"the loss changes model state '{path_name(path)}' from "
                f"{before.dtype}{list(before.shape)} to {after.dtype}{list(after.shape)}"
            )


def _check_effects(closed: ClosedJaxpr) -> None:
    """Checks that a loss makes no mutable array, and calls no host code that must run exactly once
    or in order.
    """
    for eqn in jaxprs.every(closed.jaxpr.eqns):
        name = eqn.primitive.name
        if name == "new_ref":
            raise ValueError(
                f"the loss makes a mutable array (jax.new_ref), {_jax.aval(eqn.outvars[0])}, which "
                "cannot be cut into layers: use plain arrays, such as x = x.at[i].set(y)"
            )
        if name == "io_callback" or (name in jaxprs.DEBUGGING and _jax.is_ordered(eqn)):
            raise ValueError(
                f"the loss calls {name.replace('debug_', 'an ordered jax.debug.')}, which must run "
                "exactly once or in order, but a pipeline runs layers in parallel and some of them "
                "again: use jax.debug.callback (it runs once per micro-batch, in the forward), "
                "or return the values, with has_aux=True, and use them after the step"
            )
