"""What an architecture search can choose: a chain of slots, each empty or with a block of two branches.

A block is called by its slot and its branches, and so are its parameters: altering, adding or removing one leaves the
names of all others, and what they compute, as they were.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Tree = Any
ArchitectureLoss = Callable[[Tree, Tree, jax.Array | None], Any]


@dataclass(frozen=True)
class Block:
    """The operations of two branches; their results are added."""

    left: str
    right: str


@dataclass(frozen=True)
class Architecture:
    """A choice for each slot; None leaves it empty.

    >>> Architecture((Block("glu", "none"), None, Block("ffn1_relu", "glu"))).names()
    ['block_00_glu_none', 'block_02_ffn1_relu_glu']
    """

    slots: tuple[Block | None, ...]

    def blocks(self) -> Iterator[tuple[int, str, Block]]:
        """Slot, name and block of the filled slots, in order."""
        for slot, block in enumerate(self.slots):
            if block is not None:
                name = f"block_{slot:02}_{block.left}_{block.right}"
                yield slot, name, block

    def names(self) -> list[str]:
        """What the blocks, and their parameters, are called."""
        return [name for _, name, _ in self.blocks()]

    def with_slot(self, slot: int, block: Block | None) -> "Architecture":
        """The same, except for one slot."""
        slots = list(self.slots)
        slots[slot] = block
        return Architecture(tuple(slots))


@dataclass(frozen=True)
class SearchSpace:
    """All architectures of `slots` slots, at least `fewest` of them filled, with these operations in the branches."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    slots: int
    fewest: int

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.slots:
            raise ValueError(f"fewest={self.fewest} must lie in 1 to slots={self.slots}")
        if len(self.left) * len(self.right) < 2:
            raise ValueError(f"there is nothing to choose among {self.left} and {self.right}")

    def block(self, rng: np.random.Generator) -> Block:
        """Any block."""
        return Block(_one_of(self.left, rng), _one_of(self.right, rng))

    def random(self, rng: np.random.Generator) -> Architecture:
        """Any architecture: how many slots are filled, which ones, with what."""
        count = int(rng.integers(self.fewest, self.slots + 1))
        filled = set(rng.permutation(self.slots)[:count].tolist())
        slots = [self.block(rng) if slot in filled else None for slot in range(self.slots)]
        return Architecture(tuple(slots))

    def mutate(self, architecture: Architecture, rng: np.random.Generator) -> Architecture:
        """Another architecture, which differs in one slot: a branch has another operation, or it is filled or emptied.

        Raises:
            ValueError: the architecture has another number of slots.

        """
        count = len(architecture.slots)
        if count != self.slots:
            raise ValueError(
                f"an architecture of {count} slots is none of a space of {self.slots}: "
                f"give one of {self.slots}"
            )
        slot = int(rng.integers(self.slots))
        block = architecture.slots[slot]
        if block is None:
            return architecture.with_slot(slot, self.block(rng))
        # The present operations are left out, so a mutation is always another architecture.
        lefts = [left for left in self.left if left != block.left]
        rights = [right for right in self.right if right != block.right]
        changes: list[Block | None] = [Block(left, block.right) for left in lefts]
        changes += [Block(block.left, right) for right in rights]
        if len(architecture.names()) > self.fewest and rng.random() < 0.25:
            changes = [None]
        chosen = int(rng.integers(len(changes)))
        return architecture.with_slot(slot, changes[chosen])

    def covering(self) -> tuple[Architecture, ...]:
        """A few architectures that hold each pair of branches once or more, so that programs can be made ahead."""
        pairs = [Block(left, right) for left in self.left for right in self.right]
        # A block's program depends on its branches alone and not on its slot: once each is enough.
        groups = [pairs[i : i + self.slots] for i in range(0, len(pairs), self.slots)]
        groups[-1] += pairs[: self.slots - len(groups[-1])]
        # With fewer pairs than slots the last group is still short: its first pair fills it up.
        groups[-1] += groups[-1][:1] * (self.slots - len(groups[-1]))
        return tuple(Architecture(tuple(group)) for group in groups)


@dataclass(frozen=True)
class Supernet:
    """A model whose architecture is searched for.

    `loss_of` gives the loss of an architecture, `(params, batch, rng) -> loss`; `params_of` its fresh parameters, those
    of a block following from the key and the block's name alone. `default` is what is trained without a search.
    """

    space: SearchSpace
    default: Architecture
    loss_of: Callable[[Architecture], ArchitectureLoss]
    params_of: Callable[[Architecture, jax.Array], Tree]


def _one_of(choices: tuple[str, ...], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]
