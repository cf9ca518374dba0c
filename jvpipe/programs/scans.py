"""A scan over values of several layers as one scan per layer, where its body does not mix them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, JaxprEqn, Var
from jvpipe.programs.optimizer_trace import evaluate, straight_line
from jvpipe.trace import jaxprs

Layers = frozenset[int]


@dataclass(frozen=True)
class SplitScan:
    """A scan in parts: the body to narrow, and the `layers` that each result depends on (None: it is not used)."""

    eqn: JaxprEqn
    body: ClosedJaxpr
    layers: tuple[Layers | None, ...]

    @property
    def separates(self) -> bool:
        """Tells whether no result mixes layers."""
        return all(result is None or len(result) <= 1 for result in self.layers)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Runs one scan for each set of results that depend on the same layer; None stands for what is not used."""
        results: dict[int, Any] = {}
        for layers in dict.fromkeys(result for result in self.layers if result is not None):
            results |= self._run(
                [i for i, result in enumerate(self.layers) if result == layers], values
            )
        return [results.get(i) for i in range(len(self.layers))]

    def _run(self, outputs: Sequence[int], values: Sequence[Any]) -> dict[int, Any]:
        jaxpr = self.body.jaxpr
        constants, start, scanned = _jax.scan_operands(self.eqn, values)
        fixed_in, carry_in, scanned_in = _jax.scan_operands(self.eqn, jaxpr.invars)
        kept, eqns = self._narrowed(outputs, carry_in)
        ys = [i for i in outputs if i >= len(carry_in)]
        read = _read(eqns, [jaxpr.outvars[i] for i in [*kept, *ys]])
        fixed = dict(zip(jaxpr.constvars, self.body.consts, strict=True)) | dict(
            zip(fixed_in, constants, strict=True)
        )

        def pick(wanted: Sequence[int], env: dict[Var, Any]) -> list[Any]:
            return jaxprs.read([jaxpr.outvars[i] for i in wanted], env)

        def step(carry: list[Any], xs: dict[int, Any]) -> tuple[list[Any], list[Any]]:
            env = fixed | dict(zip((carry_in[i] for i in kept), carry, strict=True))
            env |= {scanned_in[i]: x for i, x in xs.items()}
            jaxprs.run(eqns, env)
            return pick(kept, env), pick(ys, env)

        init = [
            start[i] if isinstance(start[i], jax.Array) else jnp.asarray(start[i]) for i in kept
        ]
        xs = {i: x for i, x in enumerate(scanned) if scanned_in[i] in read}
        options = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, stacked = jax.lax.scan(step, init, xs, **options)
        values_of = dict(zip([*kept, *ys], [*carry, *stacked], strict=True))
        return {i: values_of[i] for i in outputs}

    def _narrowed(
        self, outputs: Sequence[int], carry_in: Sequence[Var]
    ) -> tuple[list[int], list[JaxprEqn]]:
        """The carries that some results need, and the equations of the body behind all these."""
        results, carries = self.body.jaxpr.outvars, {i for i in outputs if i < len(carry_in)}
        while True:
            wanted = [results[i] for i in sorted({*outputs, *carries})]
            eqns = jaxprs.prune(self.body.jaxpr.eqns, wanted)
            read = _read(eqns, wanted)
            needed = carries | {i for i, var in enumerate(carry_in) if var in read}
            if needed == carries:
                return sorted(carries), eqns
            carries = needed


def split_scan(eqn: JaxprEqn, operands: Sequence[Layers], used: Sequence[bool]) -> SplitScan:
    """Finds the layers that each result of a scan depends on.

    Args:
        eqn: a `scan`.
        operands: the layers that each of its operands depends on.
        used: whether anything depends on each of its results.
    """
    traced = eqn.params["jaxpr"]
    body = straight_line(lambda *xs: evaluate(traced, xs), *traced.in_avals)
    outvars = body.jaxpr.outvars
    while True:
        layers = dict(zip(body.jaxpr.invars, operands, strict=True))
        for inner in body.jaxpr.eqns:
            mixed = Layers().union(
                *(layers.get(v, Layers()) for v in jaxprs.variables(inner.invars))
            )
            layers |= dict.fromkeys(inner.outvars, mixed)
        results = [
            Layers() if isinstance(v, _jax.Literal) else layers.get(v, Layers()) for v in outvars
        ]
        constants, carry, xs = _jax.scan_operands(eqn, operands)
        grown = [before | after for before, after in zip(carry, results, strict=False)]
        if grown == carry:
            return SplitScan(
                eqn, body, tuple(r if u else None for r, u in zip(results, used, strict=True))
            )
        operands = [*constants, *grown, *xs]


def _read(eqns: Sequence[JaxprEqn], wanted: Sequence[_jax.Atom]) -> set[Var]:
    return {*jaxprs.free_variables(eqns), *jaxprs.variables(wanted)}
