"""torchgpipe's benchmarks on eight P40s, as its repository sets them: kakaobrain/torchgpipe,
benchmarks (BSD-3-Clause).

Batches, micro-batches, and the balance of each experiment in its own layers: of AmoebaNet-D the
stem, 2 + 18 + 2 cells and the classifier; of U-Net each convolution, dropout, norm and activation,
and what goes down, up, and across. With several micro-batches the last one is not computed again.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import optax

from experiments.predicts.layers import Layer, layers_of, run_by, update_s
from experiments.predicts.pipeline import Stage, step_s
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.families import PYTORCH

CLUSTER = find_cluster("p40")
DEVICE, SGD = run_by(PYTORCH, CLUSTER.device), optax.sgd(0.1)
Share = tuple[int, float]
"""One of their layers, and how much of one of ours it stands for."""


@dataclass(frozen=True)
class Setting:
    """A benchmark: examples of a step, its micro-batches, and how many of their layers each device
    has.
    """

    batch: int
    microbatches: int
    balance: tuple[int, ...]
    again: bool = True


AMOEBANET: Mapping[str, Setting] = {
    "n=2, m=1": Setting(96, 1, (7, 17)),
    "n=2, m=4": Setting(256, 4, (9, 15)),
    "n=2, m=32": Setting(1280, 32, (9, 15)),
    "n=4, m=1": Setting(160, 1, (3, 4, 5, 12)),
    "n=4, m=4": Setting(360, 4, (3, 6, 7, 8)),
    "n=4, m=32": Setting(1152, 32, (3, 6, 7, 8)),
    "n=8, m=1": Setting(196, 1, (2, 2, 2, 2, 2, 3, 4, 7)),
    "n=8, m=4": Setting(480, 4, (2, 2, 2, 3, 3, 4, 4, 4)),
    "n=8, m=32": Setting(1280, 32, (2, 2, 2, 3, 3, 4, 4, 4)),
}
UNET: Mapping[str, Setting] = {
    "Naive-1": Setting(40, 1, (241,), again=False),
    "Pipeline-1": Setting(80, 2, (241,)),
    "Pipeline-2": Setting(512, 32, (104, 137)),
    "Pipeline-4": Setting(512, 16, (30, 66, 84, 61)),
    "Pipeline-8": Setting(640, 40, (16, 27, 31, 44, 22, 57, 27, 17)),
}
CELLS, LEVELS, BLOCK, LEVEL = 22, 5, 4, 22
"""Cells of AmoebaNet-D; levels of U-Net, layers of a convolution's block, of a level: five blocks,
and two more.
"""


def amoebanet_shares(name: str) -> list[Share]:
    """The cell that one of our layers is part of.

    >>> amoebanet_shares("stem"), amoebanet_shares("cells/003/near_0"), amoebanet_shares("head")
    ([(0, 1.0)], [(4, 1.0)], [(23, 1.0)])
    """
    if name.startswith("cells/"):
        return [(1 + int(name.split("/")[1]), 1.0)]
    return [(1 + CELLS if name.startswith("head") else 0, 1.0)]


def unet_shares(name: str) -> list[Share]:
    """The blocks of a convolution that one of our layers stands for; our lowest level is a single
    layer.

    >>> unet_shares("down_1/002"), unet_shares("up_4/000"), unet_shares("segment")
    ([(30, 1.0)], [(132, 1.0)], [(240, 1.0)])
    """
    part, _, number = name.partition("/")
    below = LEVELS * LEVEL
    if part == "bottom":
        return [(below + BLOCK * i, share / 8) for i, share in enumerate((1, 2, 2, 2, 1))]
    direction, _, level = part.partition("_")
    if direction == "down":
        return [(LEVEL * int(level) + BLOCK * int(number), 1.0)]
    above = below + LEVELS * BLOCK
    if direction == "up":
        return [(above + LEVEL * (LEVELS - 1 - int(level)) + 2 + BLOCK * int(number), 1.0)]
    return [(above + LEVEL * LEVELS, 1.0)]


def stages(
    layers: Sequence[Layer], setting: Setting, shares: Callable[[str], list[Share]]
) -> Iterator[Stage]:
    """Yields the stages of a setting.

    Args:
        layers: ours.
        setting: says how many of theirs are in each.
        shares: maps ours to theirs.
    """
    ends = list(accumulate(setting.balance))
    forward_s, backward_s = [0.0] * len(ends), [0.0] * len(ends)
    handed: dict[int, int] = {}
    for layer in layers:
        for theirs, share in shares(layer.name):
            stage = bisect_right(ends, theirs)
            forward_s[stage] += share * layer.forward_s
            backward_s[stage] += share * layer.backward_s
            handed[theirs] = layer.handed_bytes  # of the last of ours, which is what leaves theirs
    for stage, end in enumerate(ends):
        last = max((i for i in handed if i < end), default=0)
        read = (last, last - 1) if setting in AMOEBANET.values() else (last,)
        size = sum(handed.get(i, 0) for i in read)
        again_s = forward_s[stage] if setting.again else 0.0
        yield Stage(forward_s[stage], again_s, backward_s[stage], CLUSTER.peer.seconds(size))


def predicted(model: str, setting: Setting) -> float:
    """Predicts the examples per second of a setting of "amoebanet" or "unet"."""
    size, shares = {"amoebanet": ("122m", amoebanet_shares), "unet": ("233m", unet_shares)}[model]
    layers = layers_of(model, size, setting.batch // setting.microbatches, DEVICE)
    each = list(stages(layers, setting, shares))
    several = setting.microbatches > 1
    step = step_s("gpipe", each, setting.microbatches, all_again=not several)
    return setting.batch / (step + update_s(SGD, _most_parameters(layers, setting, shares), DEVICE))


def _most_parameters(
    layers: Sequence[Layer], setting: Setting, shares: Callable[[str], list[Share]]
) -> int:
    """Counts the parameters of the stage that has most: all update at once."""
    ends = list(accumulate(setting.balance))
    counts = [0.0] * len(ends)
    for layer in layers:
        for theirs, share in shares(layer.name):
            counts[bisect_right(ends, theirs)] += share * layer.parameters
    return round(max(counts))
