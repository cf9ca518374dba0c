"""The outlining of a layer: its candidates and outputs become separately compiled calls.

A candidate is a value that may be kept, swapped or recomputed, so several programs may compute it.
What XLA fuses and simplifies depends on everything that a program computes. For example, a row
divided by its norm may be rounded differently if the backward divides by that norm once more.
Therefore a value that has to be bitwise identical in all programs is computed by a separate
function, which is compiled the same way in every program that calls it.

In this example the candidates are c, which needs a and b, and e, which needs b and d. The output
needs e. Two calls need b, so b gets a separate call:

    equations    a  b  c  d  e  out
    calls        [b]  [a c]  [d e]  [out]
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, JaxprEqn, Var
from jvpipe.trace import jaxprs
from jvpipe.trace.body import Body
from jvpipe.trace.flatten import flatten
from jvpipe.trace.primitives import is_move


@dataclass(frozen=True)
class Call:
    """Equations from `inputs` to `outputs`, compiled as a separate function."""

    eqns: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]

    @cached_property
    def _closed(self) -> ClosedJaxpr:
        """The equations as a function of the call's inputs."""

        def run(*values: Any) -> list[Any]:
            env = dict(zip(self.inputs, values, strict=True))
            jaxprs.run_jaxpr(self.eqns, env)
            return jaxprs.read_by(self.outputs, env)

        return flatten(run, *map(jaxprs.shape_of, self.inputs))

    def equation(self) -> JaxprEqn:
        """Returns the call as an equation between its inputs and outputs."""
        call = jax.make_jaxpr(lambda *values: _jax.outlined(self._closed, values))
        (eqn,) = call(*self._closed.in_avals).jaxpr.eqns
        return eqn.replace(invars=list(self.inputs), outvars=list(self.outputs))

    def __call__(self, env: dict[Var, Any]) -> dict[Var, Any]:
        """Returns the values of the outputs; no gradient flows through the values in `env`."""
        results = _jax.outlined(self._closed, jaxprs.read_by(self.inputs, env))
        return dict(zip(self.outputs, results, strict=True))


def outline(body: Body) -> dict[int, Call]:
    """Returns the calls of a layer, each by the position of the equation that it replaces.

    The last call, which makes the outputs, has the position after the last equation.
    """
    # A candidate already has a call, and an input that is also an output needs none.
    computed = (v for v in jaxprs.variables(body.outputs) if v not in body.inputs)
    outputs = dict.fromkeys(v for v in computed if v not in body.candidates)
    return calls(body.eqns, body.candidates, outputs)


def calls(
    body: Sequence[JaxprEqn],
    candidates: Collection[Var],
    outputs: Collection[Var],
) -> dict[int, Call]:
    """Returns the calls of some equations, each by the position of the equation that it replaces.

    Each candidate gets a call, and the last call makes the outputs. An equation whose results
    several calls need gets a separate call, unless it only moves its operand. So no equation is in
    two calls, except for moves. The equations are visited from last to first, so that the readers
    of an equation, and with them the calls that need it, are visited before the equation.

    Args:
        body: a layer's equations.
        candidates: the values that each get a call.
        outputs: the values that the last call makes.
    """
    last = len(body)
    callers: defaultdict[Var, set[int]] = defaultdict(set)  # for each value, the calls that need it
    callers |= {v: {last} for v in outputs}
    yielded: dict[int, Sequence[Var]] = {last: list(outputs)}  # for each call, its results
    eqns: defaultdict[int, list[JaxprEqn]] = defaultdict(list)  # for each call, from last to first
    for position, eqn in reversed(list(enumerate(body))):
        if eqn.effects:  # it runs only once, outside of calls
            continue
        needing = set().union(*(callers[v] for v in eqn.outvars))
        is_candidate = any(v in candidates for v in eqn.outvars)
        is_shared = len(needing) > 1 and not is_move(eqn)
        if is_candidate or is_shared:
            # This equation is the last of a new call. Other calls read its results as arguments,
            # and do not contain the equations that make them.
            needed = [v for v in eqn.outvars if v in candidates or callers[v]]
            yielded[position] = needed
            needing = {position}
        for call in needing:
            eqns[call].append(eqn)
            for v in jaxprs.variables(eqn.invars):
                callers[v].add(call)
    by_position: dict[int, Call] = {}
    for position, results in yielded.items():
        if eqns[position]:  # the last call is empty if all outputs are candidates or inputs
            by_position[position] = _call(eqns[position][::-1], results)
    return by_position


def _call(eqns: Sequence[JaxprEqn], results: Iterable[Var]) -> Call:
    """Returns a call that runs some equations, and yields the results that they compute."""
    computed = jaxprs.defined(eqns)
    outputs = tuple(v for v in results if v in computed)
    return Call(
        tuple(eqns),
        tuple(jaxprs.free_variables(eqns)),
        outputs,
    )
