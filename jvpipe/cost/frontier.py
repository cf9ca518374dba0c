"""The options of a layer: ways to treat the values that its backward needs from its forward.

A candidate is a value that is worth keeping: the result of a product or of another heavy equation,
or random bits. It is kept, swapped to the host and back, or recomputed in the backward. Values that
are cheap to compute, such as elementwise ones, are always recomputed. If the model recomputes only
whole layers, either all candidates of a layer are kept or swapped, or its forward runs again and
yields all of them.

Options are compared by four numbers: bytes kept, bytes swapped, and the backward's extra seconds
and extra bytes. One option beats another if it is better in at least one number and worse in none.
The options that no other option beats are the frontier, which need not be convex. If the frontier
has more options than a layer may have (`OPTIONS.options`), `_thinned` chooses among them. First, it
chooses the options that are best at various prices of kept and of swapped bytes. Then it adds, one
after another, the option that differs most from all options chosen so far.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from jvpipe.cost.costs import Option
from jvpipe.cost.hardware import Accelerator
from jvpipe.cost.measuring_effort import OPTIONS
from jvpipe.cost.recompute import Recompute, recompute_of
from jvpipe.ir.plan import Fate
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer import LayerPrograms
from jvpipe.trace import jaxprs
from jvpipe.trace.graph import Traced

Calibration = Sequence[tuple[float, float]]
"""Pairs (modeled, measured) of a backward's extra seconds, for a few sets of kept candidates."""


def recomputes(
    traced: Traced,
    nothing: Sequence[LayerPrograms],
    device: Accelerator,
) -> list[Recompute]:
    """Finds, for each layer, what it costs to drop candidates; the roofline estimates seconds.

    A candidate that is neither kept nor swapped is dropped. The backward recomputes it if needed.

    Layers with equal programs share one `Recompute`.

    Args:
        traced: the model.
        nothing: by layer, the programs that keep no candidate.
        device: the device whose seconds the roofline estimates.
    """
    found: dict[tuple[int, tuple[str, ...]], Recompute] = {}
    by_layer = []
    for layer, body, programs in zip(traced.graph.layers, traced.bodies, nothing, strict=True):
        sizes = {candidate.name: candidate.bytes for candidate in layer.candidates}
        key = id(programs), tuple(sizes)
        if key not in found:
            results = map(body.candidates.get, jaxprs.variables(body.outputs))
            found[key] = recompute_of(programs, sizes, set(results), device)
        by_layer.append(found[key])
    return by_layer


def layer_options(
    traced: Traced,
    inputs: Sequence[Sequence[int]],
    recomputed: Sequence[Recompute],
    forwards_s: Sequence[float],
    measured: Sequence[Calibration] | None = None,
) -> list[tuple[Option, ...]]:
    """Returns the options of every layer.

    Args:
        traced: the model.
        inputs: by layer, the input tensors that only this layer's backward reads.
        recomputed: by layer, what dropping its candidates costs.
        forwards_s: by layer, the seconds of its forward; read only if the model recomputes
            whole layers.
        measured: by layer, measured extra seconds; None if nothing was measured.
    """
    found: dict[tuple[int, int], tuple[Option, ...]] = {}
    by_layer = []
    graph = traced.graph
    tensors = [tensor.array for tensor in graph.tensors]
    for layer, inputs_read, recompute in zip(graph.layers, inputs, recomputed, strict=True):
        input_bytes = sum(tensors[t].bytes for t in inputs_read)
        # The options of layers with equal programs and inputs of equal size differ only in names.
        key = id(recompute), input_bytes
        if key not in found:
            again = None
            if graph.whole_layers:
                yielded = layer.writing(ValueKind.TENSOR)
                again = forwards_s[layer.id], sum(tensors[t].bytes for t in yielded)
            options = recompute_options(recompute, input_bytes, again=again)
            if measured:
                options = calibrated(options, measured[layer.id])
            found[key] = options
        names = [tensors[t].name for t in inputs_read]
        by_layer.append(named(found[key], graph.label(layer), names))
    return by_layer


def recompute_options(
    recompute: Recompute,
    input_bytes: int = 0,
    count: int = OPTIONS.options,
    again: tuple[float, int] | None = None,
) -> tuple[Option, ...]:
    """Returns a layer's options: the first keeps everything, the last recomputes everything.

    Other code relies on this order. The names in `Option.fates` do not yet begin with the layer's
    name, which `named` adds.

    Args:
        recompute: what dropping the layer's candidates costs.
        input_bytes: the bytes of inputs that the layer alone holds; some options swap them, too.
        count: the most options that are returned.
        again: if the layer can only be recomputed as a whole, the seconds of its forward and
            the bytes of its results; else None.
    """
    everything = _option(recompute, recompute.choices)
    nothing = _option(recompute, frozenset())
    if again is not None and nothing != everything:
        # The forward runs again, and yields all candidates and all results of the layer once more.
        forward_s, result_bytes = again
        again_bytes = everything.kept_bytes + result_bytes
        nothing = Option(0, 0, forward_s, again_bytes, nothing.fates)
    compared = [everything, nothing]
    for kept in [recompute.choices] if again is not None else recompute.subsets():
        options = _swapping(recompute, kept, input_bytes)
        compared += (option for option in options if option not in (everything, nothing))
    points = np.array([_point(option, input_bytes) for option in compared])
    # `_thinned` always chooses the first two, which become the ends of the result.
    chosen = [compared[i] for i in _thinned(points, count) if i >= 2]
    chosen.sort(key=_rank)
    if nothing == everything and not chosen:
        return (everything,)
    return everything, *chosen, nothing


