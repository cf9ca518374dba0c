"""The structure of equations: a value that is equal where two runs of them compute the same function alike."""

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jvpipe.trace.flatten import RULES
from jvpipe.trace.pullbacks import pullback


class Structure:
    """A hashable value that remembers its hash."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: tuple[Hashable, tuple[Hashable, ...], tuple[Hashable, ...]]) -> None:
        self._value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    @property
    def parts(self) -> tuple[Hashable, Sequence[Hashable], Sequence[Hashable]]:
        """What stands for the inputs, for each equation, and for the outputs."""
        return self._value

    def __repr__(self) -> str:
        return f"Structure({self._value!r})"

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Structure)
            and self._hash == other._hash
            and self._value == other._value
        )


def structure(
    eqns: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Atom], *, rules: bool = True
) -> Structure:
    """A value that is equal for two runs of equations which compute the same function in the same way.

    Variables are numbered in order of appearance. A custom derivative is compared by what its rule computes, unless
    the equations are not to be differentiated and `rules` do not count. Parameters that cannot be compared do so by
    identity: equal structures are equal programs; the converse need not hold.

    Args:
        eqns: in order.
        inputs: their free variables, in order.
        outputs: their results, in order.
        rules: compare derivative rules too.
    """
    numbers: dict[Var, int] = {}

    def number(
        var: Var,
    ) -> Hashable:  # the number says which variable, its first appearance also what it is
        if var in numbers:
            return numbers[var]
        numbers[var] = len(numbers)
        return numbers[var], _kind(var)

    def atom(a: Atom) -> Any:
        return ("literal", _kind(a), comparable(a.val)) if isinstance(a, Literal) else number(a)

    head = tuple(number(v) for v in inputs)
    body = tuple(
        (
            eqn.primitive.name,
            tuple(atom(a) for a in eqn.invars),
            _comparable_params(eqn, rules),
            tuple(number(v) for v in eqn.outvars),
        )
        for eqn in eqns
    )
    return Structure((head, body, tuple(atom(a) for a in outputs)))


def _kind(atom: Atom) -> Hashable:
    aval = atom.aval
    known = (
        getattr(aval, "shape", None),
        getattr(aval, "dtype", None),
        getattr(aval, "weak_type", False),
    )
    return str(aval) if None in known else known


def _comparable_params(eqn: JaxprEqn, rules: bool) -> Hashable:
    if eqn.primitive.name in RULES and not rules:
        return comparable(eqn.params["call_jaxpr"], rules=False)
    if eqn.primitive.name in RULES and not eqn.params["symbolic_zeros"]:
        return comparable(eqn.params["call_jaxpr"]), comparable(pullback(eqn)[0], rules=False)
    return tuple(sorted((k, comparable(v, rules=rules)) for k, v in eqn.params.items()))


class _Identity:
    """Wraps an incomparable value; equal to itself alone. Holds it, so that its id is not given again."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __lt__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return repr(self.value)


def comparable(value: Any, *, rules: bool = True) -> Any:
    """A hashable stand-in for a parameter or constant of a jaxpr; custom derivatives count if `rules` do."""
    if isinstance(value, ClosedJaxpr):
        consts = tuple(comparable(c) for c in value.consts)
        return (
            "jaxpr",
            structure(value.jaxpr.eqns, value.jaxpr.invars, value.jaxpr.outvars, rules=rules),
            consts,
        )
    if isinstance(value, Jaxpr):
        return (
            "jaxpr",
            structure(value.eqns, [*value.constvars, *value.invars], value.outvars, rules=rules),
        )
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return ("key", str(value.dtype), comparable(jax.random.key_data(value)))
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        array = np.asarray(value)
        return ("array", array.shape, str(array.dtype), array.tobytes())
    if isinstance(value, (tuple, list)):
        return tuple(comparable(v, rules=rules) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((str(k), comparable(v, rules=rules)) for k, v in value.items()))
    if isinstance(value, (set, frozenset)):  # in an order that no process has of its own
        return ("set", tuple(sorted((comparable(v, rules=rules) for v in value), key=repr)))
    if isinstance(value, float):
        return ("float", value.hex())
    if isinstance(value, (str, bytes, int, complex, bool, type(None), Collection)) and _hashable(
        value
    ):
        return (type(value).__name__, value)
    if _hashable(value) and type(value).__eq__ is not object.__eq__ and not callable(value):
        return value
    return _Identity(value)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
