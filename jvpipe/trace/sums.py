"""Moves sums over parameters, as in weight decay, to layers that read these parameters anyway.

If the last layer computed all these sums, it would have to read every parameter of the model. For
example, if w0 is a parameter of layer 0, and w1 of layer 1:

    loss + sum(w0**2) + sum(w1**2)      layer 0 computes sum(w0**2), layer 1 computes sum(w1**2),
                                        and each sends one number to the last layer
"""

from collections import defaultdict
from collections.abc import Collection, Sequence

from jvpipe import _jax
from jvpipe._jax import JaxprEqn, Var
from jvpipe.trace.jaxprs import free_variables, variables

Run = tuple[JaxprEqn, ...]


def settle_sums(
    floating: Sequence[JaxprEqn],
    runs: Sequence[Run],
    parameters: Collection[Var],
    outputs: Sequence[Var],
    loss_layer: int,
) -> tuple[Run, list[Run]]:
    """Moves sums out of `floating` to the start of a run that reads their parameters anyway.

    Args:
        floating: the equations that each layer computes if it needs them.
        runs: the main equations of each layer.
        parameters: the variables of the parameters.
        outputs: the results of the loss; the loss layer computes those that no run computes.
        loss_layer: the number of the layer that computes the loss.

    Returns:
        The remaining floating equations, and the runs with the sums.
    """
    needing: defaultdict[Var, set[int]] = defaultdict(set)  # the layers that need each value
    for layer, run in enumerate(runs):
        yielded = outputs if layer == loss_layer else ()
        for v in [*free_variables(run), *yielded]:
            needing[v].add(layer)
    # For each value, the layers that would need it even if no layer computed a sum.
    reading_anyway = defaultdict(set, {v: set(layers) for v, layers in needing.items()})
    for eqn in reversed(floating):
        if not _is_sum(eqn):
            _pass_on(
                eqn,
                reading_anyway,
                _needing(eqn, reading_anyway),
            )
    summed = parameters_behind(floating, parameters)
    left = []
    settled: list[list[JaxprEqn]] = [[] for _ in runs]
    for eqn in reversed(floating):
        layers = _needing(eqn, needing)
        if _is_sum(eqn) and layers:
            # `first` has, for each parameter of the sum, the first layer that reads it anyway. The
            # last of these layers computes the sum, if it is before all layers that need the sum.
            never = len(runs)
            behind = summed[eqn.outvars[0]]
            first = [min(reading_anyway[p], default=never) for p in behind]
            home = max(first, default=never)
            if home < min(layers):
                settled[home].insert(0, eqn)
                _pass_on(eqn, needing, {home})
                continue
        left.append(eqn)
        _pass_on(eqn, needing, layers)
    pairs = zip(settled, runs, strict=True)
    return tuple(left[::-1]), [(*sums, *run) for sums, run in pairs]


def _is_sum(eqn: JaxprEqn) -> bool:
    """Tells whether an equation computes a scalar from an array."""
    reads_array = any(_jax.aval(v).shape for v in eqn.invars)
    return reads_array and _jax.aval(eqn.outvars[0]).shape == ()


def _needing(eqn: JaxprEqn, needing: dict[Var, set[int]]) -> set[int]:
    return set().union(*(needing[v] for v in eqn.outvars))


def _pass_on(
    eqn: JaxprEqn,
    needing: dict[Var, set[int]],
    layers: set[int],
) -> None:
    for v in variables(eqn.invars):
        needing[v] |= layers


def parameters_behind(
    floating: Sequence[JaxprEqn], parameters: Collection[Var]
) -> dict[Var, frozenset[Var]]:
    """Returns the parameters that each result of floating equations depends on."""
    behind = {p: frozenset([p]) for p in parameters}
    for eqn in floating:
        operands = variables(eqn.invars)
        made_of = frozenset().union(*(behind.get(v, frozenset()) for v in operands))
        behind |= dict.fromkeys(eqn.outvars, made_of)
    return behind
