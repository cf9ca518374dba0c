"""The outline of a model: the facts about its layers that exporting a plan needs."""

import re
from dataclasses import dataclass

from jvpipe.ir.layers import LayerGraph

Block = tuple[str, int]
"""A module that a model repeats, such as `h_2`: its path without the number, and the number."""


@dataclass(frozen=True, slots=True)
class LayerOutline:
    """The outline of a layer.

    `block` is the numbered module that the layer's parameters belong to, if there is one. `values`
    names the values that the layer's forward may leave for its backward, as plans name them.
    `inner` names the output tensors that only layers of the same block read.
    """

    name: str
    block: Block | None
    values: tuple[str, ...]
    inner: tuple[str, ...]
    parameter_bytes: int


@dataclass(frozen=True, slots=True)
class Outline:
    """The outlines of a model's layers, and the number of micro-batches of a step."""

    layers: tuple[LayerOutline, ...]
    microbatches: int


def outline_of(graph: LayerGraph, microbatches: int) -> Outline:
    """Makes the outline of a layer graph, for `microbatches` micro-batches per step."""
    blocks = [_block(graph, layer.id) for layer in graph.layers]
    inner: list[list[str]] = [[] for _ in graph.layers]
    for tensor in graph.tensors:
        around = {blocks[layer] for layer in (tensor.producer, *tensor.readers)}
        if len(around) == 1 and None not in around:
            inner[tensor.producer].append(tensor.array.name)
    layers = []
    for layer in graph.layers:
        label = graph.label(layer)
        owned = [graph.parameters[i].array for i in graph.owned(layer.id)]
        outline = LayerOutline(
            label,
            blocks[layer.id],
            values=tuple(f"{label}/{value.name}" for value in layer.candidates),
            inner=tuple(inner[layer.id]),
            parameter_bytes=sum(array.bytes for array in owned),
        )
        layers.append(outline)
    return Outline(tuple(layers), microbatches)


def block_of(path: str) -> Block | None:
    """Finds the numbered module that a parameter's path names.

    A key of the path that is a number takes precedence over a number inside a key. The name is all
    of the path before the number, so an encoder's blocks and a decoder's have different names. But
    a number that is the last key is the number of a slice of a stacked array. Such a block has the
    name of the first key, which all arrays of the block share.

    >>> block_of("blocks/003/attention/kernel"), block_of("blocks/ln_1/scale/3"), block_of("h_2/kernel")
    (('blocks', 3), ('blocks', 3), ('h', 2))
    >>> block_of("model/encoder/3/kernel"), block_of("model/h_2/kernel")
    (('model/encoder', 3), ('model/h', 2))
    """
    parts = path.split("/")
    whole = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if whole is not None:
        is_slice = whole == len(parts) - 1
        return "/".join(parts[: min(whole, 1) if is_slice else whole]), int(parts[whole])
    for i, part in enumerate(parts):
        if match := re.fullmatch(r"(\D+?)_?(\d+)(\D.*)?", part):
            return "/".join([*parts[:i], match[1]]), int(match[2])
    return None


def _block(graph: LayerGraph, layer: int) -> Block | None:
    """Finds the block of a layer: the first block that a path of its parameters names."""
    paths = (graph.parameters[i].array.name for i in graph.owned(layer))
    return next(filter(None, map(block_of, paths)), None)
