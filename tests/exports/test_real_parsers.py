"""The parsers of the systems themselves, in environments of their own: `make peers` makes those."""

from collections.abc import Iterator
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


def exported(name: str, plans: Iterator[Plan]) -> dict[str, Plan]:
    """What a format does not refuse of some plans, by the text of it."""
    found = {}
    for each in plans:
        try:
            found[each.export(name)] = each
        except ValueError:
            continue
    return found


def workloads() -> Iterator[Plan]:
    """The plans of the table: each workload under each schedule."""
    yield from (planned(workload, name) for workload, name in product(models.NAMES, SCHEDULES))


@pytest.mark.parametrize(
    ("name", "least"), [("torch-csv", 90), ("megatron", 4), ("maxtext", 5), ("jaxpp", 90)]
)
def test_a_systems_own_parser_reads_what_the_table_says(
    name: str, least: int, tmp_path: Path
) -> None:
    """And every one of its cells that is not refused."""
    found = exported(name, workloads())
    assert len(found) >= least
    for given, said in zip(found.values(), said_by(name, [*found], 4, tmp_path), strict=True):
        check(given, said)


@pytest.mark.parametrize("name", FORMATS)
def test_a_systems_own_parser_reads_what_is_made_by_hand(name: str, tmp_path: Path) -> None:
    """Uneven and nested cuts, three chunks, other devices, one stage; blocks that are computed again."""
    found = {
        for_six(given).export(name): for_six(given)
        for given, names in CASES.values()
        if name in names
    }
    fates = [again(0) | again(1), again(2) | again(3), again(4) | again(5)]
    for schedule, each in product(("1f1b", "gpipe"), (fates, [again(0), again(2), again(4)])):
        given = for_six(plan([5, 4, 5], schedule))
        stages = zip(given.stages, each, strict=True)
        given = replace(given, stages=tuple(replace(stage, fates=x) for stage, x in stages))
        found |= exported(name, iter([given]))
    for given, said in zip(found.values(), said_by(name, [*found], 6, tmp_path), strict=True):
        check(given, said)


@pytest.mark.parametrize("name", ["torch-csv", "jaxpp"])
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 2), (3, 5), (3, 6), (4, 8), (4, 3)])
def test_a_systems_own_parser_reads_orders_of_any_size(
    name: str, devices: int, microbatches: int, tmp_path: Path
) -> None:
    found = exported(name, (sized(schedule, devices, microbatches) for schedule in ORDERS))
    assert len(found) >= 5
    said = said_by(name, [*found], microbatches, tmp_path)
    for given, each in zip(found.values(), said, strict=True):
        check(given, each)


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
