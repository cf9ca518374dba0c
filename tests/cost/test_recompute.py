"""What is computed again, against the programs that are really made for each choice."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe._jax import ClosedJaxpr, JaxprEqn
from jvpipe.cost.frontier import recomputes
from jvpipe.cost.presets import CORE
from jvpipe.cost.recompute import Recompute
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer import differentiate
from jvpipe.trace.primitives import is_heavy, is_random
from tests.cost.traces import programs, traced
from tests.grid import grid


def later(name: str, layer: int) -> list[int]:
    graph = traced(name).graph
    return [
        t
        for t in graph.layers[layer].reading(ValueKind.TENSOR)
        if graph.tensors[t].readers[-1] != layer
    ]


def heavy(closed: ClosedJaxpr) -> Counter[str]:
    """The costly equations of a program, by what they do to what shapes."""
    return Counter(_costly(eqn) for eqn in closed.jaxpr.eqns if is_heavy(eqn) or is_random(eqn))


def _costly(eqn: JaxprEqn) -> str:
    return f"{eqn.primitive} {[v.aval for v in eqn.invars]} {[v.aval for v in eqn.outvars]}"


@pytest.mark.parametrize(
    ("name", "layer"),
    grid(
        [("pre-norm", 1), ("pre-norm", 4), ("threefry", 1), ("experts", 1), ("resnet", 5)],
        ("pre-norm", 1),
        ("threefry", 1),
    ),
)
def test_bytes_and_repeated_work_are_those_of_the_programs(name: str, layer: int) -> None:
    body = traced(name).bodies[layer]
    recompute = recomputes(traced(name), programs(name, "nothing"), CORE)[layer]
    found = {}
    n = len(recompute.names)
    for count in range(n + 1) if n < 5 else (0, 1, n):
        for kept in combinations(range(n), count):
            made = differentiate(body, [recompute.names[c] for c in kept], later(name, layer))
            used, again = recompute.dropping(kept)
            assert recompute.kept_bytes(used) == sum(a.bytes for a in made.signature.residuals)
            found[kept] = sum(heavy(made.backward).values()), recompute.extra_s(again)
    # The more costly equations a backward has, the longer it is said to take; with the same, the
    # same.
    least = found[tuple(range(len(recompute.names)))][0]
    assert all((count == least) == (extra_s == 0) for count, extra_s in found.values())
    assert found[()][1] == max(extra_s for _, extra_s in found.values())


@pytest.mark.parametrize(
    "name",
    grid(
        ["post-norm", "threefry", "resnet", "cond", "recurrent", "loops", "experts", "linen"],
        "threefry",
        "resnet",
        "loops",
    ),
)
def test_keeping_everything_keeps_the_residuals_of_the_run(name: str) -> None:
    found = recomputes(traced(name), programs(name, "nothing"), CORE)
    for recompute, made in zip(found, programs(name), strict=True):
        used, _ = recompute.dropping(recompute.choices)
        assert recompute.kept_bytes(used) == sum(a.bytes for a in made.signature.residuals)


@st.composite
def chances(draw: st.DrawFn, most: int = 7) -> tuple:
    """Candidates in order; each is made of some before it and of equations, some of them shared."""
    n = draw(st.integers(1, most))
    columns = draw(st.integers(1, 8))
    parents = [
        frozenset(draw(st.sets(st.integers(0, c - 1), max_size=3))) if c else frozenset()
        for c in range(n)
    ]
    needed = frozenset(draw(st.sets(st.integers(0, n - 1), min_size=1)))
    behind = np.array([[draw(st.booleans()) for _ in range(columns)] for _ in range(n)])
    seconds = np.array([float(draw(st.integers(0, 20))) for _ in range(columns)])
    sizes = tuple(draw(st.integers(1, 50)) for _ in range(n))
    names = tuple(f"c{c}" for c in range(n))
    return names, names, sizes, frozenset(), (*parents, needed), behind, seconds


def cost(recompute: Recompute, kept: frozenset[int], price: float) -> float:
    used, again = recompute.dropping(kept)
    return recompute.extra_s(again) + price * recompute.kept_bytes(used)


@settings(max_examples=150, deadline=None)
@given(chances(), st.sampled_from([0.01, 0.3, 1.0, 2.5]))
def test_a_minimum_cut_is_the_best_choice_at_its_price(parts: tuple, price: float) -> None:
    recompute = Recompute(*parts)
    every = [
        frozenset(kept)
        for n in range(len(recompute.names) + 1)
        for kept in combinations(recompute.choices, n)
    ]
    best = min(cost(recompute, kept, price) for kept in every)
    assert cost(recompute, recompute.cut(price), price) == pytest.approx(best, rel=1e-5, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(chances())
def test_subsets_are_all_pareto_points(parts: tuple) -> None:
    recompute = Recompute(*parts)
    every = [
        frozenset(kept)
        for n in range(len(recompute.names) + 1)
        for kept in combinations(recompute.choices, n)
    ]
    points = {
        (recompute.kept_bytes(u), recompute.extra_s(a)) for u, a in map(recompute.dropping, every)
    }
    best = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    found = recompute.subsets()
    assert sorted(
        (recompute.kept_bytes(k), recompute.extra_s(recompute.dropping(k)[1])) for k in found
    ) == sorted(best)


@settings(max_examples=20, deadline=None)
@given(chances(most=14), st.floats(0.01, 3.0))
def test_of_many_candidates_the_cuts_are_found_too(parts: tuple, price: float) -> None:
    recompute = Recompute(*parts)
    found = recompute.subsets()
    best = cost(recompute, recompute.cut(price), price)
    ends = [cost(recompute, kept, price) for kept in (frozenset(), recompute.choices)]
    assert min(cost(recompute, kept, price) for kept in found) <= min(ends) + 1e-9
    assert min(cost(recompute, kept, price) for kept in found) <= best * 1.3 + 1e-9
