"""A layer's candidates and results as calls, each of which the compiler treats by itself.

What XLA fuses, and how it simplifies, depends on all that a program computes: a row divided by its norm may round
otherwise where the backward divides by that norm once more. A value that is to have the same bits in every program that
computes it is therefore computed by a function of its own, compiled alike wherever it is called.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, JaxprEqn, Var
from jvpipe.trace import jaxprs
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
        return jaxprs.flatten(run, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))

    def __call__(self, env: dict[Var, Any]) -> dict[Var, Any]:
        """The values of the outputs, computed from values in `env` through which no gradient flows."""
        return dict(zip(self.outputs, _jax.outlined(self._closed, jaxprs.read(self.inputs, env)), strict=True))


def outline(body: Body) -> dict[int, Call]:
    """The calls of a layer by the position of the equation whose results they make; the last makes its outputs.

    A value that several calls need is made by one of its own, unless it only moves what is there.
    """
    outputs = {v for v in jaxprs.variables(body.outputs) if v not in body.candidates and v not in body.inputs}
    callers: defaultdict[Var, set[int]] = defaultdict(set)  # which calls need a value
    callers |= {v: {len(body.eqns)} for v in outputs}
    made: dict[int, Sequence[Var]] = {
        len(body.eqns): [v for v in dict.fromkeys(jaxprs.variables(body.outputs)) if v in outputs]
    }
    eqns: defaultdict[int, list[JaxprEqn]] = defaultdict(list)
    for position, eqn in reversed(list(enumerate(body.eqns))):
        if eqn.effects:  # is run once, outside
            continue
        asking = set().union(*(callers[v] for v in eqn.outvars))
        if not body.candidates.keys().isdisjoint(eqn.outvars):
            wanted = [v for v in eqn.outvars if v in body.candidates or callers[v]]
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
    return Call(tuple(eqns), tuple(jaxprs.free_variables(eqns)), tuple(v for v in wanted if v in own))
