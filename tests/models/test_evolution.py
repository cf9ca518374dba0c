import math
from itertools import islice

import pytest

from jvpipe.models.architecture import Architecture, Block, SearchSpace
from jvpipe.models.evolution import RegularizedEvolution

SPACE = SearchSpace(("a", "b", "c"), ("x", "y", "z"), slots=6, fewest=3)
GOAL = Architecture(
    (Block("a", "z"), Block("b", "y"), Block("c", "x"), None, Block("a", "x"), None)
)


def distance(architecture: Architecture) -> float:
    return float(sum(a != b for a, b in zip(architecture.slots, GOAL.slots, strict=True)))


def searched(
    seed: int, steps: int, **options: int
) -> tuple[RegularizedEvolution, list[Architecture]]:
    search, seen = RegularizedEvolution(SPACE, seed, **options), []
    for architecture in islice(search, steps):
        search.report(architecture, distance(architecture))
        seen.append(architecture)
    return search, seen


def test_a_seed_and_the_reports_give_the_stream() -> None:
    one, again, other = (searched(seed, 60)[1] for seed in (0, 0, 1))
    assert one == again != other
    worst = RegularizedEvolution(SPACE, 0)
    for architecture in one[:16]:  # the first population is drawn before anything is known
        assert next(worst) == architecture
        worst.report(architecture, -distance(architecture))
    assert list(islice(worst, 4)) != one[16:20]


def test_the_oldest_dies() -> None:
    for steps in (5, 8, 9, 30):
        search, seen = searched(3, steps, population=8, sample=3)
        assert [member for member, _ in search.population] == seen[-8:]


def test_the_parent_is_the_best_of_the_sample() -> None:
    search, _ = searched(0, 8, population=8, sample=400)  # so many that the sample holds all
    for i in range(30):
        search.report(next(search), 0.5 - i % 7 + i / 100)  # no two alike
        best = min(search.population, key=lambda member: member[1])[0]
        child = next(search)
        assert sum(a != b for a, b in zip(best.slots, child.slots, strict=True)) == 1


def test_a_sample_of_one_takes_any_parent() -> None:
    search, seen = searched(0, 8, population=8, sample=1)
    children = list(islice(search, 60))
    near = {
        a
        for a in seen
        for c in children
        if sum(x != y for x, y in zip(a.slots, c.slots, strict=True)) == 1
    }
    assert len(near) > 4


def test_it_finds_what_is_good() -> None:
    search, seen = searched(0, 300)
    assert distance(search.best[0]) < min(map(distance, seen[:16]))
    assert search.best[1] <= 1


def test_a_loss_that_is_no_number_is_the_worst() -> None:
    search = RegularizedEvolution(SPACE, 0, population=2)
    bad, good = next(search), next(search)
    search.report(bad, math.nan)
    search.report(good, 1e9)
    assert search.best == (good, 1e9)


def test_populations_and_losses_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="population=0 and sample=4 must be at least 1"):
        RegularizedEvolution(SPACE, 0, population=0)
    search = RegularizedEvolution(SPACE, 0, population=2)
    list(islice(search, 2))
    with pytest.raises(ValueError, match="2 architectures were returned, but no loss was reported"):
        next(search)