def _rank(option: Option) -> tuple[bool, float, int]:
    """Returns the sort key of an option: whether it swaps, its extra seconds, its swapped bytes."""
    swaps = option.swapped_bytes > 0 or option.swaps_input
    return swaps, option.extra_s, option.swapped_bytes


def calibrated(options: Sequence[Option], measured: Calibration) -> tuple[Option, ...]:
    """Returns options with measured extra seconds, interpolated at the modeled extra seconds."""
    # The point (0, 0) makes options without modeled extra seconds, such as the first, stay at 0.
    points = sorted([(0.0, 0.0), *(point for point in measured if point[0] > 0)])
    modeled_s, measured_s = np.array(points).T
    # Measured seconds must rise with the modeled ones: noise must not make more work cheaper.
    measured_s = np.maximum.accumulate(measured_s)
    extras_s = np.interp([option.extra_s for option in options], modeled_s, measured_s)
    pairs = zip(options, extras_s.tolist(), strict=True)
    return tuple(replace(option, extra_s=extra_s) for option, extra_s in pairs)


def named(options: Sequence[Option], layer: str, inputs: Sequence[str]) -> tuple[Option, ...]:
    """Returns options with the layer's name in the names of fates, and fates of swapped inputs.

    Args:
        options: options whose fates have the names of candidates.
        layer: the name of the layer.
        inputs: the names of the layer's own inputs. An option that swaps them gets a fate for each.
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
    """Makes an option.

    A candidate in `kept` that the backward does not need is dropped, and costs nothing. The option
    that keeps or swaps all candidates is an exception: it gives none of them the fate `RECOMPUTE`.

    Args:
        recompute: what dropping the layer's candidates costs.
        kept: the candidates that are kept or swapped.
        swapped: the candidates among them that are swapped.
        swaps_input: whether the layer's own inputs are swapped, too.
    """
    used, recomputed = recompute.dropping(kept)
    swapped = used.intersection(swapped)
    dropped = frozenset() if kept == recompute.choices else recompute.choices - used
    fates = {recompute.names[c]: Fate.RECOMPUTE for c in sorted(dropped)}
    fates |= {recompute.names[c]: Fate.SWAP for c in sorted(swapped)}
    return Option(
        recompute.kept_bytes(used - swapped),
        recompute.kept_bytes(swapped),
        recompute.extra_s(recomputed),
        sum(recompute.bytes[c] for c in recomputed),
        fates,
        swaps_input,
    )


def _swapping(
    recompute: Recompute,
    kept: frozenset[int],
    input_bytes: int,
) -> Iterable[Option]:
    """Yields options that recompute the same candidates, and swap different sets of the others.

    The sets grow one candidate at a time in two orders: largest candidate first, and smallest
    first. For n candidates these are about 2 n sets instead of 2^n.
    """
    rising = sorted(kept & recompute.choices, key=lambda c: recompute.bytes[c])
    swaps: set[frozenset[int]] = set()
    for order in (rising, rising[::-1]):
        swaps.update(frozenset(order[:n]) for n in range(len(order) + 1))
    input_choices = (False, True) if input_bytes else (False,)
    for swapped, with_input in product(swaps, input_choices):
        yield _option(recompute, kept, swapped, with_input)


def _point(option: Option, input_bytes: int) -> tuple[int, int, float, int]:
    """Returns the numbers by which options are compared, where less is better.

    They are bytes kept, bytes swapped, extra seconds and extra bytes. A layer's own inputs count
    among the bytes kept or among the bytes swapped.
    """
    input_swapped = input_bytes if option.swaps_input else 0
    kept = option.kept_bytes + input_bytes - input_swapped
    swapped = option.swapped_bytes + input_swapped
    return kept, swapped, option.extra_s, option.extra_bytes


def _thinned(points: np.ndarray, count: int) -> list[int]:
    """Returns the indices of the first two points and of the best others, at most `count` in all.

    The others are chosen among the points that no point beats.

    Args:
        points: an array of (points, 4), with a row per option as `_point` returns it.
        count: the most indices that are returned.
    """
    # For n points, this takes n^2 comparisons.
    ids = [0, 1, *(i for i in range(2, len(points)) if not _is_beaten(points, i))]
    if len(ids) <= count:
        return ids
    largest = points.max(0)
    units = np.where(largest > 0, largest, 1)
    scaled = (points / units)[ids]
    # Each column is scaled to at most 1. The price of seconds is 1. There are 13 prices of kept
    # bytes and 13 of swapped bytes. Extra bytes are free, or cost half of what kept bytes cost.
    grid = np.geomspace(1e-3, 1e3, 13)
    link, byte, more = np.array([*product(grid, grid, [0.0, 0.5])]).T
    price = np.stack([byte, link, np.ones_like(byte), more * byte])
    # Points that are best at some prices come first, in falling order of the number of such prices.
    best = (scaled @ price).argmin(0)
    picked, times = np.unique(best, return_counts=True)
    by_times = picked[np.argsort(-times, kind="stable")].tolist()
    chosen = list(dict.fromkeys([0, 1, *by_times]))[: max(count, 2)]
    # Then the point that is farthest from its nearest chosen point is added, again and again. It
    # has not been chosen before: a chosen point has the distance 0, and points are distinct.
    while len(chosen) < count:
        apart = scaled[:, None] - scaled[None, chosen]
        distance = np.abs(apart).sum(2).min(1)
        chosen.append(int(distance.argmax()))
    return [ids[i] for i in chosen]


def _is_beaten(points: np.ndarray, i: int) -> bool:
    """Tells whether point i repeats an earlier point, or another point beats it."""
    as_good = (points <= points[i]).all(1)
    same = (points == points[i]).all(1)
    return bool((as_good & ~same).any() or same[:i].any())
