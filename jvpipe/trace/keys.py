"""Random keys as data, so that layers that differ only in their key can share one program.

A model derives the key of each layer from its own key: `fold_in(key, 7)` or `split(key, 12)[7]`.
With the literal 7, each layer would need a separate program, so the number becomes an input that
the layer reads. This takes two steps. While a loss is flattened, `index_key` rewrites the slice
`keys[7]` as a dynamic slice, which takes 7 as an operand. Then `lift_key_constants` replaces that
operand by a variable.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import JaxprEqn, Literal, Var

IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
"""The implementations of random bits in JAX."""
_FEW = 4
"""An index into at most this many keys stays a literal: it makes few variants of a layer."""


def is_key(value: Any) -> bool:
    """Tells whether an array, or a shape and type, consists of typed random keys."""
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def dtype_of(name: str) -> Any:
    """Returns the dtype with a given name, which may be a type of typed keys.

    >>> str(dtype_of("key<rbg>")), str(dtype_of("bfloat16"))
    ('key<rbg>', 'bfloat16')
    """
    if not name.startswith("key<"):
        return jnp.dtype(name)
    return next(dtype for dtype in _key_types() if str(dtype) == name)


def implementation_of(dtype: Any) -> str:
    """Returns JAX's name for the implementation of a type of typed keys, such as "rbg"."""
    return _key_types()[dtype]


def _key_types() -> dict[Any, str]:
    makers = {impl: partial(jax.random.key, 0, impl=impl) for impl in IMPLEMENTATIONS}
    return {jax.eval_shape(make).dtype: impl for impl, make in makers.items()}


def derives_key(eqn: JaxprEqn) -> bool:
    """Tells whether an equation makes keys from a key."""
    return eqn.primitive.name in ("random_split", "random_fold_in")


def holds_keys(atom: _jax.Atom) -> bool:
    """Tells whether a value is an array of more than `_FEW` keys, typed or raw."""
    aval = _jax.aval(atom)
    # A raw key is a row of 2 or 4 words.
    is_matrix = aval.dtype == np.uint32 and aval.ndim > 1
    are_raw = is_matrix and aval.shape[-1] in (2, 4)
    are_keys = is_key(aval) or are_raw
    return are_keys and aval.ndim > 0 and aval.shape[0] > _FEW


def picks_key(eqn: JaxprEqn) -> bool:
    """Tells whether an equation is `keys[i]` with a literal index into many keys."""
    if eqn.primitive.name != "slice" or not holds_keys(eqn.invars[0]):
        return False
    return set(eqn.params["strides"] or [1]) == {1}


def index_key(eqn: JaxprEqn, keys: Any) -> Any:
    """Computes the result `keys[i]` of `eqn` by a slice whose index is an operand."""
    return take(keys, eqn.params["start_indices"], _jax.aval(eqn.outvars[0]).shape)


def take(
    keys: Any,
    starts: Sequence[int],
    sizes: Sequence[int],
) -> Any:
    """Returns a part of an array of keys, by a slice whose indices are operands.

    Args:
        keys: the array of keys.
        starts: the first index along each axis.
        sizes: the number of elements along each axis.
    """
    places = [np.int32(start) for start in starts]
    return jax.lax.dynamic_slice(keys, places, sizes)


def lift_key_constants(eqns: Sequence[JaxprEqn]) -> tuple[list[JaxprEqn], dict[Var, Any]]:
    """Replaces the literal integers in derivations of keys by variables.

    Returns:
        The equations; and the new variables, each with the value of its integer.
    """
    lifted: dict[Var, Any] = {}

    # The integer is the second operand of `fold_in(key, i)`, and also of `dynamic_slice(keys, i)`,
    # by which `index_key` has replaced `keys[i]`.
    def lift(eqn: JaxprEqn) -> JaxprEqn:
        name = eqn.primitive.name
        if name == "random_fold_in" or (name == "dynamic_slice" and holds_keys(eqn.invars[0])):
            key, number, *rest = eqn.invars
            if isinstance(number, Literal):
                aval = _jax.aval(number)
                variable = _jax.new_variable(aval)
                lifted[variable] = np.asarray(number.val, aval.dtype)
                return eqn.replace(invars=[key, variable, *rest])
        return eqn

    return [lift(eqn) for eqn in eqns], lifted
