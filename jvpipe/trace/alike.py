"""Value numbering: finds equal values in a loss, such as a count that is computed twice.

Each variable gets a number, and variables with the same number are equal. The results of two
equations get the same number if the equations have the same primitive, the same parameters, and
operands with the same numbers. The type of a whole number matters only where it changes the value:
sum(mask).astype(float) and sum(mask, dtype=float) are the same count, but ~True is False and ~1
is -2.

If equal values get different numbers, fewer sums and means are recognized. Different values must
not get the same number, with one exception (`same` in `Alike.tell`): max(count, 1) gets the number
of count, because a replica computes count instead.
"""

from collections.abc import Hashable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Atom, JaxprEqn, Literal, Var
from jvpipe.trace.structure import comparable

_SAME = ("copy", "copy_p", "name", "stop_gradient", "optimization_barrier")
"""Primitives whose result equals their operand."""
_COUNTING = frozenset(
    {
        "add",
        "add_any",
        "mul",
        "max",
        "min",
        "abs",
        "square",
        "select_n",
        "broadcast_in_dim",
        "reshape",
        "squeeze",
        "reduce_sum",
        "convert_element_type",
    }
)
"""Primitives whose results are whole numbers if their operands are."""
_COMPARED = _COUNTING | {
    "sub",
    "neg",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and",
    "or",
    "not",
    "iota",
    "expand_dims",
    "transpose",
    "slice",
}
"""Primitives that are compared; each result of any other primitive gets a new number."""
_EXACT_BYTES = 4
"""The size of float32: whole numbers count as exact in floats of at least this size."""


class Alike:
    """The numbers of variables; variables with the same number are equal.

    `tell` must be called with equations in their order. The results of others are unlike all.

    >>> import jax, jax.numpy as jnp
    >>> def counts(mask):
    ...     count = jnp.sum(mask, dtype=jnp.float32)
    ...     return count, jnp.sum(mask).astype(jnp.float32), jnp.sum(~mask), jnp.sum(~mask.astype(int))
    >>> closed = jax.make_jaxpr(counts)(jnp.ones(3, bool))
    >>> alike = Alike()
    >>> for eqn in closed.jaxpr.eqns:
    ...     alike.tell(eqn)
    >>> a, b, c, d = map(alike.number, closed.jaxpr.outvars)
    >>> a == b, a == c, c == d
    (True, False, False)
    """

    def __init__(self) -> None:
        self._numbers: dict[Var, int] = {}
        self._number_of: dict[Hashable, int] = {}
        self._whole: set[int] = set()

    def tell(self, eqn: JaxprEqn, same: Atom | None = None) -> None:
        """Gives a number to the result of an equation, if its primitive is one that is compared.

        Args:
            eqn: the next equation.
            same: the value whose number the result gets, such as count for max(count, 1); None if
                the equation determines the number.
        """
        name = eqn.primitive.name
        is_followed = name in _COMPARED or name in _SAME
        if len(eqn.outvars) != 1 or not is_followed:
            return
        (out,) = eqn.outvars
        # Equal numbers mean equal values, by induction: an equation's number is made of its
        # primitive, its parameters and the numbers of its operands.
        operands = tuple(map(self.number, eqn.invars))
        if same is not None:
            self._numbers[out] = self.number(same)
        elif name in _SAME or (_keeps_whole(eqn) and operands[0] in self._whole):
            self._numbers[out] = operands[0]
        else:
            params = {"axes": eqn.params["axes"]} if name == "reduce_sum" else eqn.params
            dtype = _jax.aval(out).dtype
            # `not` depends on the type, and unsigned numbers wrap around.
            of_type = dtype if name == "not" or _is_unsigned(dtype) else None
            number = self._number((name, comparable(params), operands, of_type))
            self._numbers[out] = number
            if _is_whole(out) or (name in _COUNTING and self._whole.issuperset(operands)):
                self._whole.add(number)

    def number(self, atom: Atom) -> int:
        """Returns the number of a variable or a constant."""
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            # Scalars are compared as numbers, whatever their type.
            content = value.tobytes() if value.shape else complex(value)
            number = self._number(("literal", value.shape, content))
            is_real = value.shape == () and bool(np.isreal(value))
            is_whole = is_real and bool(np.real(value) == np.floor(np.real(value)))
        elif atom in self._numbers:
            return self._numbers[atom]
        else:
            number = self._number(atom)
            is_whole = _is_whole(atom)
        if is_whole:
            self._whole.add(number)
        return number

    def is_whole(self, atom: Atom) -> bool:
        """Tells whether a variable or a constant holds whole numbers, even if its type is float."""
        return self.number(atom) in self._whole

    def _number(self, key: Hashable) -> int:
        return self._number_of.setdefault(key, len(self._number_of))


def _keeps_whole(eqn: JaxprEqn) -> bool:
    """Tells whether an equation is a cast that keeps whole numbers, if they are below 2^24."""
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = (_jax.aval(atom).dtype for atom in (*eqn.invars, *eqn.outvars))
    if after == np.bool_:
        return before == np.bool_
    if np.issubdtype(after, np.integer):
        changes_sign = before != np.bool_ and _is_unsigned(before) != _is_unsigned(after)
        return after.itemsize >= before.itemsize and not changes_sign
    # Narrower floats round small counts already: bfloat16 rounds 257 to 256.
    return after == before or after.itemsize >= _EXACT_BYTES


def _is_unsigned(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.unsignedinteger)


def _is_whole(atom: Atom) -> bool:
    dtype = _jax.aval(atom).dtype
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.bool_))
