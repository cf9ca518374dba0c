"""The splitting of a scan over values of several layers into one scan per layer.

The layers that each operand depends on are followed through the body, and through the carries from
one iteration to the next, until no value gains a layer. If each result then depends on at most one
layer, the scan can be split. Each part has only the equations of the body and the carries that its
results need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, JaxprEqn, Var
from jvpipe.programs.straight_line import straight_body
from jvpipe.trace import jaxprs

Layers = frozenset[int]


@dataclass(frozen=True)
class SplitScan:
    """A scan in parts.

    Attributes:
        eqn: the scan.
        body: the body of the whole scan; each part has some of its equations.
        layers: the layers that each result depends on; None for a result that is not used.
    """

    eqn: JaxprEqn
    body: ClosedJaxpr
    layers: tuple[Layers | None, ...]

    @property
    def separates(self) -> bool:
        """Whether each result that is used depends on at most one layer."""
        used = [result for result in self.layers if result is not None]
        return all(len(result) <= 1 for result in used)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Runs one scan for each set of results that depend on the same layer.

        Results that are not used are None.
        """
        results: dict[int, Any] = {}
        used = dict.fromkeys(result for result in self.layers if result is not None)
        for layers in used:
            outputs = [i for i, result in enumerate(self.layers) if result == layers]
            results |= self._run(outputs, values)
        return [results.get(i) for i in range(len(self.layers))]

    def _run(self, outputs: Sequence[int], values: Sequence[Any]) -> dict[int, Any]:
        """Runs the part of the scan that makes some results, and returns the results by number."""
        jaxpr = self.body.jaxpr
        constants, start, scanned = _jax.scan_operands(self.eqn, values)
        fixed_in, carry_in, scanned_in = _jax.scan_operands(self.eqn, jaxpr.invars)
        # Results are numbered as in the body: first the carries, then the ys.
        kept, eqns = self._narrowed(outputs, carry_in)
        ys = [i for i in outputs if i >= len(carry_in)]
        kept_in = [carry_in[i] for i in kept]
        kept_out = [jaxpr.outvars[i] for i in kept]
        ys_out = [jaxpr.outvars[i] for i in ys]
        fixed = dict(zip(jaxpr.constvars, self.body.consts, strict=True))
        fixed |= zip(fixed_in, constants, strict=True)

        def step(
            carry: list[Any],
            xs: dict[int, Any],
        ) -> tuple[list[Any], list[Any]]:
            env = fixed.copy()
            env |= zip(kept_in, carry, strict=True)
            for i, x in xs.items():
                env[scanned_in[i]] = x
            jaxprs.run_jaxpr(eqns, env)
            new_carry = jaxprs.read_by(kept_out, env)
            return new_carry, jaxprs.read_by(ys_out, env)

        # Arrays that the part does not read are left out, because they may be on another layer.
        read = jaxprs.all_reads(eqns, [*kept_out, *ys_out])
        xs: dict[int, Any] = {}
        for i, (var, x) in enumerate(zip(scanned_in, scanned, strict=True)):
            if var in read:
                xs[i] = x
        init = [_as_array(start[i]) for i in kept]
        options = scan_options(self.eqn)
        carry, stacked = jax.lax.scan(
            step,
            init,
            xs,
            **options,
        )
        positions = [*kept, *ys]
        arrays = [*carry, *stacked]
        values_of = dict(zip(positions, arrays, strict=True))
        return {i: values_of[i] for i in outputs}

    def _narrowed(
        self,
        outputs: Sequence[int],
        carry_in: Sequence[Var],
    ) -> tuple[list[int], list[JaxprEqn]]:
        """Returns the carries that some results need, and the equations that make both.

        Each carry that an iteration reads must also be computed, which may need further carries.
        So the search continues until no carry is added.
        """
        results = self.body.jaxpr.outvars
        carries = {i for i in outputs if i < len(carry_in)}
        while True:
            needed = sorted({*outputs, *carries})
            needed_results = [results[i] for i in needed]
            eqns = jaxprs.prune(self.body.jaxpr.eqns, needed_results)
            read = jaxprs.all_reads(eqns, needed_results)
            numbered = enumerate(carry_in)
            added = {i for i, var in numbered if var in read}
            if added <= carries:
                return sorted(carries), eqns
            carries |= added


def split_scan(
    eqn: JaxprEqn,
    operands: Sequence[Layers],
    used: Sequence[bool],
) -> SplitScan:
    """Finds the layers that each result of a scan depends on.

    Args:
        eqn: a `scan`.
        operands: the layers that each of its operands depends on.
        used: for each result, whether anything depends on it.
    """
    body = straight_body(eqn)
    # A carry depends on the same layers as its value after the previous iteration. The loop ends,
    # because carries only gain layers.
    while True:
        results = _layers_of_results(body, operands)
        constants, carry, xs = _jax.scan_operands(eqn, operands)
        pairs = zip(carry, results, strict=False)
        grown = [before | after for before, after in pairs]
        if grown == carry:
            layers: list[Layers | None] = []
            for result, is_used in zip(results, used, strict=True):
                layers.append(result if is_used else None)
            return SplitScan(eqn, body, tuple(layers))
        operands = [*constants, *grown, *xs]


def _layers_of_results(body: ClosedJaxpr, operands: Sequence[Layers]) -> list[Layers]:
    """Returns the layers that each result of a scan's body depends on, in one iteration."""
    nothing = Layers()
    layers: dict[_jax.Atom, Layers] = {}
    layers |= zip(body.jaxpr.invars, operands, strict=True)

    def layers_of(atom: _jax.Atom) -> Layers:
        # A literal belongs to no layer, and neither does a value that depends on no operand.
        if isinstance(atom, _jax.Literal):
            return nothing
        return layers.get(atom, nothing)

    for eqn in body.jaxpr.eqns:
        mixed = nothing.union(*map(layers_of, eqn.invars))
        layers |= dict.fromkeys(eqn.outvars, mixed)
    return list(map(layers_of, body.jaxpr.outvars))


def scan_options(eqn: JaxprEqn) -> dict[str, Any]:
    """Returns the keyword arguments with which `jax.lax.scan` made an equation."""
    return {name: eqn.params[name] for name in ("length", "reverse", "unroll")}


def _as_array(value: Any) -> jax.Array:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)
