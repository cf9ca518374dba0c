"""The space of an architecture search: chains of slots, each of which is empty or has one block.

The name of a block, and of its parameters, consists of its slot and its branches. So if a search
changes, adds or removes one block, all other blocks keep their names and compute the same function.
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
    """The operations of two branches. The block adds their results."""

    left: str
    right: str


@dataclass(frozen=True)
class Architecture:
    """A block for each slot. None leaves a slot empty.

    >>> Architecture((Block("glu", "none"), None, Block("ffn1_relu", "glu"))).names()
    ['block_00_glu_none', 'block_02_ffn1_relu_glu']
    """

    slots: tuple[Block | None, ...]

    def blocks(self) -> Iterator[tuple[int, str, Block]]:
        """Yields the slot, the name and the block of each filled slot, in order."""
        for slot, block in enumerate(self.slots):
            if block is not None:
                name = f"block_{slot:02}_{block.left}_{block.right}"
                yield slot, name, block

    def names(self) -> list[str]:
        """Returns the names of the blocks. A block and its parameters have the same name."""
        return [name for _, name, _ in self.blocks()]

    def with_slot(self, slot: int, block: Block | None) -> "Architecture":
        """Returns a copy with another block in one slot."""
        slots = list(self.slots)
        slots[slot] = block
        return Architecture(tuple(slots))


@dataclass(frozen=True)
class SearchSpace:
    """All architectures with a given number of slots, of which at least `fewest` are filled.

    Attributes:
        left: the operations to choose from in the left branch of a block.
        right: the operations to choose from in the right branch.
        slots: the number of slots.
        fewest: the least number of filled slots.
    """

    left: tuple[str, ...]
    right: tuple[str, ...]
    slots: int
    fewest: int

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.slots:
            raise ValueError(f"fewest={self.fewest} must lie in 1 to slots={self.slots}")
        if len(self.left) * len(self.right) < 2:
            raise ValueError(
                f"there is nothing to choose among {self.left} and {self.right}: give at least two "
                "operations for a branch"
            )

    def block(self, rng: np.random.Generator) -> Block:
        """Draws a block."""
        return Block(_one_of(self.left, rng), _one_of(self.right, rng))

    def random(self, rng: np.random.Generator) -> Architecture:
        """Draws an architecture: how many slots are filled, which slots, and with which blocks."""
        count = int(rng.integers(self.fewest, self.slots + 1))
        filled = set(rng.permutation(self.slots)[:count].tolist())
        slots = [self.block(rng) if slot in filled else None for slot in range(self.slots)]
        return Architecture(tuple(slots))

    def mutate(self, architecture: Architecture, rng: np.random.Generator) -> Architecture:
        """Changes one slot at random: fills it, empties it, or changes one branch of its block.

        The result always differs from `architecture`.

        Raises:
            ValueError: the architecture does not have `slots` slots.
        """
        count = len(architecture.slots)
        if count != self.slots:
            raise ValueError(
                f"an architecture of {count} slots does not belong to a space of {self.slots}: "
                f"give one of {self.slots} slots"
            )
        slot = int(rng.integers(self.slots))
        block = architecture.slots[slot]
        if block is None:
            return architecture.with_slot(slot, self.block(rng))
        # The present operations are left out, so every choice is a different architecture.
        lefts = [left for left in self.left if left != block.left]
        rights = [right for right in self.right if right != block.right]
        changes: list[Block | None] = [Block(left, block.right) for left in lefts]
        changes += [Block(block.left, right) for right in rights]
        if len(architecture.names()) > self.fewest and rng.random() < 0.25:
            changes = [None]
        chosen = int(rng.integers(len(changes)))
        return architecture.with_slot(slot, changes[chosen])

    def covering(self) -> tuple[Architecture, ...]:
        """Returns a few architectures that together contain each pair of operations at least once.

        Once their programs are compiled, no later architecture waits for a compilation.
        """
        pairs = [Block(left, right) for left in self.left for right in self.right]
        # A block's program depends on its branches, not on its slot, so each pair is needed once.
        starts = range(0, len(pairs), self.slots)
        groups = [pairs[start : start + self.slots] for start in starts]
        last = groups[-1]
        last += pairs[: self.slots - len(last)]
        # If there are fewer pairs than slots, the last group is still too short. Copies of its
        # first pair fill it up.
        last += last[:1] * (self.slots - len(last))
        return tuple(Architecture(tuple(group)) for group in groups)


@dataclass(frozen=True)
class Supernet:
    """A model whose architecture is searched for.

    Attributes:
        space: the architectures.
        default: the architecture to train without a search.
        loss_of: maps an architecture to its loss, `(params, batch, rng) -> loss`.
        params_of: maps an architecture and a key to fresh parameters. A block's parameters depend
            only on the key and the block's name.
    """

    space: SearchSpace
    default: Architecture
    loss_of: Callable[[Architecture], ArchitectureLoss]
    params_of: Callable[[Architecture, jax.Array], Tree]


def _one_of(choices: tuple[str, ...], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]
