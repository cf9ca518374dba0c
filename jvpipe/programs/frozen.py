"""What an optimizer leaves as it is: parameters that it returns unchanged, whose gradients nobody reads.

Both are read off the traced update, after what is certain whatever the gradients are:

    g -> 0 (set_to_zero)     p + 0 = p    p stays, and nobody reads g
    g -> mu -> 0 (masked)    p + 0 = p    likewise, and nobody reads mu but the next mu: it is not kept
    g -> norm -> others      p + 0 = p    p stays, but others need g

(p + 0 is p but for the sign of a zero, which a frozen parameter keeps.)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from jvpipe.programs.optimizer_trace import TracedOptimizer
from jvpipe.trace import jaxprs

_AS_IT_IS = frozenset(
    ("broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape", "stop_gradient")
)
"""What yields its operand, if that has the shape of the result, and a type that loses nothing."""
_OF_ZEROS = _AS_IT_IS | frozenset(("add", "add_any", "sub", "neg", "concatenate", "expand_dims"))
_OF_ZEROS |= frozenset(("rev", "slice", "squeeze", "transpose"))
"""What makes zeros of zeros."""


def without_frozen(
    traced: TracedOptimizer, readers: Sequence[int], frozen: Collection[int] = ()
) -> TracedOptimizer:
    """The same optimizer, which says what it freezes; it returns that as it came, and keeps no state for it.

    Args:
        traced: over all parameters.
        readers: per parameter, how many gradients the update takes.
        frozen: parameters of which it is known.
    """
    update = _Update.of(traced, readers)
    dead = {i: update.state_alone(i) for i in update.unchanged - set(frozen)}
    unread = {leaf for leaves in dead.values() if leaves is not None for leaf in leaves}
    found = {i for i, leaves in dead.items() if leaves is not None}
    if not found:
        return replace(traced, frozen=frozenset(frozen))
    kept = [k for k in range(len(traced.state)) if k not in unread]
    return TracedOptimizer(
        update.leaving(found, unread),
        _yielding(traced.init, kept),
        tuple(traced.state[k] for k in kept),
        _masked(traced.state_tree, unread),
        tuple(traced.parameter_of[k] for k in kept),
        frozenset(frozen) | found,
    )


@dataclass(frozen=True)
class _Update:
    """A traced update with its inputs and results told apart by what they are of."""

    closed: ClosedJaxpr
    gradients: tuple[tuple[Var, ...], ...]
    parameters: tuple[Var, ...]
    state: tuple[Var, ...]
    parameter_of: tuple[int | None, ...]

    @staticmethod
    def of(traced: TracedOptimizer, readers: Sequence[int]) -> "_Update":
        """The inputs are gradients, perhaps a weight, parameters and state."""
        inputs, count = traced.update.jaxpr.invars, len(readers)
        bounds = pairwise(accumulate(readers, initial=0))
        first = len(inputs) - len(traced.state) - count
        return _Update(
            traced.update,
            tuple(tuple(inputs[a:b]) for a, b in bounds),
            tuple(inputs[first : first + count]),
            tuple(inputs[first + count :]),
            traced.parameter_of,
        )

    @cached_property
    def unchanged(self) -> set[int]:
        """The parameters that the update returns as they came."""
        same = _same(self.closed, self.parameters)
        results = zip(self.parameters, self.closed.jaxpr.outvars, strict=False)
        return {
            i
            for i, (p, out) in enumerate(results)
            if isinstance(out, Var) and same.get(out) is p and _jax.aval(out).dtype == _type(p)
        }

    def state_alone(self, i: int) -> set[int] | None:
        """The leaves of the state that nothing but a parameter's gradient needs; None if anything else needs that.

        State that is made of the gradient and belongs to the parameter is looked at as the gradient is: who reads it?
        It ends, for each value is looked at once, and most often soon: what all parameters need leads to any of them.
        """
        count, alone, seen = len(self.parameters), set[int](), set[Var]()
        todo = list(self.gradients[i])
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen.add(v)
            for leaf in (k - count for k in self._results.get(v, ())):
                if not 0 <= leaf < len(self.state) or self.parameter_of[leaf] != i:
                    return None
                alone.add(leaf)
                todo.append(self.state[leaf])
            todo += self._made_of.get(v, ())
        return alone

    @cached_property
    def _made_of(self) -> Mapping[Var, Sequence[Var]]:
        """What the equations that read a value make."""
        made: dict[Var, list[Var]] = {}
        for eqn in self.closed.jaxpr.eqns:
            for v in dict.fromkeys(jaxprs.variables(eqn.invars)):
                made.setdefault(v, []).extend(eqn.outvars)
        return made

    @cached_property
    def _results(self) -> Mapping[Var, Sequence[int]]:
        """The results that a value is, but for parameters that stay as they are."""
        results: dict[Var, list[int]] = {}
        for k, out in enumerate(self.closed.jaxpr.outvars):
            if isinstance(out, Var) and k not in self.unchanged:
                results.setdefault(out, []).append(k)
        return results

    def leaving(self, frozen: Collection[int], unread: Collection[int]) -> ClosedJaxpr:
        """The update with frozen parameters as they came, and without state that nobody reads.

        Args:
            frozen: parameters.
            unread: leaves of the state.
        """
        jaxpr, count = self.closed.jaxpr, len(self.parameters)
        results = [
            self.parameters[i] if i in frozen else out for i, out in enumerate(jaxpr.outvars)
        ]
        outvars = [out for k, out in enumerate(results) if k - count not in unread]
        gone = {self.state[k] for k in unread}
        invars = [v for v in jaxpr.invars if v not in gone]
        eqns = jaxprs.prune(jaxpr.eqns, outvars)
        return ClosedJaxpr(
            jaxpr.replace(invars=invars, outvars=outvars, eqns=eqns), self.closed.consts
        )


def _same(closed: ClosedJaxpr, inputs: Sequence[Var]) -> Mapping[Atom, Var]:
    """The values that are equal to one of some inputs, whatever the other inputs are."""
    same: dict[Atom, Var] = {v: v for v in inputs}
    zeros: set[Atom] = {
        v
        for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        if np.size(x) and not np.any(x)
    }

    def is_zero(atom: Atom) -> bool:
        return not np.any(atom.val) if isinstance(atom, Literal) else atom in zeros

    for eqn in closed.jaxpr.eqns:
        origin = _origin(eqn, [same.get(a) if isinstance(a, Var) else None for a in eqn.invars])
        name, operands = eqn.primitive.name, list(map(is_zero, eqn.invars))
        if origin is not None:
            same[eqn.outvars[0]] = origin
        elif name in ("add", "add_any", "sub") and operands[1] and eqn.invars[0] in same:
            same[eqn.outvars[0]] = same[eqn.invars[0]]
        elif name in ("add", "add_any") and operands[0] and eqn.invars[1] in same:
            same[eqn.outvars[0]] = same[eqn.invars[1]]
        elif _makes_zeros(eqn, operands):
            zeros.update(eqn.outvars)
    return same


def _origin(eqn: JaxprEqn, origins: Sequence[Var | None]) -> Var | None:
    """The input that an equation yields as it is; None if it does not.

    Args:
        eqn: the equation.
        origins: the input that each operand is equal to.
    """
    if eqn.primitive.name == "select_n":
        first, *others = origins[1:]
        return first if all(origin is first for origin in others) else None
    if eqn.primitive.name not in _AS_IT_IS or origins[0] is None:
        return None
    out = _jax.aval(eqn.outvars[0])
    if out.shape != _jax.aval(eqn.invars[0]).shape:
        return None
    return origins[0] if _holds(out.dtype, _type(origins[0])) else None


def _holds(wide: np.dtype, narrow: np.dtype) -> bool:
    """Tells whether a type has all numbers of another one.

    >>> float32, bfloat16, int8 = map(jnp.dtype, ("float32", "bfloat16", "int8"))
    >>> _holds(float32, bfloat16), _holds(bfloat16, float32), _holds(float32, int8)
    (True, False, False)
    """
    if wide == narrow:
        return True
    if all(jnp.issubdtype(dtype, jnp.floating) for dtype in (wide, narrow)):
        a, b = jnp.finfo(wide), jnp.finfo(narrow)
        return a.nmant >= b.nmant and a.nexp >= b.nexp
    if all(jnp.issubdtype(dtype, jnp.integer) for dtype in (wide, narrow)):
        a, b = jnp.iinfo(wide), jnp.iinfo(narrow)
        return a.min <= b.min and b.max <= a.max
    return False


def _makes_zeros(eqn: JaxprEqn, zeros: Sequence[bool]) -> bool:
    """Tells whether an equation makes zeros, of operands some of which are `zeros`."""
    match eqn.primitive.name:
        case "mul" if any(zeros):
            # By a number that is known: zero by one that is computed, and might be infinite, is none.
            others = [x for x, zero in zip(eqn.invars, zeros, strict=True) if not zero]
            return all(isinstance(x, Literal) and np.all(np.isfinite(x.val)) for x in others)
        case "select_n":
            return all(zeros[1:])
        case "dynamic_slice":
            return zeros[0]
        case name:
            return name in _OF_ZEROS and all(zeros)


def _type(var: Var) -> np.dtype:
    return _jax.aval(var).dtype


def _yielding(closed: ClosedJaxpr, kept: Sequence[int]) -> ClosedJaxpr:
    """A program that yields some of its results alone."""
    results = [closed.jaxpr.outvars[k] for k in kept]
    eqns = jaxprs.prune(closed.jaxpr.eqns, results)
    return ClosedJaxpr(closed.jaxpr.replace(eqns=eqns, outvars=results), closed.consts)


def _masked(tree: _jax.TreeDef, unread: Collection[int]) -> _jax.TreeDef:
    """The tree of the state with optax's own sign of nothing in place of leaves that nobody reads."""
    import optax  # late, as in jvpipe/ir/optimizer.py

    leaves = [optax.MaskedNode() if k in unread else 0 for k in range(tree.num_leaves)]
    return jax.tree.structure(jax.tree.unflatten(tree, leaves))
