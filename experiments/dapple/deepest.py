"""DAPPLE's table VIII, the deepest BERT that fits: python -m experiments.dapple.deepest

Nothing runs. BERT-48 is traced and estimated; deeper ones have copies of its second block.
"""

from collections.abc import Iterator
from dataclasses import replace

from experiments.max_batch.largest import largest
from experiments.planners.questions import question
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.costs import Costs, Edge, Shared
from jvpipe.planners.model.keep_all import least_kept_bytes
from jvpipe.planners.model.problem import Problem

PAPER = {1: 48, 2: 106, 4: 215, 8: 428}
"""The encoder layers of the deepest BERT, by the number of devices."""
MICRO_BATCH, MICRO_BATCHES = 2, 16
FIRST, LAYERS = 3, 2
"""The layers of the second block: embeddings come before the first one, and each block has two."""


def deepened(costs: Costs, more: int) -> Costs:
    """The costs of a BERT with so many blocks more, each like the second one."""
    copies, behind = range(more), FIRST + LAYERS

    def at(layer: int, block: int) -> int:
        """Where a layer of the second block lies in a copy, or one behind it in the whole."""
        return layer + LAYERS * block if layer >= FIRST else layer

    def edge(e: Edge, block: int) -> Edge:
        return replace(
            e, producer=at(e.producer, block), readers=tuple(at(r, block) for r in e.readers)
        )

    def shared(x: Shared, block: int) -> Shared:
        return replace(x, layers=tuple(at(layer, block) for layer in x.layers))

    entering = [e for e in costs.edges if e.producer < FIRST]
    own = [e for e in costs.edges if FIRST <= e.producer < behind]
    tied = [x for x in costs.shared if all(FIRST <= layer < behind for layer in x.layers)]
    return replace(
        costs,
        layers=costs.layers[:FIRST] + costs.layers[FIRST:behind] * more + costs.layers[FIRST:],
        edges=(
            *entering,
            *(edge(e, block) for block in copies for e in own),
            *(edge(e, more) for e in costs.edges if e.producer >= FIRST),
        ),
        shared=(
            *(shared(x, block) for block in copies for x in tied),
            *(shared(x, more) for x in costs.shared),
        ),
        ids=(),
    )


def fits(problem: Problem, costs: Costs, stages: int) -> bool:
    """Whether any cuts fit so many devices if layers keep their input alone and compute all else
    again.
    """
    again = tuple(replace(layer, options=layer.options[-1:]) for layer in costs.layers)
    asked = replace(problem, costs=replace(costs, layers=again), stages=stages)
    return least_kept_bytes(asked) <= (problem.memory_limit_bytes or 0)


def table() -> Iterator[str]:
    """Yields the table: the paper's depths beside ours, and how many times one device's they
    are.
    """
    asked = question("bert", "48", MICRO_BATCH * MICRO_BATCHES, MICRO_BATCHES, stages=2).problem(
        find_cluster("v100-a")
    )
    yield (
        "| devices | paper, layers | of one device's | ours, layers | of one device's | "
        "parameters |"
    )
    yield "|---|---|---|---|---|---|"
    first = 0
    for stages, paper in PAPER.items():

        def works(blocks: int, stages: int = stages) -> bool:
            return blocks <= 48 or fits(asked, deepened(asked.costs, blocks - 48), stages)

        depth = largest(works, near=80 * stages, bits=8)
        first = first or depth
        block = sum(layer.parameter_bytes for layer in asked.costs.layers[FIRST : FIRST + LAYERS])
        held = sum(layer.parameter_bytes for layer in asked.costs.layers) + (depth - 48) * block
        ratios = f"{paper / PAPER[1]:.2f} | {depth} | {depth / first:.2f}"
        yield f"| {stages} | {paper} | {ratios} | {held / 4e9:.2f}B |"


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
