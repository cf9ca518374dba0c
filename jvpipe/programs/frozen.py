"""Frozen parameters: the optimizer returns them unchanged, and nothing else needs their gradients.

Both conditions are checked on the traced update, so they are true for any gradients. Three
examples, with a parameter p, its gradient g and its moment mu:

    what the update computes                  p unchanged    g is needed             p is frozen
    g -> 0 (set_to_zero), p + 0               yes            no                      yes
    g -> mu -> 0 (masked), p + 0              yes            only for the next mu    yes, without mu
    g -> norm -> other parameters, p + 0      yes            yes                     no

(p + 0 turns -0.0 into 0.0, but a frozen parameter keeps its -0.0.)

If a primitive is missing from the lists below, some parameters are not recognized as frozen. This
costs only time and memory, because the update gives such a parameter the value that it already has.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from jvpipe.programs.optimizer_trace import TracedOptimizer, masked
from jvpipe.trace import jaxprs

_AS_IT_IS = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "reshape",
        "stop_gradient",
    }
)
"""Primitives that yield their operand, if the shape is kept and the new type can represent it."""
_OF_ZEROS = _AS_IT_IS | {
    "add",
    "add_any",
    "sub",
    "neg",
    "concatenate",
    "expand_dims",
    "rev",
    "slice",
    "squeeze",
    "transpose",
}
"""Primitives whose results are zeros if all operands are zeros."""


def without_frozen(
    traced: TracedOptimizer,
    readers: Sequence[int],
) -> TracedOptimizer:
    """Finds the frozen parameters of an optimizer, and returns the optimizer without their state.

    Args:
        traced: the optimizer, traced over all parameters; `traced.frozen` were found earlier.
        readers: for each parameter, the number of its gradients that the update takes.
    """
    update = _Update.of(traced, readers)
    newly_frozen: set[int] = set()
    unread: set[int] = set()
    for i in update.unchanged - traced.frozen:
        leaves = update.state_alone(i)
        if leaves is not None:
            newly_frozen.add(i)
            unread |= leaves
    if not newly_frozen:
        return traced
    kept = [k for k in range(len(traced.state)) if k not in unread]
    first_state = traced.init.jaxpr.outvars
    whole_state = traced.state_tree.unflatten(range(len(traced.state)))
    return TracedOptimizer(
        update=update.leaving(newly_frozen, unread),
        init=jaxprs.yielding(traced.init, [first_state[k] for k in kept]),
        state=tuple(traced.state[k] for k in kept),
        state_tree=jax.tree.structure(masked(whole_state, unread)),
        parameter_of=tuple(traced.parameter_of[k] for k in kept),
        frozen=traced.frozen | newly_frozen,
    )


@dataclass(frozen=True)
class _Update:
    """A traced update, with its inputs sorted by kind.

    Attributes:
        closed: the update.
        gradients: for each parameter, the gradients that the update takes.
        parameters: the inputs that are parameters.
        state: the inputs that are leaves of the optimizer's state.
        parameter_of: for each leaf of the state the parameter that it belongs to, or None.
    """

    closed: ClosedJaxpr
    gradients: tuple[tuple[Var, ...], ...]
    parameters: tuple[Var, ...]
    state: tuple[Var, ...]
    parameter_of: tuple[int | None, ...]

    @staticmethod
    def of(traced: TracedOptimizer, readers: Sequence[int]) -> "_Update":
        """Divides the inputs into gradients, a weight if there is one, parameters and state."""
        # Gradients are counted from the front, and parameters and state from the back, because a
        # weight may come between the two groups.
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
        """The parameters that the update returns unchanged."""
        same = _same(self.closed, self.parameters)
        unchanged = set()
        results = zip(self.parameters, self.closed.jaxpr.outvars, strict=False)
        for i, (p, out) in enumerate(results):
            is_same = isinstance(out, Var) and same.get(out) is p
            if is_same and _jax.aval(out).dtype == _type(p):
                unchanged.add(i)
        return unchanged

    def state_alone(self, i: int) -> set[int] | None:
        """Returns the leaves of a parameter's own state if nothing else needs its gradient.

        The gradient is followed forward through all values that are computed from it. If such a
        value is a leaf of the parameter's own state, the leaf is followed in turn, as an input of
        the next update. The search visits each value once, and mostly ends early: a value that all
        parameters need, such as a norm, soon leads to a result of another parameter.

        Args:
            i: the parameter.

        Returns:
            The numbers of the leaves; None if any other result needs the gradient.
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
        """For each value, the results of the equations that read it."""
        made_of: dict[Var, list[Var]] = {}
        for eqn in self.closed.jaxpr.eqns:
            for v in dict.fromkeys(jaxprs.variables(eqn.invars)):
                made_of.setdefault(v, []).extend(eqn.outvars)
        return made_of

    @cached_property
    def _results(self) -> Mapping[Var, Sequence[int]]:
        """For each value, the numbers of the update's results that are this value.

        Parameters that stay unchanged do not count as results.
        """
        results: dict[Var, list[int]] = {}
        for k, out in enumerate(self.closed.jaxpr.outvars):
            if isinstance(out, Var) and k not in self.unchanged:
                results.setdefault(out, []).append(k)
        return results

    def leaving(self, frozen: Collection[int], unread: Collection[int]) -> ClosedJaxpr:
        """Returns the update without the work for some parameters and without some of the state.

        Args:
            frozen: the parameters that the new update returns unchanged.
            unread: the leaves of the state that the new update neither takes nor yields.
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
    """Maps values to the inputs that they always equal, for any values of the inputs.

    One pass over the equations shows for each value whether it equals an input, is zero, or
    neither.
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
    """Returns the input that an equation yields unchanged; None if there is no such input.

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
        # The first operand selects one of the others. If all of these equal the same input, so does
        # the result.
        first, *others = origins[1:]
        return first if all(origin is first for origin in others) else None
    if name not in _AS_IT_IS or origins[0] is None:
        return None
    out = _jax.aval(eqn.outvars[0])
    if out.shape != _jax.aval(eqn.invars[0]).shape:
        return None
    return origins[0] if _holds(out.dtype, _type(origins[0])) else None


def _holds(wide: np.dtype, narrow: np.dtype) -> bool:
    """Tells whether a type can represent all numbers of another type.

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
    """Tells whether an equation makes zeros, given which of its operands are zeros."""
    match eqn.primitive.name:
        case "mul" if any(zeros):
            # The other factor must be a known finite number: a computed one might be infinite, and
            # zero times infinity is NaN.
            pairs = zip(eqn.invars, zeros, strict=True)
            return all(is_zero or _is_finite(x) for x, is_zero in pairs)
        case "select_n":
            return all(zeros[1:])
        case "dynamic_slice":
            return zeros[0]
        case name:
            return name in _OF_ZEROS and all(zeros)


def _is_finite(atom: Atom) -> bool:
    """Tells whether a value is a constant of finite numbers."""
    return isinstance(atom, Literal) and bool(np.all(np.isfinite(atom.val)))


def _type(var: Var) -> np.dtype:
    return _jax.aval(var).dtype
