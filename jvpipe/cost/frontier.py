"""The options of a layer for its residuals: (bytes kept, bytes swapped, seconds more, bytes more).

A candidate is kept, swapped to the host and back, or recomputed in the backward. Only choices remain that no other
one beats in every respect, the non-convex ones included; where they are many, those that some prices of
bytes and link time pick, and the ones farthest from them. Elementwise values are always recomputed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product

import numpy as np

from jvpipe import _jax
from jvpipe.cost.costs import Option
from jvpipe.cost.effort import OPTIONS
from jvpipe.cost.hardware import Accelerator
from jvpipe.cost.recompute import Recompute, recompute_of
from jvpipe.cost.roofline import equation_seconds
from jvpipe.ir.plan import Fate
from jvpipe.programs.layer import LayerPrograms
from jvpipe.trace.graph import Traced


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured points of a layer: pairs (modelled, measured) of seconds that its backward takes longer."""

    extra_s: tuple[tuple[float, float], ...]


def recomputes(
    traced: Traced, nothing: Sequence[LayerPrograms], device: Accelerator
) -> list[Recompute]:
    """Finds what dropping candidates costs each layer, by the roofline; equal layers get the same object.

    Args:
        traced: the model.
        nothing: the programs of its layers with no candidate kept.
        device: the hardware.
    """
    cache: dict[tuple[int, tuple[str, ...]], Recompute] = {}
    costs = []
    for layer, body, programs in zip(traced.graph.layers, traced.bodies, nothing, strict=True):
        key = id(programs), tuple(c.name for c in layer.candidates)
        if key not in cache:
            results = [
                body.candidates.get(v) for v in body.outputs if not isinstance(v, _jax.Literal)
            ]
            sizes = {c.name: c.bytes for c in layer.candidates}
            cache[key] = recompute_of(
                programs, sizes, results, partial(equation_seconds, device=device)
            )
        costs.append(cache[key])
    return costs


def layer_options(
    traced: Traced,
    inputs: Sequence[Sequence[int]],
    recomputed: Sequence[Recompute],
    measured: Sequence[Calibration] | None = None,
) -> list[tuple[Option, ...]]:
    """The options of every layer; equal layers differ in names alone.

    Args:
        traced: the model.
        inputs: the tensors that each layer holds alone.
        recomputed: what dropping candidates costs each layer.
        measured: what it was measured to cost each layer, if it was.
    """
    cache: dict[tuple[int, int], tuple[Option, ...]] = {}
    by_layer = []
    for layer in traced.graph.layers:
        arrays = [traced.graph.tensors[t].array for t in inputs[layer.id]]
        recompute, input_bytes = recomputed[layer.id], sum(array.bytes for array in arrays)
        key = id(recompute), input_bytes
        if key not in cache:
            options = options_of(recompute, input_bytes)
            cache[key] = calibrated(options, measured[layer.id]) if measured else options
        by_layer.append(
            named(cache[key], traced.graph.label(layer), [array.name for array in arrays])
        )
    return by_layer


def options_of(
    recompute: Recompute, input_bytes: int = 0, count: int = OPTIONS.options
) -> tuple[Option, ...]:
    """A layer's options: the first keeps everything, the last recomputes everything.

    Args:
        recompute: what dropping the layer's candidates costs.
        input_bytes: inputs that the layer alone holds; some options swap them too.
        count: how many options there are at most.

    Fates are named as the candidates are; `named` gives them the layer's name.
    """
    everything, nothing = (_option(recompute, kept) for kept in (recompute.choices, frozenset()))
    options = [
        option for kept in recompute.subsets() for option in _swapping(recompute, kept, input_bytes)
    ]
    others = [option for option in options if option not in (everything, nothing)]
    points = np.array([_point(option, input_bytes) for option in [everything, nothing, *others]])
    chosen = [others[i - 2] for i in _thinned(points, count) if i >= 2]
    chosen.sort(
        key=lambda option: (
            option.swapped_bytes + option.swaps_input > 0,
            option.extra_s,
            option.swapped_bytes,
        )
    )
    return (everything,) if nothing == everything and not chosen else (everything, *chosen, nothing)


