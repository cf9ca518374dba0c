"""The parameters that an optimizer freezes: it returns them unchanged,
and nobody reads their gradients.

Both are read off the traced update, after what is certain whatever the gradients are:

    g -> 0 (set_to_zero)     p + 0 = p    p stays, and nobody reads g
    g -> mu -> 0 (masked)    p + 0 = p    as above, and nobody reads mu but the next mu: it is not kept
    g -> norm -> others      p + 0 = p    p stays, but others need g

(p + 0 is p except for the sign of a zero, which a frozen parameter keeps.)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from jvpipe.programs.optimizer_trace import TracedOptimizer
from jvpipe.trace import jaxprs

_AS_IT_IS = frozenset(
    "broadcast_in_dim convert_element_type copy copy_p reshape stop_gradient".split()  # noqa: SIM905
)
"""Primitives that yield their operand, if it has the shape of the result and the type loses
nothing.
"""
_OF_ZEROS = _AS_IT_IS | frozenset(
    "add add_any sub neg concatenate expand_dims rev slice squeeze transpose".split()  # noqa: SIM905
)
"""Primitives that make zeros of zeros."""


def without_frozen(
    traced: TracedOptimizer,
    readers: Sequence[int],
    frozen: Collection[int] = (),
) -> TracedOptimizer:
    """Returns the same optimizer with what it freezes told: it returns that as it came, and keeps
    no state for it.

    Args:
        traced: over all parameters.
        readers: per parameter, how many gradients the update takes.
        frozen: parameters that are known to be frozen.
    """
    update = _Update.of(traced, readers)
    newly_frozen: set[int] = set()
    unread: set[int] = set()
    for i in update.unchanged - set(frozen):
        leaves = update.state_alone(i)
        if leaves is not None:
            newly_frozen.add(i)
            unread |= leaves
    if not newly_frozen:
        return replace(traced, frozen=frozenset(frozen))
    kept = [k for k in range(len(traced.state)) if k not in unread]
    first_state = traced.init.jaxpr.outvars
    return TracedOptimizer(
        update=update.leaving(newly_frozen, unread),
        init=jaxprs.yielding(traced.init, [first_state[k] for k in kept]),
        state=tuple(traced.state[k] for k in kept),
        state_tree=_masked(traced.state_tree, unread),
        parameter_of=tuple(traced.parameter_of[k] for k in kept),
        frozen=frozenset(frozen) | newly_frozen,
    )


@dataclass(frozen=True)
class _Update:
    """A traced update, with its inputs told apart.

    Attributes:
        closed: the update.
        gradients: per parameter, those that the update takes.
        parameters: as it takes them.
        state: the leaves of the optimizer's state.
        parameter_of: the parameter that each leaf of the state belongs to, if to any.
    """

    closed: ClosedJaxpr
    gradients: tuple[tuple[Var, ...], ...]
    parameters: tuple[Var, ...]
    state: tuple[Var, ...]
    parameter_of: tuple[int | None, ...]

    @staticmethod
    def of(traced: TracedOptimizer, readers: Sequence[int]) -> "_Update":
        """Tells the inputs apart: they are gradients, perhaps a weight, parameters and state."""
        # From the front the gradients are counted, from the back the rest: a weight may stand
        # between them.
        #
        #     gradients of 0 | of 1 | ... | (weight) | parameters | state
        inputs = traced.update.jaxpr.invars
        bounds = pairwise(accumulate(readers, initial=0))
        after_parameters = len(inputs) - len(traced.state)
        first = after_parameters - len(readers)
        return _Update(
            closed=traced.update,
            gradients=tuple(tuple(inputs[a:b]) for a, b in bounds),
            parameters=tuple(inputs[first:after_parameters]),
            state=tuple(inputs[after_parameters:]),
            parameter_of=traced.parameter_of,
        )

    @cached_property
    def unchanged(self) -> set[int]:
        """The parameters that the update returns as they came."""
        same = _same(self.closed, self.parameters)
        unchanged = set()
        results = zip(self.parameters, self.closed.jaxpr.outvars, strict=False)
        for i, (p, out) in enumerate(results):
            is_same = isinstance(out, Var) and same.get(out) is p
            if is_same and _jax.aval(out).dtype == _type(p):
                unchanged.add(i)
        return unchanged

    def state_alone(self, i: int) -> set[int] | None:
        """Returns the leaves of the state that only a parameter's gradient needs.

        It follows the gradient forward through all that reads it. State that is made of it and
        belongs to the parameter is followed in turn, from the next update's input on. It ends,
        since each value is looked at once; most often soon, since what all parameters need leads to
        any of them.

        Args:
            i: the parameter.

        Returns:
            None if anything else needs the gradient.
        """
        count = len(self.parameters)
        alone = set[int]()
        seen = set[Var]()
        todo = list(self.gradients[i])
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen.add(v)
            for result in self._results.get(v, ()):
                leaf = result - count
                is_state = 0 <= leaf < len(self.state)
                if not is_state or self.parameter_of[leaf] != i:
                    return None
                alone.add(leaf)
                todo.append(self.state[leaf])
            todo += self._made_of.get(v, ())
        return alone

    @cached_property
    def _made_of(self) -> Mapping[Var, Sequence[Var]]:
        """By value, what the equations that read it make."""
        made_of: dict[Var, list[Var]] = {}
        for eqn in self.closed.jaxpr.eqns:
            for v in dict.fromkeys(jaxprs.variables(eqn.invars)):
                made_of.setdefault(v, []).extend(eqn.outvars)
        return made_of

    @cached_property
    def _results(self) -> Mapping[Var, Sequence[int]]:
        """By value, the numbers of the results that it is.

        Parameters that stay as they are do not count.
        """
        results: dict[Var, list[int]] = {}
        for k, out in enumerate(self.closed.jaxpr.outvars):
            if isinstance(out, Var) and k not in self.unchanged:
                results.setdefault(out, []).append(k)
        return results

    def leaving(self, frozen: Collection[int], unread: Collection[int]) -> ClosedJaxpr:
        """Returns the update with frozen parameters as they came, and without state that nobody
        reads.

        Args:
            frozen: parameters.
            unread: leaves of the state.
        """
        results = list(self.closed.jaxpr.outvars)
        for i in frozen:
            results[i] = self.parameters[i]
        # Results are the parameters, then the state.
        count = len(self.parameters)
        left = [out for k, out in enumerate(results) if k - count not in unread]
        narrowed = jaxprs.yielding(self.closed, left)
        dropped = {self.state[k] for k in unread}
        invars = [v for v in narrowed.jaxpr.invars if v not in dropped]
        return ClosedJaxpr(narrowed.jaxpr.replace(invars=invars), narrowed.consts)


def _same(closed: ClosedJaxpr, inputs: Sequence[Var]) -> Mapping[Atom, Var]:
    """Returns by value the input that it is equal to, whatever the other inputs are.

    One pass over the equations, in order: it knows of each value whether it is an input, or zero,
    or neither.
    """
    same: dict[Atom, Var] = {v: v for v in inputs}
    zeros: set[Atom] = set()
    for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if np.size(x) and not np.any(x):
            zeros.add(v)

    def is_zero(atom: Atom) -> bool:
        if isinstance(atom, Literal):
            return not np.any(atom.val)
        return atom in zeros

    def origin_of(atom: Atom) -> Var | None:
        return same.get(atom) if isinstance(atom, Var) else None

    for eqn in closed.jaxpr.eqns:
        origins = list(map(origin_of, eqn.invars))
        are_zeros = list(map(is_zero, eqn.invars))
        origin = _origin(eqn, origins, are_zeros)
        if origin is not None:
            same[eqn.outvars[0]] = origin
        elif _makes_zeros(eqn, are_zeros):
            zeros.update(eqn.outvars)
    return same


def _origin(
    eqn: JaxprEqn,
    origins: Sequence[Var | None],
    are_zeros: Sequence[bool],
) -> Var | None:
    """Returns the input that an equation yields as it is; None if it does not.

    Args:
        eqn: the equation.
        origins: the input that each operand is equal to.
        are_zeros: whether each operand is zero.
    """
    name = eqn.primitive.name
    if name in ("add", "add_any", "sub") and are_zeros[1]:
        return origins[0]
    if name in ("add", "add_any") and are_zeros[0]:
        return origins[1]
    if name == "select_n":
        # Whatever the choice is, it is one of these: if all are equal to the same input, so is the
        # result.
        first, *others = origins[1:]
        return first if all(origin is first for origin in others) else None
    if name not in _AS_IT_IS or origins[0] is None:
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
    if _are(jnp.floating, wide, narrow):
        a = jnp.finfo(wide)
        b = jnp.finfo(narrow)
        return a.nmant >= b.nmant and a.nexp >= b.nexp
    if _are(jnp.integer, wide, narrow):
        a = jnp.iinfo(wide)
        b = jnp.iinfo(narrow)
        return a.min <= b.min and b.max <= a.max
    return False


def _are(kind: Any, *types: np.dtype) -> bool:
    return all(jnp.issubdtype(dtype, kind) for dtype in types)


def _makes_zeros(eqn: JaxprEqn, zeros: Sequence[bool]) -> bool:
    """Tells whether an equation makes zeros, of operands some of which are `zeros`."""
    match eqn.primitive.name:
        case "mul" if any(zeros):
            # The other factor must be known: zero times one that is computed, and might be
            # infinite, is NaN.
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


def _masked(tree: _jax.TreeDef, unread: Collection[int]) -> _jax.TreeDef:
    """Returns the tree of the state, with optax's own sign of nothing in place of leaves that
    nobody reads.
    """
    import optax  # late, as in jvpipe/ir/optimizer.py

    leaves = [optax.MaskedNode() if k in unread else 0 for k in range(tree.num_leaves)]
    masked = jax.tree.unflatten(tree, leaves)
    return jax.tree.structure(masked)
