"""Runs to compare to the bit: their batches, and digests of what they yield."""

import hashlib
from typing import Any

import jax
import numpy as np

from tests.zoo import Case

MICRO, STEPS = 4, 3


def digest(tree: Any) -> str:
    """What tells arrays, numbers and texts from others, to the bit."""
    whole = hashlib.blake2b(digest_size=12)
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        whole.update(f"{array.dtype}{array.shape}".encode())
        whole.update(array.tobytes())
    return whole.hexdigest()


def batches_of(m: Case, steps: int = STEPS) -> list[Any]:
    """Batches of so many steps, no two alike."""
    whole = jax.tree.map(lambda x: np.resize(x, (2 * MICRO, *x.shape[1:])), m.batch)
    return [jax.tree.map(lambda x, i=i: np.roll(x, i, axis=0), whole) for i in range(steps)]
