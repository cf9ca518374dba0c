"""A layer's candidates and results as calls, each of which the compiler treats by itself.

What XLA fuses, and how it simplifies, depends on all that a program computes: a row divided by its norm may round
otherwise where the backward divides by that norm once more. A value that is to have the same bits in every program that
computes it is therefore computed by a function of its own, compiled alike wherever it is called.
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
            jaxprs.run(self.eqns, env)
            return jaxprs.read(self.outputs, env)

        avals = (_jax.aval(v) for v in self.inputs)
        return flatten(run, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))

    def equation(self) -> JaxprEqn:
        """The call as an equation between its inputs and outputs."""
        avals = self._closed.in_avals
        (eqn,) = jax.make_jaxpr(lambda *values: _jax.outlined(self._closed, values))(
            *avals
        ).jaxpr.eqns
        return eqn.replace(invars=list(self.inputs), outvars=list(self.outputs))

    def __call__(self, env: dict[Var, Any]) -> dict[Var, Any]:
        """The values of the outputs, computed from values in `env` through which no gradient flows."""
        return dict(
            zip(
                self.outputs,
                _jax.outlined(self._closed, jaxprs.read(self.inputs, env)),
                strict=True,
            )
        )


def outline(body: Body) -> dict[int, Call]:
    """The calls of a layer by the position of the equation whose results they make; the last makes its outputs."""
    outputs = [
        v
        for v in jaxprs.variables(body.outputs)
        if v not in body.candidates and v not in body.inputs
    ]
    return calls(body.eqns, body.candidates, dict.fromkeys(outputs))


def calls(
    body: Sequence[JaxprEqn], candidates: Collection[Var], outputs: Collection[Var]
) -> dict[int, Call]:
    """Calls by the position of the equation whose results they make: one per candidate, and a last one for outputs.

    A value that several calls need is made by one of its own, unless it only moves what is there.

    Args:
        body: a layer's equations.
        candidates: values of which each gets a call.
        outputs: values that the last call makes.
    """
    callers: defaultdict[Var, set[int]] = defaultdict(set)  # which calls need a value
    callers |= {v: {len(body)} for v in outputs}
    made: dict[int, Sequence[Var]] = {len(body): list(outputs)}
    eqns: defaultdict[int, list[JaxprEqn]] = defaultdict(list)
    for position, eqn in reversed(list(enumerate(body))):
        if eqn.effects:  # is run once, outside
            continue
        asking = set().union(*(callers[v] for v in eqn.outvars))
        if any(v in candidates for v in eqn.outvars):
            wanted = [v for v in eqn.outvars if v in candidates or callers[v]]
        elif len(asking) > 1 and not is_move(eqn):
            wanted = [v for v in eqn.outvars if callers[v]]
        else:
            wanted = []
        if wanted:
            made[position], asking = wanted, {position}
        for call in asking:
            eqns[call].append(eqn)
            for v in jaxprs.variables(eqn.invars):
                callers[v].add(call)
    return {i: _call(eqns[i][::-1], wanted) for i, wanted in made.items() if eqns[i]}


def _call(eqns: Sequence[JaxprEqn], wanted: Iterable[Var]) -> Call:
    own = {v for eqn in eqns for v in eqn.outvars}
    return Call(
        tuple(eqns), tuple(jaxprs.free_variables(eqns)), tuple(v for v in wanted if v in own)
    )
