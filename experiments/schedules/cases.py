"""The problems of the simulated table: drawn transformers, real profiles, the package's models on
an A100.

A drawn model has 32 layers, halves of blocks in turn: attention, whose W needs 1.17 times what its
F leaves, then a feed-forward network, whose W needs 2.2 times that. A forward takes one second, or
0.5 to 1.5 where layers are uneven.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from experiments.planners.profiles import profiles_folder
from experiments.planners.questions import costs_on, question
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, SplitCost
from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.papers.registry import find_planner
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.profiles.graph_file import read_graph
from jvpipe.schedules.auto import AUTO
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B
from jvpipe.session.question import on_cluster

DEVICES, ROUNDS = (2, 4, 8), (1, 2, 4)
"""Devices; micro-batches per device."""
HALVES = ((1.0, 1.0), (1.3, 0.7))
"""Of a drawn layer's backward: seconds of I and W per second of its forward."""
SENDS = (0.0, 0.1, 0.2)
"""What a send takes of a device's forward."""
SHARES = (None, 0.8, 0.6)
"""Limits, as shares of what 1F1B takes with everything kept."""
LAYERS, SEED = 32, 16
KB = 1_000
KINDS = (
    (1_570 * KB, SplitCost(0.0, 0.0, 1_050 * KB, 790 * KB)),
    (1_310 * KB, SplitCost(0.0, 0.0, 1_310 * KB, 1_570 * KB)),
)
"""What a forward leaves, and what is there between the halves of the backward."""
SENT = 260 * KB
MODELS = (
    *(
        ("bert", "base", 64),
        ("bert", "large", 64),
        ("gpt2", "770m", 16),
        ("llama", "1b", 4),
        ("xlnet", "24", 16),
    ),
    *(
        ("gnmt", "8", 64),
        ("transformer", "base", 64),
        ("t5", "small", 32),
        ("resnet", "50", 64),
        ("vgg", "16", 64),
    ),
    *(("unet", "233m", 8), ("amoebanet", "28m", 32)),
)
"""Model, size, and examples of a micro-batch."""


@dataclass(frozen=True)
class Case:
    """A row: which model, what its rows have in common, and the problem, whose schedule is 1F1B and
    has no limit yet.

    `make` gives the problem: costs of a model are traced only where they are wanted.
    """

    group: str
    name: str
    make: Callable[[], Problem]
    share: float | None


def drawn(
    devices: int,
    microbatches: int,
    halves: tuple[float, float],
    send: float,
    uneven: bool,
    layers: int = LAYERS,
) -> Problem:
    """A drawn model; the same arguments give the same one.

    >>> drawn(2, 4, (1.0, 1.0), 0.0, uneven=False).costs.layers[0].backward_s
    2.0
    """
    draw, some = random.Random(SEED), []
    for i in range(layers):
        f = draw.uniform(0.5, 1.5) if uneven else 1.0
        kept, split = KINDS[i % len(KINDS)]
        options = (
            Option(kept),
            Option(kept // 3, 0, 0.35 * f, kept - kept // 3),
            Option(0, 0, 0.9 * f, kept),
        )
        split = replace(split, input_s=halves[0] * f, weight_s=halves[1] * f)
        b = split.input_s + split.weight_s
        some.append(
            LayerCost(
                f"layer{i}", f, b, options, input_bytes=SENT, temporary_bytes=2 * SENT, split=split
            )
        )
    edges = tuple(Edge(i, (i + 1,), SENT) for i in range(layers - 1))
    forward_s = sum(layer.forward_s for layer in some) / devices
    link = Link(SENT / (send * forward_s), 0.0) if send else INFINITE
    return Problem(
        Costs(tuple(some), edges),
        devices,
        ONE_F_ONE_B,
        microbatches,
        peer=link,
        peer_uses_host=False,
    )


def bytes_of_1f1b(problem: Problem) -> int:
    """What the fullest device holds under 1F1B with everything kept: limits are shares of it."""
    return evaluate_decision(problem, find_planner("jvpipe").decide(problem)).peak_bytes


def drawn_cases() -> Iterator[Case]:
    """Yields every row of drawn models."""
    for devices, rounds, halves, send, uneven in product(
        DEVICES, ROUNDS, HALVES, SENDS, (False, True)
    ):
        microbatches = devices * rounds
        name = f"S {devices}, M {microbatches}, I : W {halves[0]} : {halves[1]}, sends {send}"
        made = partial(drawn, devices, microbatches, halves, send, uneven)
        for share in SHARES:
            yield Case("uneven" if uneven else "uniform", name, made, share)


def real_cases() -> Iterator[Case]:
    """Yields rows of profiles, and of the package's models."""
    paths = sorted(
        p
        for p in profiles_folder().glob("*")
        if p.suffix in (".txt", ".json") and not p.stem.endswith("_expert")
    )
    for path, devices, share in product(paths, DEVICES, SHARES[:2]):
        name = path.name.removesuffix(".graph.txt").removesuffix(".json")
        yield Case("profiles", f"{name}, S {devices}", partial(profiled, path, devices), share)
    for (model, size, examples), devices, share in product(MODELS, DEVICES, SHARES[::2]):
        yield Case(
            "models",
            f"{model} {size}, S {devices}",
            partial(estimated, model, size, examples, devices),
            share,
        )


def profiled(path: Path, devices: int) -> Problem:
    """A profile on devices of a machine of A100s, two micro-batches each."""
    return _on_a100(Problem(read_graph(path).costs, devices, ONE_F_ONE_B, 2 * devices))


def estimated(model: str, size: str, examples: int, devices: int) -> Problem:
    """A model of the package on the same devices; its backwards may be split."""
    microbatches = 2 * devices
    asked = replace(
        question(model, size, microbatches * examples, microbatches, devices), schedule=AUTO
    )
    return _on_a100(
        Problem(costs_on(asked, find_cluster("a100-40gb")), devices, ONE_F_ONE_B, microbatches)
    )


def _on_a100(problem: Problem) -> Problem:
    cluster = replace(find_cluster("a100-40gb"), machines=16, host_memory_bytes=None)
    return on_cluster(problem, cluster)
