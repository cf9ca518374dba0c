"""Steps with the optimizer's state on the host, simulated on H100s.

    python -m experiments.state_on_host.run

Nothing runs: layers are estimated from their shapes, and the rows of a step that a pipeline would
run are simulated.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import optax

from experiments.planners.questions import question_of
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.costs import Costs
from jvpipe.cost.hardware import Cluster
from jvpipe.ir.buffers import Lowered, peaks
from jvpipe.ir.kinds import KINDS, CopyLink, Kind
from jvpipe.ir.plan import Plan
from jvpipe.ir.rows import Row
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.step import lower_step
from jvpipe.models import load
from jvpipe.planners.user_fates import with_state_fates
from jvpipe.programs.model_programs import layer_programs
from jvpipe.programs.store import shared_store
from jvpipe.schedules.planned import lists_of
from jvpipe.session.question import Question
from jvpipe.simulate.simulator import Links, links_between_devices, simulate

GIB, CLUSTER = 2**30, find_cluster("h100")
Subject = tuple[str, str, dict[str, Any]]
"""A title, a model and its dials."""
MODELS: tuple[Subject, ...] = (
    (
        "GPT-2 1.5B",
        "gpt2",
        {"size": "770m", "blocks": 48, "width": 1600, "heads": 25, "tokens": 1024},
    ),
    ("Llama 8B", "llama", {"size": "8b", "tokens": 2048}),
)


def seconds(row: Row, lowered: Lowered, costs: Costs, cluster: Cluster) -> float:
    """The seconds of a row: forwards and backwards as estimated, updates and copies by the bytes
    that they touch.
    """
    size = sum(lowered.buffers[b].bytes for b in row.writes)
    info, layer = KINDS[row.kind], costs.layers[max(row.layer, 0)]
    match row.kind:
        case Kind.F | Kind.R:
            return layer.forward_s
        case Kind.B:
            return layer.backward_s
        case Kind.U:
            touched = size + sum(lowered.buffers[b].bytes for b in row.reads)
            return touched / cluster.device.memory_bytes_per_s
        case _ if info.link in (CopyLink.TO_HOST, CopyLink.FROM_HOST):
            return cluster.host.seconds(size)
        case _ if info.link is CopyLink.PEER:
            return cluster.peer.seconds(size)
        case _:
            return 0.0


def both_ways(lowered: Lowered) -> Links:
    """A link to the host for each way: PCIe carries both at once."""
    one = links_between_devices(lowered)

    def links(row: Row) -> Sequence[str]:
        return [f"{name} {row.kind}" if "host" in name else name for name in one(row)]

    return links


class Simulated(NamedTuple):
    """A step: its seconds with one link to the host for both ways, and one for each; what devices
    and host hold.
    """

    step_s: float
    both_ways_s: float
    device_bytes: int
    host_bytes: int


def simulated(question: Question, cluster: Cluster, fates: Mapping[str, str]) -> Simulated:
    """A step of a model in as many layers on each device, under 1F1B.

    Args:
        question: the model, on so many devices.
        cluster: of them.
        fates: of the optimizer's state, by patterns.
    """
    model, M = question.trace(), question.microbatches
    graph, optimizer = model.traced.graph, question.cut(model)
    costs = question.costs(cluster, model.traced, optimizer)
    each, more = divmod(len(graph.layers), question.stages)
    plan = Plan.from_cuts([each + (s < more) for s in range(question.stages)], schedule="1f1b")
    plan = with_state_fates(graph, plan, fates)
    signatures = [programs.signature for programs in layer_programs(shared_store(), model.traced)]
    layouts = [MicrobatchLayout.of(graph, plan, signatures)] * M
    lowered = lower_step(graph, layouts, lists_of(plan, question.schedule, M), optimizer)

    def row_s(row: Row) -> float:
        return seconds(row, lowered, costs, cluster)

    *devices, host = peaks(lowered, question.stages)
    return Simulated(
        simulate(lowered, row_s).step_s,
        simulate(lowered, row_s, both_ways(lowered)).step_s,
        max(peak.bytes for peak in devices),
        host.bytes,
    )


def table(subjects: Sequence[Subject], microbatches: Sequence[int]) -> str:
    """A line for each model, number of devices and of micro-batches."""
    names = ["model", "devices", "M", "kept, s", "on the host, s", "both ways at once, s"]
    names += ["kept, GiB", "on the host, GiB", "host, GiB"]
    rows = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for (title, name, dials), devices, M in product(subjects, (1, 2), microbatches):
        workload = load(name, **dials, dtype="bfloat16")
        question = question_of(workload, M, M, devices, optax.adamw(1e-4))
        kept, away = (simulated(question, CLUSTER, fates) for fates in ({}, {"*": "swap"}))
        told_s = [kept.step_s, away.step_s, away.both_ways_s]
        told_bytes = [kept.device_bytes, away.device_bytes, away.host_bytes]
        cells = [title, devices, M, *(f"{s:.2f}" for s in told_s)]
        rows.append(
            f"| {' | '.join(map(str, [*cells, *(f'{b / GIB:.1f}' for b in told_bytes)]))} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(MODELS, (8, 64)))