def calibrated(options: Sequence[Option], measured: Calibration) -> tuple[Option, ...]:
    """Options whose seconds agree with what was measured; in between they are interpolated."""
    modelled_s, measured_s = np.array(sorted([(0.0, 0.0), *measured.extra_s])).T
    measured_s = np.maximum.accumulate(
        measured_s
    )  # noise must not make it cheaper to recompute more
    return tuple(
        replace(option, extra_s=float(np.interp(option.extra_s, modelled_s, measured_s)))
        for option in options
    )


def named(options: Sequence[Option], layer: str, inputs: Sequence[str]) -> tuple[Option, ...]:
    """The options of one of several equal layers: fates bear its name, swapped inputs their own.

    Args:
        options: of the first of them.
        layer: what the one is called.
        inputs: the names of its inputs.
    """
    return tuple(
        replace(
            option,
            fates={f"{layer}/{name}": fate for name, fate in option.fates.items()}
            | (dict.fromkeys(inputs, Fate.SWAP) if option.swaps_input else {}),
        )
        for option in options
    )


def _option(
    recompute: Recompute,
    kept: Iterable[int],
    swapped: Iterable[int] = (),
    swaps_input: bool = False,
) -> Option:
    used, recomputed = recompute.dropping(frozenset(kept))
    swapped = used.intersection(swapped)
    everything = recompute.choices == frozenset(kept)
    dropped = frozenset() if everything else recompute.choices - used
    fates = {recompute.names[c]: Fate.RECOMPUTE for c in sorted(dropped)}
    return Option(
        kept_bytes=recompute.kept_bytes(used - swapped),
        swapped_bytes=recompute.kept_bytes(swapped),
        extra_s=recompute.extra_s(recomputed),
        extra_bytes=sum(recompute.bytes[c] for c in recomputed),
        fates=fates | {recompute.names[c]: Fate.SWAP for c in sorted(swapped)},
        swaps_input=swaps_input,
    )


def _swapping(recompute: Recompute, kept: frozenset[int], input_bytes: int) -> Iterable[Option]:
    """A choice of what is kept, with more and more of it swapped: from the largest on, and from the smallest on."""
    order = sorted(kept & recompute.choices, key=lambda c: recompute.bytes[c])
    growing = [list(accumulate(([c] for c in by), initial=[])) for by in (order, order[::-1])]
    swaps = {frozenset(swapped) for sets in growing for swapped in sets}
    for swapped, with_input in product(swaps, (False, True) if input_bytes else (False,)):
        yield _option(recompute, kept, swapped, with_input)


def _point(option: Option, input_bytes: int) -> tuple[int, int, float, int]:
    swapped = input_bytes if option.swaps_input else 0
    kept = option.kept_bytes + input_bytes - swapped
    return kept, option.swapped_bytes + swapped, option.extra_s, option.extra_bytes


def _thinned(points: np.ndarray, count: int) -> list[int]:
    """The first two points, and of the others the Pareto set, thinned."""
    efficient = [i for i in range(2, len(points)) if not _beaten(points, i)]
    if len(efficient) + 2 <= count:
        return [0, 1, *efficient]
    span = points.max(0)
    scaled = points / np.where(span > 0, span, 1)
    ids = np.array([0, 1, *efficient])
    byte, link, more = (
        prices.ravel() for prices in np.meshgrid(*[np.geomspace(1e-3, 1e3, 13)] * 2, [0.0, 0.5])
    )
    price = np.stack([byte, link, np.ones_like(byte), more * byte])
    picked, often = np.unique((scaled[ids] @ price).argmin(0), return_counts=True)
    chosen = list(dict.fromkeys([0, 1, *picked[np.argsort(-often, kind="stable")].tolist()]))[
        : max(count, 2)
    ]
    distance = np.abs(scaled[ids][:, None] - scaled[ids][None, chosen]).sum(2).min(1)
    while len(chosen) < count:
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, np.abs(scaled[ids] - scaled[ids[chosen[-1]]]).sum(1))
    return ids[chosen].tolist()


def _beaten(points: np.ndarray, i: int) -> bool:
    """Tells whether a point is Pareto-dominated, or a later duplicate."""
    as_good = (points <= points[i]).all(1)
    same = (points == points[i]).all(1)
    return bool((as_good & ~same).any() or same[:i].any())
