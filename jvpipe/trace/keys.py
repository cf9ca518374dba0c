"""Random keys as data, so that layers alike but for their key can share one program.

A model derives a key per layer from the one it is given: `fold_in(key, 7)`, `split(key, 12)[7]`. The 7 would make
each layer a program of its own. Here it becomes a constant that the layer reads.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import JaxprEqn, Literal, Var


def is_key(atom: _jax.Atom) -> bool:
    """Whether a value is a typed random key."""
    return jnp.issubdtype(_jax.aval(atom).dtype, jax.dtypes.prng_key)


def index_key(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    """`keys[i]` with the index as an operand; None if the equation is anything else."""
    if eqn.primitive.name != "slice" or not is_key(eqn.invars[0]) or eqn.params["strides"] is not None:
        return None
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    sizes = [stop - start for start, stop in zip(starts, limits, strict=True)]
    return [jax.lax.dynamic_slice(values[0], [np.int32(start) for start in starts], sizes)]


def lift_key_constants(eqns: Sequence[JaxprEqn]) -> tuple[list[JaxprEqn], dict[Var, Any]]:
    """Replaces the integers that keys are derived with by variables; returns these with their values."""
    lifted: dict[Var, Any] = {}

    def lift(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name not in ("random_fold_in", "dynamic_slice") or not is_key(eqn.invars[0]):
            return eqn
        invars = list(eqn.invars)
        for i, atom in enumerate(invars):
            if isinstance(atom, Literal):
                invars[i] = _jax.new_variable(atom.aval)
                lifted[invars[i]] = np.asarray(atom.val, _jax.aval(atom).dtype)
        return eqn.replace(invars=invars)

    return [lift(eqn) for eqn in eqns], lifted
