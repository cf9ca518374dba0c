"""The options of a layer for its residuals: (bytes kept, bytes swapped, seconds more, bytes more).

A candidate is kept, swapped to the host and back, or recomputed in the backward; elementwise values
are always recomputed. Options that another one beats in every respect are left out, and what
remains need not be convex. If more remain than a layer may have, some are chosen: those that are
best at some prices of a byte and of link time, then those farthest from the chosen ones.
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
    """Measured points of a layer: pairs (modelled, measured) of the extra seconds of its backward."""

    extra_s: tuple[tuple[float, float], ...]


def recomputes(
    traced: Traced,
    nothing: Sequence[LayerPrograms],
    device: Accelerator,
) -> list[Recompute]:
    """Finds what dropping candidates costs each layer, by the roofline.

    Equal layers share an object.

    Args:
        traced: the model.
        nothing: the programs of its layers with no candidate kept.
        device: the hardware.
    """
    seconds = partial(equation_seconds, device=device)
    cache: dict[tuple[int, tuple[str, ...]], Recompute] = {}
    by_layer = []
    layers = traced.graph.layers
    for layer, body, programs in zip(layers, traced.bodies, nothing, strict=True):
        sizes = {candidate.name: candidate.bytes for candidate in layer.candidates}
        key = id(programs), tuple(sizes)
        if key not in cache:
            outputs = (v for v in body.outputs if not isinstance(v, _jax.Literal))
            results = [body.candidates.get(v) for v in outputs]
            cache[key] = recompute_of(programs, sizes, results, seconds)
        by_layer.append(cache[key])
    return by_layer


def layer_options(
    traced: Traced,
    inputs: Sequence[Sequence[int]],
    recomputed: Sequence[Recompute],
    measured: Sequence[Calibration] | None = None,
) -> list[tuple[Option, ...]]:
    """Returns the options of every layer; those of equal layers differ in names alone.

    Args:
        traced: the model.
        inputs: the tensors that each layer holds alone.
        recomputed: what dropping candidates costs each layer.
        measured: the measured cost of dropping some, for each layer; None if nothing was measured.
    """
    cache: dict[tuple[int, int], tuple[Option, ...]] = {}
    by_layer = []
    for layer in traced.graph.layers:
        arrays = [traced.graph.tensors[t].array for t in inputs[layer.id]]
        recompute = recomputed[layer.id]
        input_bytes = sum(array.bytes for array in arrays)
        # Layers with equal programs, and inputs of equal size, have options alike but in names.
        key = id(recompute), input_bytes
        if key not in cache:
            options = options_of(recompute, input_bytes)
            if measured:
                options = calibrated(options, measured[layer.id])
            cache[key] = options
        label = traced.graph.label(layer)
        names = [array.name for array in arrays]
        by_layer.append(named(cache[key], label, names))
    return by_layer


def options_of(
    recompute: Recompute,
    input_bytes: int = 0,
    count: int = OPTIONS.options,
) -> tuple[Option, ...]:
    """Returns a layer's options: the first keeps everything, the last recomputes everything.

    Args:
        recompute: what dropping the layer's candidates costs.
        input_bytes: inputs that the layer alone holds; some options swap them too.
        count: the most options that are returned.

    Fates are named as the candidates are; `named` gives them the layer's name.
    """
    everything = _option(recompute, recompute.choices)
    nothing = _option(recompute, frozenset())
    others = []
    for kept in recompute.subsets():
        for option in _swapping(recompute, kept, input_bytes):
            # Both are in the list anyway, first and last.
            if option not in (everything, nothing):
                others.append(option)
    compared = [everything, nothing, *others]
    points = np.array([_point(option, input_bytes) for option in compared])
    # The first two are always chosen, and have their places.
    places = _thinned(points, count)
    chosen = [others[i - 2] for i in places if i >= 2]
    chosen.sort(key=_rank)
    if nothing == everything and not chosen:
        return (everything,)
    return everything, *chosen, nothing


def _rank(option: Option) -> tuple[bool, float, int]:
    """Sorts options: those that swap nothing first, then by seconds and swapped bytes."""
    swaps = option.swapped_bytes > 0 or option.swaps_input
    return swaps, option.extra_s, option.swapped_bytes


def calibrated(options: Sequence[Option], measured: Calibration) -> tuple[Option, ...]:
    """Returns options with seconds that agree with the measured ones, interpolated between these."""
    points = sorted([(0.0, 0.0), *measured.extra_s])
    modelled_s, measured_s = np.array(points).T
    # Noise must not make it cheaper to recompute more.
    measured_s = np.maximum.accumulate(measured_s)
    estimates_s = [option.extra_s for option in options]
    extras_s = np.interp(estimates_s, modelled_s, measured_s)
    pairs = zip(options, extras_s.tolist(), strict=True)
    return tuple(replace(option, extra_s=extra_s) for option, extra_s in pairs)


def named(options: Sequence[Option], layer: str, inputs: Sequence[str]) -> tuple[Option, ...]:
    """Returns options whose fates bear the name of a layer, and swapped inputs their own.

    Args:
        options: with fates named as candidates are.
        layer: the name of the layer.
        inputs: the names of its inputs.
    """
    renamed = []
    for option in options:
        fates = {f"{layer}/{name}": fate for name, fate in option.fates.items()}
        if option.swaps_input:
            fates |= dict.fromkeys(inputs, Fate.SWAP)
        renamed.append(replace(option, fates=fates))
    return tuple(renamed)


def _option(
    recompute: Recompute,
    kept: frozenset[int],
    swapped: Iterable[int] = (),
    swaps_input: bool = False,
) -> Option:
    """Makes an option; kept candidates that nobody needs are dropped, unless all are kept."""
    used, recomputed = recompute.dropping(kept)
    swapped = used.intersection(swapped)
    keeps_all = kept == recompute.choices
    dropped = frozenset() if keeps_all else recompute.choices - used
    fates: dict[str, Fate] = {}
    for candidate in sorted(dropped):
        fates[recompute.names[candidate]] = Fate.RECOMPUTE
    for candidate in sorted(swapped):
        fates[recompute.names[candidate]] = Fate.SWAP
    return Option(
        kept_bytes=recompute.kept_bytes(used - swapped),
        swapped_bytes=recompute.kept_bytes(swapped),
        extra_s=recompute.extra_s(recomputed),
        extra_bytes=sum(recompute.bytes[c] for c in recomputed),
        fates=fates,
        swaps_input=swaps_input,
    )


def _swapping(recompute: Recompute, kept: frozenset[int], input_bytes: int) -> Iterable[Option]:
    """Yields a choice of what is kept with more and more of it swapped.

    Candidates are swapped from the largest on and from the smallest on: 2 n sets instead of 2^n.
    """
    rising = sorted(kept & recompute.choices, key=lambda c: recompute.bytes[c])
    swaps: set[frozenset[int]] = set()
    for order in (rising, rising[::-1]):
        growing = accumulate(([c] for c in order), initial=list[int]())
        swaps.update(map(frozenset, growing))
    input_choices = (False, True) if input_bytes else (False,)
    for swapped, with_input in product(swaps, input_choices):
        yield _option(recompute, kept, swapped, with_input)


def _point(option: Option, input_bytes: int) -> tuple[int, int, float, int]:
    """Returns what options are compared by, less being better: kept, swapped, seconds, bytes."""
    input_swapped = input_bytes if option.swaps_input else 0
    kept = option.kept_bytes + input_bytes - input_swapped
    swapped = option.swapped_bytes + input_swapped
    return kept, swapped, option.extra_s, option.extra_bytes


def _thinned(points: np.ndarray, count: int) -> list[int]:
    """Returns the places of the first two points, and of others of the Pareto set, `count` in all.

    Args:
        points: (points, 4), of which less is better in every column.
        count: the most places that are returned.
    """
    # Each point is compared with all others: n^2.
    efficient = [i for i in range(2, len(points)) if not _is_beaten(points, i)]
    if len(efficient) + 2 <= count:
        return [0, 1, *efficient]
    span = points.max(0)
    ids = np.array([0, 1, *efficient])
    scaled = (points / np.where(span > 0, span, 1))[ids]
    # 13 x 13 prices of a kept and of a swapped byte in seconds; extra bytes are free or at half
    # price.
    grid = np.geomspace(1e-3, 1e3, 13)
    meshes = np.meshgrid(grid, grid, [0.0, 0.5])
    byte, link, more = (prices.ravel() for prices in meshes)
    price = np.stack([byte, link, np.ones_like(byte), more * byte])
    # The point that is best at most prices comes first.
    best = (scaled @ price).argmin(0)
    picked, times = np.unique(best, return_counts=True)
    by_times = picked[np.argsort(-times, kind="stable")].tolist()
    chosen = list(dict.fromkeys([0, 1, *by_times]))[: max(count, 2)]
    # The rest are added one by one, each the farthest from all that are chosen already.
    apart = scaled[:, None] - scaled[None, chosen]
    distance = np.abs(apart).sum(2).min(1)
    while len(chosen) < count:
        chosen.append(int(distance.argmax()))
        from_last = np.abs(scaled - scaled[chosen[-1]]).sum(1)
        distance = np.minimum(distance, from_last)
    return ids[chosen].tolist()


def _is_beaten(points: np.ndarray, i: int) -> bool:
    """Tells whether another point is better than point i in no way worse, or its earlier duplicate."""
    as_good = (points <= points[i]).all(1)
    same = (points == points[i]).all(1)
    is_worse = (as_good & ~same).any()
    return bool(is_worse or same[:i].any())
