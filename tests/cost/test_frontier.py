"""A layer's options: complete at the ends, efficient between, and few."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.cost.costs import Option
from jvpipe.cost.frontier import (
    calibrated,
    layer_options,
    named,
    recompute_options,
    recomputes,
)
from jvpipe.cost.model_costs import own_inputs
from jvpipe.cost.presets import CORE
from jvpipe.cost.recompute import Recompute
from jvpipe.ir.plan import Fate
from tests.cost.test_recompute import chances
from tests.cost.traces import programs, traced

# Three candidates of their own equation each: bytes 4, 2, 1 and seconds 8, 2, 3.
THREE = Recompute(
    ("a", "b", "c"),
    ("a", "b", "c"),
    (4, 2, 1),
    frozenset(),
    (frozenset(), frozenset(), frozenset(), frozenset({0, 1, 2})),
    np.eye(3, dtype=bool),
    np.array([8.0, 2.0, 3.0]),
)


def point(option: Option, input_bytes: int) -> tuple[float, ...]:
    swapped = input_bytes if option.swaps_input else 0
    return (
        option.kept_bytes + input_bytes - swapped,
        option.swapped_bytes + swapped,
        option.extra_s,
        option.extra_bytes,
    )


def test_a_layer_that_is_recomputed_as_a_whole_is_kept_swapped_or_run_again() -> None:
    found = [
        (o.kept_bytes, o.swapped_bytes, o.extra_s, o.extra_bytes)
        for o in recompute_options(THREE, count=100, again=(20.0, 3))
    ]
    # The forward takes 20 s and yields the 7 bytes of candidates and 3 bytes of results.
    assert found[0] == (7, 0, 0.0, 0)
    assert found[-1] == (0, 0, 20.0, 10)
    assert all(kept + swapped == 7 for kept, swapped, *_ in found[:-1])


def test_without_swaps_the_options_are_the_efficient_subsets_non_convex_ones_included() -> None:
    found = {
        (o.kept_bytes, o.extra_s): dict(o.fates)
        for o in recompute_options(THREE, count=100)
        if not o.swapped_bytes
    }
    assert found == {
        (7, 0.0): {},
        (5, 2.0): {"b": "recompute"},
        (4, 5.0): {"b": "recompute", "c": "recompute"},
        (3, 8.0): {"a": "recompute"},  # above the line from (1, 10) to (4, 5)
        (1, 10.0): {"a": "recompute", "b": "recompute"},
        (0, 13.0): {"a": "recompute", "b": "recompute", "c": "recompute"},
    }


def test_swapping_trades_kept_bytes_one_for_one() -> None:
    for option in recompute_options(THREE, count=100):
        dropped = [name for name, fate in option.fates.items() if fate == "recompute"]
        swapped = [name for name, fate in option.fates.items() if fate == "swap"]
        sizes = dict(zip(THREE.names, THREE.bytes, strict=True))
        assert option.swapped_bytes == sum(sizes[name] for name in swapped)
        assert option.kept_bytes == 7 - option.swapped_bytes - sum(sizes[name] for name in dropped)
        assert option.extra_bytes == sum(sizes[name] for name in dropped)
    assert any(o.swapped_bytes == 7 and o.extra_s == 0 for o in recompute_options(THREE, count=100))


@settings(max_examples=60, deadline=None)
@given(chances(), st.sampled_from([0, 16]), st.integers(2, 24))
def test_options_begin_with_everything_end_with_nothing_and_do_not_beat_each_other(
    parts: tuple, input_bytes: int, most: int
) -> None:
    recompute = Recompute(*parts)
    options = recompute_options(recompute, input_bytes, most)
    assert len(options) <= most
    first, last = options[0], options[-1]
    assert (first.extra_s, first.swapped_bytes, dict(first.fates), first.swaps_input) == (
        0,
        0,
        {},
        False,
    )
    assert (last.kept_bytes, last.swapped_bytes, last.swaps_input) == (0, 0, False)
    assert all(option.swaps_input is False for option in options if not input_bytes)
    between = [point(option, input_bytes) for option in options[1:-1]]
    for a, b in product(between, between):
        assert a is b or any(x < y for x, y in zip(a, b, strict=True))


@settings(max_examples=40, deadline=None)
@given(chances(most=6), st.floats(-3, 3), st.floats(-3, 3))
def test_few_options_serve_most_prices(parts: tuple, byte: float, link: float) -> None:
    recompute = Recompute(*parts)
    every, few = (
        np.array([point(o, 16) for o in recompute_options(recompute, 16, most)])
        for most in (10**6, 24)
    )
    scale = np.where(every.max(0) > 0, every.max(0), 1)
    price = np.array([10**byte, 10**link, 1.0, 0.0]) / scale
    assert (few @ price).min() <= 1.1 * (every @ price).min() + 1e-9


def test_measured_seconds_take_the_place_of_modeled_ones() -> None:
    options = recompute_options(THREE)
    found = calibrated(options, [(5.0, 50.0), (13.0, 60.0)])
    by_model = {o.extra_s: f for o, f in zip(options, found, strict=True)}
    assert by_model[0.0].extra_s == 0
    assert by_model[5.0].extra_s == 50
    assert by_model[13.0].extra_s == 60
    assert by_model[2.0].extra_s == pytest.approx(20)
    assert [o.extra_bytes for o in found] == [o.extra_bytes for o in options]
    assert [o.fates for o in found] == [o.fates for o in options]


def test_noise_does_not_make_more_recomputation_cheaper() -> None:
    found = calibrated(recompute_options(THREE), [(5.0, 9.0), (13.0, 2.0)])
    assert found[-1].extra_s == 9


def test_fates_bear_the_name_of_their_layer_and_inputs_their_own() -> None:
    (option,) = named(
        [Option(0, 4, fates={"dot_0": Fate.SWAP}, swaps_input=True)], "block", ["before:3"]
    )
    assert option.fates == {"block/dot_0": "swap", "before:3": "swap"}


def test_no_two_tensors_of_a_model_share_a_name() -> None:
    model = traced("pre-norm")
    signatures = [made.signature for made in programs("pre-norm")]
    found = recomputes(model, programs("pre-norm", "nothing"), CORE)
    forwards_s = [0.0] * len(found)
    options = layer_options(model, own_inputs(model.graph, signatures), found, forwards_s)
    names = [
        name for layer in options for name, fate in layer[-1].fates.items() if fate == "recompute"
    ]
    assert len(names) == len(set(names)) == sum(len(recompute.choices) for recompute in found)
    assert found[1] is found[3]  # blocks alike
    assert [o.extra_s for o in options[1]] == [o.extra_s for o in options[3]]


def test_what_costs_nothing_by_the_model_stays_free() -> None:
    found = calibrated([Option(8)], [(0.0, 1e-4), (1e-3, 1e-3)])
    assert found[0].extra_s == 0
