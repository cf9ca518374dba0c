"""Calls inside a jaxpr replaced by their bodies, equation by equation: nothing is traced again."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jvpipe.trace import jaxprs
from jvpipe.trace.keys import holds_keys

_CALLS = ("jit", "pjit")


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr | None:
    """Makes the same as one straight line, pruned; None if it has branches, loops or arrays of keys, not only calls.

    An equation of a body has the source of its outermost call. What depends on scalar constants alone is computed.

    >>> import jax, jax.numpy as jnp
    >>> closed = inlined(jax.make_jaxpr(lambda x: jax.jit(lambda y: jax.jit(jnp.sin)(y) + 1.0)(x))(2.0))
    >>> [str(eqn.primitive) for eqn in closed.jaxpr.eqns] if closed else []
    ['sin', 'add']
    """
    return merged(closed) if _is_plain(closed.jaxpr) else None


def merged(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Makes the same with the bodies of calls in their places, also of those that the compiler leaves apart."""
    line = _Line()
    outvars = line.run(closed.jaxpr, closed.consts, closed.jaxpr.invars)
    eqns = jaxprs.prune(line.eqns, outvars)
    jaxpr = closed.jaxpr.replace(constvars=list(line.constants), eqns=eqns, outvars=outvars)
    return ClosedJaxpr(jaxpr, list(line.constants.values()))


class _Line:
    """The equations so far, and the constants that they read."""

    def __init__(self) -> None:
        self.eqns: list[JaxprEqn] = []
        self.constants: dict[Var, Any] = {}

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Atom], call: JaxprEqn | None = None
    ) -> list[Atom]:
        """Appends the equations of a jaxpr, inside a `call` or outside all; returns its results.

        Args:
            jaxpr: whose equations they are.
            consts: its constants.
            args: what it is called with.
            call: the equation that calls it.
        """
        env: dict[Atom, Atom] = dict(zip(jaxpr.constvars, map(self._constant, jaxpr.constvars, consts), strict=True))
        env |= zip(jaxpr.invars, args, strict=True)
        for eqn in jaxprs.prune(jaxpr.eqns, jaxpr.outvars):
            atoms = [a if isinstance(a, Literal) else env[a] for a in eqn.invars]
            if eqn.primitive.name in (*_CALLS, "outlined"):
                body = eqn.params["jaxpr"]
                results = self.run(body.jaxpr, body.consts, atoms, call or eqn)
            else:
                results = _folded(eqn, atoms) or self._append(eqn, atoms, call)
            env |= zip(eqn.outvars, results, strict=True)
        return [a if isinstance(a, Literal) else env[a] for a in jaxpr.outvars]

    def _append(self, eqn: JaxprEqn, atoms: list[Atom], call: JaxprEqn | None) -> Sequence[Atom]:
        if call is None:
            self.eqns.append(eqn.replace(invars=atoms))
        else:  # the body may be that of another call, too
            outvars = [_jax.new_variable(_jax.aval(v)) for v in eqn.outvars]
            self.eqns.append(eqn.replace(invars=atoms, outvars=outvars, source_info=call.source_info))
        return self.eqns[-1].outvars

    def _constant(self, var: Var, value: Any) -> Atom:
        if not value.shape and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return Literal(np.asarray(value)[()], _jax.aval(var))
        known = next((v for v, x in self.constants.items() if x is value), None)
        new = known or _jax.new_variable(_jax.aval(var))
        self.constants[new] = value
        return new


def _is_plain(jaxpr: Jaxpr) -> bool:
    def plain(eqn: JaxprEqn) -> bool:
        if eqn.primitive.name in _CALLS:
            return eqn.params["name"] != "stack_layers" and _is_plain(eqn.params["jaxpr"].jaxpr)
        picks_key = eqn.primitive.name == "slice" and holds_keys(eqn.invars[0])
        return not picks_key and not _jax.inner_jaxprs(eqn)

    return all(map(plain, jaxpr.eqns))


def _folded(eqn: JaxprEqn, atoms: Sequence[Atom]) -> list[Atom] | None:
    values = [a.val for a in atoms if isinstance(a, Literal)]
    folded = jaxprs.folded(eqn, values) if len(values) == len(atoms) else None
    return folded and [Literal(x, _jax.aval(v)) for x, v in zip(folded, eqn.outvars, strict=True)]
