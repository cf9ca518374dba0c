"""`auto` beside zero bubble's own heuristics: python -m experiments.schedules.published FOLDER

FOLDER holds a clone of sail-sg/zero-bubble-pipeline-parallelism, whose `zb.py` and `zbv.py` are run
as they are, at the settings that its paper publishes: 1.5B and 6.2B on 8 devices and 14.6B on 16,
three numbers of micro-batches each. Their memory limits are 1, 2 and 3 times what 1F1B holds, and
none. Both answers are clocked by the same simulator.

Of zb there is one stage per device; of zbv, which is published for twice the memory of one such
stage, there are two in a vee, which `auto` may take or leave.
"""

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, SplitCost
from jvpipe.cost.hardware import Link
from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.planners.joint.order_search import find_order
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules.auto import given_lists
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B
from jvpipe.schedules.vee import VSchedule

SCHEDULER = "megatron/core/pipeline_parallel/zerobubble/scheduler"
KINDS = (Kind.F, Kind.I, Kind.W)
LIMITS = (1, 2, 3, None)
"""Of what 1F1B holds."""
TRANSIT_BYTES = 64
"""For values on their way, which the heuristics do not count: a byte each here."""


@dataclass(frozen=True)
class Setting:
    """A model's stage as it was profiled: milliseconds of F, B, W and a send, and its sizes.

    Legend: p devices, h hidden, a heads, s tokens, m micro-batches.
    """

    name: str
    p: int
    h: int
    a: int
    m: int
    ms: tuple[float, float, float, float]
    s: int = 1024

    @property
    def kept_bytes(self) -> int:
        """What a forward leaves, in units of the micro-batch and two bytes: 34 h + 5 a s."""
        return 34 * self.h + 5 * self.a * self.s

    @property
    def handed_bytes(self) -> int:
        """What is left between B and W: 32 h."""
        return 32 * self.h


SETTINGS = (
    Setting("1.5B", 8, 2304, 24, 24, (18.522, 18.086, 9.337, 0.601)),
    Setting("1.5B", 8, 2304, 24, 32, (18.513, 18.086, 9.331, 0.626)),
    Setting("1.5B", 8, 2304, 24, 64, (18.546, 18.097, 9.321, 0.762)),
    Setting("6.2B", 8, 4096, 32, 24, (29.718, 29.444, 19.927, 0.527)),
    Setting("6.2B", 8, 4096, 32, 32, (29.802, 29.428, 19.530, 0.577)),
    Setting("6.2B", 8, 4096, 32, 64, (29.935, 29.621, 19.388, 0.535)),
    Setting("14.6B", 16, 5120, 40, 48, (11.347, 11.248, 8.132, 0.377)),
    Setting("14.6B", 16, 5120, 40, 64, (11.307, 11.254, 8.101, 0.379)),
    Setting("14.6B", 16, 5120, 40, 128, (11.325, 11.308, 8.109, 0.378)),
)


