"""Makes hashable values by which equal lists of equations are recognized."""

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jvpipe.trace.flatten import RULES
from jvpipe.trace.keys import is_key
from jvpipe.trace.pullbacks import pullback


class Structure:
    """A hashable value that stores its hash."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: tuple[Hashable, tuple[Hashable, ...], tuple[Hashable, ...]]) -> None:
        self._value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    @property
    def parts(self) -> tuple[Hashable, Sequence[Hashable], Sequence[Hashable]]:
        """Hashable stand-ins for the inputs, for each equation, and for the outputs."""
        return self._value

    def __repr__(self) -> str:
        return f"Structure({self._value!r})"

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure):
            return False
        # Values are large, so hashes are compared first. They usually differ if the values do.
        return self._hash == other._hash and self._value == other._value


def structure(
    eqns: Sequence[JaxprEqn],
    inputs: Sequence[Var],
    outputs: Sequence[Atom],
    *,
    rules: bool = True,
) -> Structure:
    """Returns a value that is equal for two lists of equations only if they are equal programs.

    The names of variables do not count, because variables are numbered in order of appearance. A
    custom derivative is compared by the equations of its rule. Values that cannot be compared are
    equal only to themselves. So equal programs may get different structures, but different programs
    never get the same structure.

    Args:
        eqns: the equations, in order.
        inputs: the free variables of the equations, in order.
        outputs: the results of the program, in order.
        rules: whether to compare derivative rules, which forward-only programs do not use.
    """
    numbers: dict[Var, int] = {}

    # A variable is compared by its number, and at its first appearance also by shape and type.
    def number(var: Var) -> Hashable:
        if var in numbers:
            return numbers[var]
        numbers[var] = len(numbers)
        return numbers[var], _kind(var)

    def atom(a: Atom) -> Any:
        if isinstance(a, Literal):
            return "literal", _kind(a), comparable(a.val)
        return number(a)

    def equation(eqn: JaxprEqn) -> Hashable:
        read = tuple(map(atom, eqn.invars))
        params = _comparable_params(eqn, rules)
        return eqn.primitive.name, read, params, tuple(map(number, eqn.outvars))

    # The order matters, because numbers are given at first appearance.
    head = tuple(map(number, inputs))
    body = tuple(map(equation, eqns))
    return Structure((head, body, tuple(map(atom, outputs))))


def _kind(atom: Atom) -> Hashable:
    """Returns a hashable stand-in for the shape and type of a variable or literal."""
    aval = atom.aval
    shape = getattr(aval, "shape", None)
    dtype = getattr(aval, "dtype", None)
    kind = shape, dtype, getattr(aval, "weak_type", False)
    return str(aval) if None in kind else kind


def _comparable_params(eqn: JaxprEqn, rules: bool) -> Hashable:
    if eqn.primitive.name in RULES and not rules:
        return comparable(eqn.params["call_jaxpr"], rules=False)
    if eqn.primitive.name in RULES and not eqn.params["symbolic_zeros"]:
        rule, _ = pullback(eqn)
        return comparable(eqn.params["call_jaxpr"]), comparable(rule, rules=False)
    params = ((k, comparable(v, rules=rules)) for k, v in eqn.params.items())
    return tuple(sorted(params))


class _Identity:
    """Wraps a value that cannot be compared, so that it is equal only to itself.

    The wrapper keeps the value alive, so that no other object gets the same id.
    """

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
    """Returns a hashable stand-in for a parameter or constant of a jaxpr.

    Args:
        value: the parameter or constant.
        rules: whether to compare derivative rules in it.
    """
    if isinstance(value, ClosedJaxpr):
        jaxpr = value.jaxpr
        consts = tuple(comparable(c) for c in value.consts)
        return "jaxpr", structure(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, rules=rules), consts
    if isinstance(value, Jaxpr):
        inputs = [*value.constvars, *value.invars]
        return "jaxpr", structure(value.eqns, inputs, value.outvars, rules=rules)
    if isinstance(value, jax.Array) and is_key(value):
        return ("key", str(value.dtype), comparable(jax.random.key_data(value)))
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        array = np.asarray(value)
        return ("array", array.shape, str(array.dtype), array.tobytes())
    if isinstance(value, (tuple, list)):
        return tuple(comparable(v, rules=rules) for v in value)
    if isinstance(value, dict):
        items = ((str(k), comparable(v, rules=rules)) for k, v in value.items())
        return tuple(sorted(items))
    if isinstance(value, (set, frozenset)):  # sorted, because the order differs between processes
        members = (comparable(v, rules=rules) for v in value)
        return "set", tuple(sorted(members, key=repr))
    if isinstance(value, float):
        return ("float", value.hex())
    if isinstance(value, complex):  # as for floats, 0.0 and -0.0 differ
        return ("complex", value.real.hex(), value.imag.hex())
    if not _hashable(value):
        return _Identity(value)
    if isinstance(value, (str, bytes, int, bool, type(None), Collection)):
        return (type(value).__name__, value)
    # Functions, and objects that do not define equality, are only equal to themselves.
    compares = type(value).__eq__ is not object.__eq__ and not callable(value)
    return value if compares else _Identity(value)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
