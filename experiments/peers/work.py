"""What every peer does alike: the gradients of one batch again and again. It is checked once and
then timed.

Nothing but numpy is imported here, for each peer has an environment of its own.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.throughput.data import Sizes

TINY = Sizes(width=16, tokens=8, vocabulary=32, blocks=2)


@dataclass(frozen=True)
class Ready:
    """A peer that has taken a step.

    Attributes:
        step: takes another one and waits for it.
        loss: the mean over the micro-batches.
        gradients: of that mean, by parameter.
    """

    step: Callable[[], Any]
    loss: float
    gradients: Mapping[str, np.ndarray]


def options(description: str | None, ways: tuple[str, ...]) -> argparse.Namespace:
    """What is asked of a peer on its command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("way", choices=ways)
    parser.add_argument("reference", help="file of the loss and gradients that one device computes")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument(
        "--cut", type=int, help="half-blocks on the first of two stages; half of them"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    found = parser.parse_args()
    found.sizes = TINY if found.tiny else Sizes()
    found.cut = found.cut or found.sizes.blocks
    return found


def named(tree: Any, name: str = "") -> dict[str, Any]:
    """The leaves of dicts and lists by their paths.

    >>> named({"out": 1, "blocks": [{"wo": 2}]})
    {'out': 1, 'blocks.0.wo': 2}
    """
    if not isinstance(tree, dict | list):
        return {name: tree}
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
    paths = ((f"{name}.{key}" if name else str(key), each) for key, each in inner)
    return {path: leaf for start, each in paths for path, leaf in named(each, start).items()}


def save(path: str, ready: Ready) -> None:
    """Keeps what others are compared with."""
    np.savez(path, allow_pickle=False, loss=np.float64(ready.loss), **ready.gradients)


def worst_error(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The largest difference of any array of those found, each over its own largest number."""
    errors = [0.0]
    for name, value in found.items():
        assert value.shape == expected[name].shape, (name, value.shape, expected[name].shape)
        assert np.isfinite(value).all(), name
        errors.append(float(np.abs(value - expected[name]).max() / np.abs(expected[name]).max()))
    return max(errors)


def told(ready: Ready, options: argparse.Namespace) -> dict[str, Any]:
    """Checks a peer, times it, and says so."""
    with np.load(options.reference) as kept:
        expected = dict(kept)
    loss = float(expected.pop("loss"))
    found = {
        "arrays": len(ready.gradients),
        "wanted": len(expected),
        "error": max(worst_error(ready.gradients, expected), abs(ready.loss - loss) / abs(loss)),
    }
    taken = []
    for _ in range(options.warm + options.steps):
        start_s = time.perf_counter()
        ready.step()
        taken.append(time.perf_counter() - start_s)
    return found | {"step_s": statistics.median(taken[options.warm :])}
