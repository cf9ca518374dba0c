"""Sums only over parameters, such as the squares that weight decay adds to a loss,
are made where the parameters are.

Else the layer that adds them up would have to read every parameter of the model.

    loss + sum(w0**2) + sum(w1**2)      layer 0 makes sum(w0**2), layer 1 sum(w1**2): two numbers go to the last layer
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
    """Moves sums out of `floating` to the head of the first run that reads their parameters anyway.

    Args:
        floating: equations that a layer computes if it needs them.
        runs: the main equations of each layer.
        parameters: the parameters.
        outputs: what the loss yields; the layer of the loss makes it if no run does.
        loss_layer: that layer.

    Returns:
        The floating equations that are left, and the runs.
    """
    needing: defaultdict[Var, set[int]] = defaultdict(set)  # by value, the layers that need it
    for layer, run in enumerate(runs):
        yielded = outputs if layer == loss_layer else ()
        for v in [*free_variables(run), *yielded]:
            needing[v].add(layer)
    # The layers that read a value even if no sum is made there.
    reading_anyway = defaultdict(set, {v: set(layers) for v, layers in needing.items()})
    for eqn in reversed(floating):
        if not _is_sum(eqn):
            _pass_on(
                eqn,
                reading_anyway,
                _needing(eqn, reading_anyway),
            )
    summed = parameters_behind(floating, parameters)
    left, settled = [], [[] for _ in runs]
    for eqn in reversed(floating):
        layers = _needing(eqn, needing)
        if _is_sum(eqn) and layers:
            # The last of the layers that are the first to read one of its parameters: there all are
            # at hand.
            first = [min(reading_anyway[p], default=len(runs)) for p in summed[eqn.outvars[0]]]
            home = max(first, default=len(runs))
            if home < min(layers):
                settled[home].insert(0, eqn)
                _pass_on(eqn, needing, {home})
                continue
        left.append(eqn)
        _pass_on(eqn, needing, layers)
    pairs = zip(settled, runs, strict=True)
    return tuple(left[::-1]), [(*sums, *run) for sums, run in pairs]


def _is_sum(eqn: JaxprEqn) -> bool:
    """Tells whether an equation makes one number of an array."""
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
    """Returns the parameters that each value is made of."""
    behind = {p: frozenset([p]) for p in parameters}
    for eqn in floating:
        operands = variables(eqn.invars)
        made_of = frozenset().union(*(behind.get(v, frozenset()) for v in operands))
        behind |= dict.fromkeys(eqn.outvars, made_of)
    return behind
