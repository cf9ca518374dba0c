"""A layer's candidates and results as calls, each of which the compiler treats by itself.

What XLA fuses, and how it simplifies, depends on all that a program computes: a row divided by its
norm may be rounded differently where the backward divides by that norm once more. A value that has
to be bitwise identical in every program that computes it is therefore computed by a function of its
own, compiled alike wherever it is called.

    equations    a  b  c*  d  e*  out        *: a candidate; c needs a and b, e needs b and d, out needs e
    calls        [b] [a c] [d e] [out]       b, which two calls need, is a call of its own
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
from jvpipe.trace.flatten import flatten
from jvpipe.trace.graph import Body
from jvpipe.trace.primitives import is_move


@dataclass(frozen=True)
class Call:
    """Equations from `inputs` to `outputs`, compiled apart."""

    eqns: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]

    @cached_property
    def _closed(self) -> ClosedJaxpr:
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
        """Returns the values of the outputs, computed from values in `env` through which no
        gradient flows.
        """
        results = _jax.outlined(self._closed, jaxprs.read_by(self.inputs, env))
        return dict(zip(self.outputs, results, strict=True))


def outline(body: Body) -> dict[int, Call]:
    """Returns the calls of a layer by the position of the equation whose results they make.

    The last makes outputs.
    """
    # A candidate has a call already, and an input that is passed on needs none.
    computed = (v for v in jaxprs.variables(body.outputs) if v not in body.inputs)
    outputs = dict.fromkeys(v for v in computed if v not in body.candidates)
    return calls(body.eqns, body.candidates, outputs)


def calls(
    body: Sequence[JaxprEqn],
    candidates: Collection[Var],
    outputs: Collection[Var],
) -> dict[int, Call]:
    """Returns calls by the position of the equation whose results they make.

    There is one per candidate, and a last one for outputs. A value that several calls need is made
    by one of its own, unless it only moves its operand. One pass from the last equation to the
    first finds, for each, the calls that need it: by then all its readers have been seen. So no
    equation is in two calls, except for moves.

    Args:
        body: a layer's equations.
        candidates: values of which each gets a call.
        outputs: values that the last call makes.
    """
    last = len(body)
    callers: defaultdict[Var, set[int]] = defaultdict(set)  # by value, the calls that need it
    callers |= {v: {last} for v in outputs}
    yielded: dict[int, Sequence[Var]] = {last: list(outputs)}  # by call
    eqns: defaultdict[int, list[JaxprEqn]] = defaultdict(list)  # by call, from last to first
    for position, eqn in reversed(list(enumerate(body))):
        if eqn.effects:  # it runs once, outside
            continue
        needing = set().union(*(callers[v] for v in eqn.outvars))
        is_candidate = any(v in candidates for v in eqn.outvars)
        is_shared = len(needing) > 1 and not is_move(eqn)
        if is_candidate or is_shared:
            # A call begins here; those that need its results read them, and no longer what they are
            # made of.
            yielded[position] = [v for v in eqn.outvars if v in candidates or callers[v]]
            needing = {position}
        for call in needing:
            eqns[call].append(eqn)
            for v in jaxprs.variables(eqn.invars):
                callers[v].add(call)
    by_position: dict[int, Call] = {}
    for position, results in yielded.items():
        if eqns[position]:  # all outputs may be candidates, or inputs
            by_position[position] = _call(eqns[position][::-1], results)
    return by_position


def _call(eqns: Sequence[JaxprEqn], results: Iterable[Var]) -> Call:
    """Returns a call of equations that yields those results which it computes."""
    computed = jaxprs.defined(eqns)
    outputs = tuple(v for v in results if v in computed)
    return Call(
        tuple(eqns),
        tuple(jaxprs.free_variables(eqns)),
        outputs,
    )
