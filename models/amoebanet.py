"""AmoebaNet-D (arXiv:1802.01548), scaled as GPipe does (arXiv:1811.06965), in plain JAX.

Axes: B batch, Y and X of an image, C channels.

Cells form a chain, but each cell also reads the cell before its predecessor. Normal cells keep the
size of the image. Reduction cells, after the stem and between groups of normal cells, halve the
image and double the channels. An operation of a cell is a pooling or a chain of convolutions. Each
convolution follows a ReLU and precedes a batch norm. The cells are those of the TensorFlow
implementation, whose normal cell concatenates other intermediate results than the paper's cell.
With the paper's cell, the parameter counts would differ from GPipe's.

    stem ──┬── cell 0 ──┬── cell 1 ──┬── cell 2 ── ...     a cell reads two images, `near` and
           └────────────┼────────────┘                     `far`, so a cut between cells sends two:
                        └──────────────── cell 3's far     those of the two cells before the cut

The loss takes and returns the running averages of batch norm (`has_state=True`). If the loss gets
no key, it uses the averages instead of the batch's statistics and does not change them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jvpipe.ir.weighted import Weighted
from jvpipe.models.vision import (
    ClassConfig,
    Convolution,
    Head,
    Image,
    abstract_images,
    class_loss,
    init_units,
    open_data,
)
from jvpipe.models.workload import Workload, sized

Tree = Any


@dataclass(frozen=True, kw_only=True)
class AmoebaNetConfig(ClassConfig):
    """The shape of an AmoebaNet-D. `cells` and `filters` are L and D in GPipe's paper.

    Attributes:
        cells: the number of normal cells in all groups together.
        filters: the channels of the cells of the first group.
        stem_reductions: how many reduction cells follow the stem; 2 for large images. The stem and
            two reductions divide the side by 8.
        groups: the number of groups of normal cells.
    """

    cells: int
    filters: int
    stem_reductions: int = 2
    groups: int = 3

    def __post_init__(self) -> None:
        is_empty = min(self.cells, self.groups) < 1
        if is_empty or self.cells % self.groups:
            raise ValueError(f"cells={self.cells} must be a multiple of groups={self.groups}")
        if self.filters < 8 or self.filters % 8:
            raise ValueError(
                f"filters={self.filters} must be a multiple of 8: operations work on quarters and "
                "halves"
            )
        if self.stem_reductions not in (0, 1, 2):
            raise ValueError(
                f"stem_reductions={self.stem_reductions} must be 0 for small images, else 1 or 2"
            )
        super().__post_init__()


SIZES = {
    "tiny": AmoebaNetConfig(cells=2, filters=8, side=8, classes=4, stem_reductions=0, groups=2),
    "mini": AmoebaNetConfig(cells=3, filters=32, side=16, classes=10, stem_reductions=0),
    "28m": AmoebaNetConfig(cells=18, filters=120),
    "82m": AmoebaNetConfig(cells=18, filters=208),
    "122m": AmoebaNetConfig(cells=18, filters=256),
    "319m": AmoebaNetConfig(cells=18, filters=416),
    "543m": AmoebaNetConfig(cells=18, filters=544),
    "1.1b": AmoebaNetConfig(cells=36, filters=544),
    "1.8b": AmoebaNetConfig(cells=72, filters=512),
}


def mean_pool(x: Image, stride: int) -> Image:
    """Returns means of 3 x 3 pixels, computed in float32. Pixels beyond the edge do not count."""
    wide, strides = x.astype(jnp.float32), (stride, stride)
    wide = nnx.avg_pool(wide, (3, 3), strides, "SAME", count_include_pad=False)
    return wide.astype(x.dtype)


def largest_pool(side: int, x: Image, stride: int) -> Image:
    """Returns maxima of `side` x `side` pixels. Pixels beyond the edge do not count."""
    return nnx.max_pool(x, (side, side), (stride, stride), "SAME")


def unpooled(x: Image, stride: int) -> Image:
    """Returns the image unchanged. No genotype uses `none` where the image has to be halved."""
    return x


Pooling = Callable[[Image, int], Image]
POOLINGS: Mapping[str, Pooling] = {
    "none": unpooled,
    "max_pool_2x2": partial(largest_pool, 2),
    "max_pool_3x3": partial(largest_pool, 3),
    "avg_pool_3x3": mean_pool,
}
CONVOLUTIONS = {"conv_1x1": [(1, 1)], "conv_3x3": [(3, 3)], "conv_1x7_7x1": [(1, 7), (7, 1)]}
"""The kernels (Y, X) of operations. Kernels larger than 1 x 1 work on a quarter of the channels."""


def convolutions(operation: str, channels: int, stride: int) -> tuple[Convolution, ...]:
    """Returns the chain of convolutions of an operation, which is empty for a pooling.

    >>> [c.kernel for c in convolutions("conv_1x7_7x1", 8, 1)]
    [(1, 1), (1, 7), (7, 1), (1, 1)]
    """
    if operation in POOLINGS:
        return ()
    if operation == "conv_1x1":
        return (Convolution(channels, channels, strides=(stride, stride)),)
    quarter, inner = channels // 4, []
    for y, x in CONVOLUTIONS[operation]:
        # A kernel strides only along its long axes: 1 x 7 along X, and 7 x 1 along Y.
        strides = (stride if y > 1 else 1, stride if x > 1 else 1)
        inner.append(Convolution(quarter, quarter, (y, x), strides))
    return (Convolution(channels, quarter), *inner, Convolution(quarter, channels))


Choice = tuple[str, int]
"""An operation, and the number of the value that it reads."""


@dataclass(frozen=True)
class Genotype:
    """What a cell computes.

    Value 0 is the image of the cell's predecessor, and value 1 is the image of the cell before the
    predecessor. Each pair of choices makes one more value, the sum of their two results. The cell
    returns the values in `outputs`, concatenated.
    """

    pairs: tuple[tuple[Choice, Choice], ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """An operation of a cell, with the name of its parameters, e.g. `2_right_conv_1x1`."""

    name: str
    operation: str
    value: int


# Pair i makes value i + 2; values 0 and 1 are the cell's inputs.
NORMAL = Genotype(
    pairs=(
        (("conv_1x1", 1), ("max_pool_3x3", 1)),
        (("none", 1), ("conv_1x7_7x1", 0)),
        (("conv_1x1", 0), ("conv_1x7_7x1", 0)),
        (("max_pool_3x3", 2), ("none", 2)),
        (("avg_pool_3x3", 1), ("conv_1x1", 5)),
    ),
    outputs=(0, 3, 4, 6),
)
REDUCTION = Genotype(
    pairs=(
        (("max_pool_2x2", 0), ("max_pool_3x3", 0)),
        (("none", 2), ("conv_3x3", 1)),
        (("conv_1x7_7x1", 2), ("max_pool_3x3", 2)),
        (("none", 3), ("max_pool_2x2", 1)),
        (("avg_pool_3x3", 2), ("conv_1x1", 3)),
    ),
    outputs=(4, 5, 6),
)


@dataclass(frozen=True)
class Cell:
    """A genotype at a place in the chain of cells.

    Attributes:
        genotype: what the cell computes.
        channels: the channels of each value in the cell.
        near: the channels of the predecessor's image.
        far: the channels of the image of the cell before the predecessor.
        halve: whether the cell halves the image.
        far_is_large: whether the predecessor halved the image, so that the far image has twice the
            side of the near one.
    """

    genotype: Genotype
    channels: int
    near: int
    far: int
    halve: bool = False
    far_is_large: bool = False

    @property
    def outputs(self) -> int:
        """The number of channels of the result."""
        return self.channels * len(self.genotype.outputs)

    @property
    def chains(self) -> dict[str, tuple[Convolution, ...]]:
        """The chains of convolutions by name, e.g. `2_right_conv_1x1`; empty for a pooling."""
        far = Convolution(self.far, self.channels)
        if self.far_is_large:
            far = Convolution(self.far, self.channels, strides=(2, 2), shifted=True)
        fits = self.far == self.channels and not self.far_is_large
        chains = {"near": (Convolution(self.near, self.channels),), "far": () if fits else (far,)}
        for step in (step for pair in self._steps() for step in pair):
            stride = self._stride(step.value)
            chains[step.name] = convolutions(step.operation, self.channels, stride)
        return chains

    def init(self, key: jax.Array) -> Tree:
        """Makes fresh parameters."""
        return init_units(dict(self._units()), key)

    def averages(self) -> Tree:
        """Makes the initial running averages."""
        return {name: unit.averages() for name, unit in self._units()}

    def __call__(
        self, p: Tree, averages: Tree, near: Image, far: Image, training: bool
    ) -> tuple[Image, Tree]:
        """Returns the cell's image and the new averages."""
        new: dict[str, Tree] = {}

        def through(chain: str, x: Image) -> Image:
            for i, unit in enumerate(self.chains[chain]):
                name = f"{chain}_{i}"
                x, new[name] = unit(p[name], averages[name], x, training)
            return x

        values = [through("near", near), through("far", far)]

        def result(step: Step) -> Image:
            x = through(step.name, values[step.value])
            # The chain of a pooling is empty, so `through` returns its input. The other operations
            # have no pooling, so `unpooled` returns their result.
            pool = POOLINGS.get(step.operation, unpooled)
            return pool(x, self._stride(step.value))

        for left, right in self._steps():
            values.append(result(left) + result(right))
        return jnp.concatenate([values[i] for i in self.genotype.outputs], axis=3), new

    def _steps(self) -> Iterator[tuple[Step, Step]]:
        for i, ((left, read), (right, also_read)) in enumerate(self.genotype.pairs):
            yield (
                Step(f"{i}_left_{left}", left, read),
                Step(f"{i}_right_{right}", right, also_read),
            )

    def _units(self) -> Iterator[tuple[str, Convolution]]:
        for chain, units in self.chains.items():
            yield from ((f"{chain}_{i}", unit) for i, unit in enumerate(units))

    def _stride(self, value: int) -> int:
        # The cell's inputs (values 0 and 1) are not halved yet, and all other values are.
        return 2 if self.halve and value < 2 else 1


