"""The parsers of the systems themselves, in environments of their own: `make peers` makes those."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from jvpipe import models
from jvpipe.ir.plan import Plan
from jvpipe.schedules import SCHEDULES
from tests.exports.peers import FORMATS, run, said_by
from tests.exports.plans import CASES, again, check, for_six, outline, plan, planned, sized

pytestmark = pytest.mark.thorough
ORDERS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half")


def exported(name: str, plans: Iterable[Plan]) -> list[tuple[str, Plan]]:
    """What a format does not refuse of some plans, each with the text of it."""
    found = []
    for each in plans:
        try:
            found.append((each.export(name), each))
        except ValueError:
            continue
    return found


def check_all(
    name: str, found: Sequence[tuple[str, Plan]], microbatches: int, folder: Path
) -> None:
    """Asserts that a system's own parser says each plan; texts that are equal are read once."""
    texts = list(dict.fromkeys(text for text, _ in found))
    said = dict(zip(texts, said_by(name, texts, microbatches, folder), strict=True))
    for text, given in found:
        check(given, said[text])


def workloads() -> Iterator[Plan]:
    """The plans of the table: each workload under each schedule."""
    yield from (planned(workload, name) for workload, name in product(models.NAMES, SCHEDULES))


@pytest.mark.parametrize(
    ("name", "least"), [("torch-csv", 60), ("megatron", 5), ("maxtext", 6), ("jaxpp", 50)]
)
def test_a_systems_own_parser_reads_what_the_table_says(
    name: str, least: int, tmp_path: Path
) -> None:
    """And every one of its cells that is not refused."""
    found = exported(name, workloads())
    assert len(found) >= least
    check_all(name, found, 4, tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_a_systems_own_parser_reads_what_is_made_by_hand(name: str, tmp_path: Path) -> None:
    """Uneven and nested cuts, three chunks, other devices, one stage; blocks that are computed
    again.
    """
    found = exported(name, (for_six(given) for given, names in CASES.values() if name in names))
    assert len(found) == sum(name in names for _, names in CASES.values())
    fates = [again(0) | again(1), again(2) | again(3), again(4) | again(5)]
    for schedule, each in product(("1f1b", "gpipe"), (fates, [again(0), again(2), again(4)])):
        given = for_six(plan([5, 4, 5], schedule))
        stages = zip(given.stages, each, strict=True)
        given = replace(given, stages=tuple(replace(stage, fates=x) for stage, x in stages))
        found += exported(name, [given])
    check_all(name, found, 6, tmp_path)


@pytest.mark.parametrize("name", ["torch-csv", "jaxpp"])
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 2), (3, 5), (3, 6), (4, 8), (4, 3)])
def test_a_systems_own_parser_reads_orders_of_any_size(
    name: str, devices: int, microbatches: int, tmp_path: Path
) -> None:
    found = exported(name, (sized(schedule, devices, microbatches) for schedule in ORDERS))
    assert len(found) >= 5
    check_all(name, found, microbatches, tmp_path)


@pytest.mark.parametrize(
    ("cuts", "devices", "schedule"),
    [
        ([5, 4, 5], [0, 1, 2], "zb-h1"),
        ([7, 7], [1, 0], "1f1b"),
        ([3, 4, 2, 5], [0, 1, 1, 0], "v-half"),
        ([3, 2, 2, 2, 2, 3], [0, 1, 0, 1, 0, 1], "interleaved-3"),
    ],
)
def test_torch_runs_the_csv_and_has_the_gradients_of_the_whole_batch(
    tmp_path: Path, cuts: list[int], devices: list[int], schedule: str
) -> None:
    """Without REDUCE_GRAD they were as many times too large as there are micro-batches."""
    given = Plan.from_cuts(cuts, devices, schedule=schedule, outline=outline(6, 4))
    (path := tmp_path / "schedule.csv").write_text(given.export("torch-csv"))
    assert float(run("torch", "run_by_torch.py", str(path), str(len(cuts)), "4")) < 1e-6
