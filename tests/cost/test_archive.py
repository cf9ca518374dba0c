"""Measured seconds are kept on disk, and found again by other processes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

import jvpipe
from jvpipe import Plan
from jvpipe.cost import links, measure
from jvpipe.cost.archive import FOLDER, Archive
from jvpipe.cost.costs import Costs
from jvpipe.planners.splitting import CutCandidate, Splitter
from jvpipe.trace.graph import Traced
from jvpipe.trace.layer_split import split_layers, split_points
from tests.end_to_end.test_exactness import batch_of
from tests.zoo import CASES, transformer


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A compilation cache in which nothing compiled is kept: tests would find each other's."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 1e9,
    }
    before = {name: jax.config.values[name] for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every program is said to take longer than the one before; the seconds that were read."""
    read: list[float] = []

    def seconds(*_: Any) -> list[float]:
        read.append(1e-3 * (1 + len(read)))
        return [read[-1], read[-1]]

    monkeypatch.setattr(measure, "_seconds", seconds)
    return read


def planned(**options: Any) -> Costs:
    """What a fresh pipeline decides on."""
    m = CASES["mlp"]()
    pipe = jvpipe.Pipeline(
        m.loss_fn, optax.sgd(0.1), 2, 4, planner="dapple", devices=jax.devices()[:2], **options
    )
    pipe.init(m.params, batch_of(m, 4), None)
    assert pipe.session.compiled_plans.planned is not None
    return pipe.session.compiled_plans.planned.problem.costs


def test_two_pipelines_decide_on_the_same_seconds(cache: Path, clock: list[float]) -> None:
    first, count = planned(), len(clock)
    assert count > 0
    assert planned() == first
    assert len(clock) == count
    assert planned(remeasure=True) != first
    assert len(clock) == 2 * count


@pytest.mark.thorough
def test_layers_are_cut_as_another_process_found_best(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, looked = transformer(2), list[CutCandidate]()

    def better(
        splitter: Splitter, begin: CutCandidate, plan: Callable[[Traced], CutCandidate], *_: Any
    ) -> Any:
        looked.append(begin)
        place = split_points(begin.traced, 1, lambda eqns, _: [1.0] * len(eqns))[0]
        return plan(split_layers(begin.traced, {1: place}))

    def plan(microbatches: int = 4, remeasure: bool = False) -> Plan:
        devices = jax.devices()[:2]
        pipe = jvpipe.Pipeline(
            m.loss_fn, optax.sgd(0.1), 2, microbatches, devices=devices, remeasure=remeasure
        )
        pipe.init(m.params, batch_of(m, 4), m.rng)
        return pipe.plan

    monkeypatch.setattr(Splitter, "better", better)
    first = plan()
    assert len(first.splits) == 1
    assert (plan(), len(looked)) == (first, 1)
    assert len(plan(microbatches=2).splits) == 1
    assert len(looked) == 2, "it is another question"
    plan(remeasure=True)
    assert len(looked) == 3


def test_without_a_cache_nothing_is_kept(tmp_path: Path, clock: list[float]) -> None:
    first = planned()
    assert planned() != first
    assert Archive.beside_the_cache().folder is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda x: x[: len(x) // 2],
        lambda x: "",
        lambda x: x.replace("measured", "m"),
        lambda x: x.replace("[0.", "[1."),
    ],
)
def test_what_is_damaged_is_measured_again(
    damage: Callable[[str], str], cache: Path, clock: list[float]
) -> None:
    planned()
    count = len(clock)
    for path in (cache / FOLDER).iterdir():
        path.write_text(damage(path.read_text()))
    planned()
    assert len(clock) == 2 * count
    planned()
    assert len(clock) == 2 * count


def test_numbers_that_no_clock_gives_are_none() -> None:
    assert Archive().find("x") is None


def test_links_are_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_LARGE", 2**18)
    links.known_links.cache_clear()
    archive, (here, there, *_) = Archive(tmp_path), jax.devices()
    first = links.links_between(here, there, archive)
    monkeypatch.setattr(links, "measure_links", lambda *_: pytest.fail("measured again"))
    assert links.links_between(here, there) is first
    links.known_links.cache_clear()
    assert links.links_between(here, there, archive) == first


def test_what_is_measured_while_others_work_is_not_kept(tmp_path: Path) -> None:
    Archive(tmp_path, busy=True).keep([1.0], "x")
    assert Archive(tmp_path).find("x") is None
    Archive(tmp_path).keep([1.0], "x")
    assert Archive(tmp_path, busy=True).find("x") == [1.0]
    assert Archive(tmp_path, again=True).find("x") is None


def test_a_disk_that_takes_nothing_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Archive(tmp_path / "file").keep([1.0], "x")
    assert Archive(tmp_path / "file").find("x") is None