@dataclass(frozen=True)
class AmoebaNet:
    """The model: a stem, cells, and a linear map of each channel's mean."""

    config: AmoebaNetConfig

    @property
    def stem(self) -> Convolution:
        """The convolution from colors to channels."""
        config = self.config
        stride = 2 if config.stem_reductions else 1
        # Each reduction doubles the channels, so the first group has `filters` channels.
        channels = config.filters >> config.stem_reductions
        return Convolution(3, channels, (3, 3), (stride, stride))

    @property
    def cells(self) -> dict[str, Cell]:
        """The cells by name, in order."""
        config = self.config
        group = [True] + [False] * (config.cells // config.groups)
        # The reductions after the stem halve the image, and so does one cell between two groups.
        halvings = [True] * config.stem_reductions + (group * config.groups)[1:]
        channels = near = far = self.stem.outputs
        cells: dict[str, Cell] = {}
        far_is_large = False
        for i, halve in enumerate(halvings):
            channels *= 2 if halve else 1
            genotype = REDUCTION if halve else NORMAL
            cell = Cell(genotype, channels, near, far, halve, far_is_large)
            cells[f"{i:03}"] = cell
            near, far, far_is_large = cell.outputs, near, halve
        return cells

    @property
    def head(self) -> Head:
        """The map from the last cell's channels to classes."""
        return Head(list(self.cells.values())[-1].outputs, self.config.classes)

    def init(self, key: jax.Array) -> Tree:
        """Makes fresh parameters: nested dicts of arrays, e.g. `cells/003/near_0/kernel`."""
        cells = self.cells
        keys = [jax.random.fold_in(key, i) for i in range(2 + len(cells))]
        key_of = dict(zip(cells, keys[2:], strict=True))
        stem = self.stem.init(keys[0])
        of_cells = {name: cell.init(key_of[name]) for name, cell in cells.items()}
        return {"stem": stem, "cells": of_cells, "head": self.head.init(keys[1])}

    def averages(self) -> Tree:
        """Makes the initial model state: the running averages."""
        return {
            "stem": self.stem.averages(),
            "cells": {name: cell.averages() for name, cell in self.cells.items()},
        }

    def loss_fn(
        self, params: Tree, averages: Tree, batch: Tree, rng: jax.Array | None
    ) -> tuple[Weighted, Tree, Tree]:
        """Computes the loss of classes, the new averages and the top-1 accuracy.

        Without a key, the loss uses the averages and returns them unchanged.
        """
        batch, training = jax.tree.map(jnp.asarray, batch), rng is not None
        x = batch["images"].astype(self.config.dtype)
        x, stem = self.stem(params["stem"], averages["stem"], x, training)
        before, new = x, {}  # the first cell reads the stem twice
        for name, cell in self.cells.items():
            p, old = params["cells"][name], averages["cells"][name]
            y, new[name] = cell(p, old, x, before, training)
            before, x = x, y
        loss, aux = class_loss(self.head(params["head"], x), batch)
        return loss, {"stem": stem, "cells": new}, aux


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes an AmoebaNet-D of one of `SIZES`; `mini` by default.

    `options` replace fields of `AmoebaNetConfig`.
    """
    return sized(
        "amoebanet",
        SIZES,
        size,
        options,
        init=lambda config: AmoebaNet(config).init,
        loss_function=lambda config: AmoebaNet(config).loss_fn,
        model_state=lambda config: AmoebaNet(config).averages,
        has_aux=True,
        abstract_batch=abstract_images,
        open_data=open_data,
        learning_rate=1e-3,
        batch_size=128,
    )