def problem(setting: Setting, times: int | None, chunks: int) -> Problem:
    """A setting as a problem, each device's layers in so many parts.

    Args:
        setting: the one.
        times: the memory limit, over what 1F1B holds; None: there is none.
        chunks: parts of what a device has.
    """
    forward, input_s, weight_s, send_s = (x / 1e3 for x in setting.ms)
    split = SplitCost(input_s / chunks, weight_s / chunks, setting.handed_bytes // chunks)
    block = LayerCost(
        "block",
        forward / chunks,
        (input_s + weight_s) / chunks,
        (Option(setting.kept_bytes // chunks),),
        split=split,
    )
    first = LayerCost("embed", 0.0, 0.0, (Option(0),), split=SplitCost(0.0, 0.0))
    layers = setting.p * chunks
    edges = tuple(Edge(k, (k + 1,), 1 if k else 0) for k in range(layers))
    room = None if times is None else times * setting.p * setting.kept_bytes
    limit = None if room is None else room + TRANSIT_BYTES
    return Problem(
        Costs((first, *[block] * layers), edges),
        setting.p,
        ONE_F_ONE_B,
        setting.m,
        limit,
        peer=Link(1 / send_s),
        peer_uses_host=False,
    )


def loaded(folder: Path, name: str) -> Any:
    """A module of the clone, without what it needs only to solve its integer program.

    Args:
        folder: of the clone.
        name: of the module.
    """
    package = SCHEDULER.replace("/", ".")
    for fake in ("torch", "pulp"):
        sys.modules.setdefault(fake, types.ModuleType(fake))
    sys.modules["torch"].Tensor = object  # pyright: ignore[reportAttributeAccessIssue]
    parts = package.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(parts[end - 1]))
    for each in ("graph", name):
        module = types.ModuleType(f"{package}.{each}")
        sys.modules[module.__name__] = module
        path = folder / SCHEDULER / f"{each}.py"
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return sys.modules[f"{package}.{name}"]


def zb(folder: Path, setting: Setting, times: int | None) -> TaskLists:
    """The order of zb.py's heuristic, the best of its eight forms.

    Args:
        folder: of the clone.
        setting: the one.
        times: the memory limit, over what 1F1B holds.
    """
    module, p = loaded(folder, "zb"), setting.p
    f, b, w, send = setting.ms
    config = module.GraphConfig(
        mem_f=[setting.kept_bytes] * p,
        mem_b=[setting.handed_bytes - setting.kept_bytes] * p,
        mem_w=[-setting.handed_bytes] * p,
        max_mem=None if times is None else [times * p * setting.kept_bytes] * p,
        cost_f=[f] * p,
        cost_b=[b] * p,
        cost_w=[w] * p,
        cost_comm=send,
        n_stages=p,
        n_micro=setting.m,
    )
    graph = module.Graph.build_graph(p, setting.m, config)
    _, places, _ = module.initial_solution(graph, print_result=False)
    order = list[tuple[Task, ...]]()
    for stage in range(p):
        ids = {
            (kind, m): places[graph.get_id(at, stage, m)]
            for at, kind in enumerate(KINDS)
            for m in range(setting.m)
        }
        ran = sorted(ids, key=lambda x: ids[x])
        order.append(tuple(Task(stage, kind, m) for kind, m in ran))
    return tuple(order)


def zbv(folder: Path, setting: Setting, times: int | None) -> TaskLists:
    """The order of zbv.py's heuristic, the best of its forms.

    Args:
        folder: of the clone.
        setting: the one.
        times: the memory limit, over what 1F1B holds.
    """
    module, p = loaded(folder, "zbv"), setting.p
    f, b, w, send = (round(1e4 * x) for x in setting.ms)
    kept, handed = setting.kept_bytes // 2, setting.handed_bytes // 2
    most = (times or setting.m) * 2 * p * kept
    graph = module.PipelineGraph(
        p, setting.m, f // 2, b // 2, w // 2, send, kept, handed - kept, -handed, most
    )
    tried = [graph.try_v_schedule(x, y) for x in (True, False) for y in (True, False)]
    schedule, _, _ = min(tried, key=lambda one: one[2])

    def task(device: int, kind: int, chunk: int, m: int) -> Task:
        is_first = chunk == (0 if kind == 0 else 1)
        return Task(device if is_first else 2 * p - 1 - device, KINDS[kind], m)

    return tuple(tuple(task(d, *each) for each in schedule[d]) for d in range(p))


def whole_at_first(order: TaskLists) -> TaskLists:
    """An order whose first stage, which gives no cotangent, has whole backwards in the place of its
    first halves.
    """
    return tuple(
        tuple(
            Task(s, Kind.B if s == 0 and kind is Kind.I else kind, m)
            for s, kind, m in tasks
            if not (s == 0 and kind is Kind.W)
        )
        for tasks in order
    )


def clocked(own: Problem, order: TaskLists, chunks: int) -> tuple[float, int]:
    """The simulated seconds of a step in an order, and the most bytes on a device.

    Args:
        own: the problem.
        order: of its tasks.
        chunks: of each device.
    """
    stages = own.devices * chunks
    schedule = given_lists(order)
    placed = replace(own, stages=stages, schedule=schedule)
    bounds = (0, *range(2, stages + 2))
    evaluation = evaluate_decision(placed, Decision.keeping_all(bounds))
    return simulated_step_s(placed, evaluation.stages), evaluation.limit_bytes


def rows(folder: Path, every: int) -> Iterator[tuple[str, float, float]]:
    """Yields each setting's name, the seconds of their step, and of ours.

    Args:
        folder: of the clone.
        every: takes each so many-th of the settings.
    """
    cases = [(s, times, c) for c in (1, 2) for s in SETTINGS for times in LIMITS]
    for setting, times, chunks in cases[::every]:
        own = problem(setting, times, chunks)
        try:
            order = (zb if chunks == 1 else zbv)(folder, setting, times)
        except (ValueError, AssertionError):
            continue  # their heuristic finds nothing under this limit
        theirs_s, held = clocked(own, order, chunks)
        ours_s = find_order(own).step_s
        name = f"{'zb' if chunks == 1 else 'zbv'} {setting.name} m {setting.m} limit {times}"
        over = own.memory_limit_bytes and held > own.memory_limit_bytes
        yield name + (" (theirs is over it)" if over else ""), theirs_s, ours_s


def main(folder: tyro.conf.Positional[Path], every: int = 1) -> int:
    """Prints a row for each setting; the exit code is 1 if ours is behind in one."""
    assert VSchedule().chunks == 2, "what zbv plans for"
    print("| setting | theirs, ms | ours, ms | ours over theirs |\n|---|---|---|---|")
    behind = count = 0
    for name, theirs_s, ours_s in rows(folder, every):
        ratio = ours_s / theirs_s
        behind, count = behind + (ratio > 1 + 1e-6), count + 1
        print(f"| {name} | {1e3 * theirs_s:.1f} | {1e3 * ours_s:.1f} | {ratio:.4f} |", flush=True)
    print(f"\n{behind} of {count} behind")
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
