"""Which part of layers is computed alike under all fates, by the compiler of hardware that is not
here.

    python -m experiments.compiled_bits.table bert:tiny,resnet:tiny h100,v5e float32,bfloat16 [FOLDER]

wants `jvpipe[aot-cuda]` or `jvpipe[aot-tpu]`. Each cell is a line as soon as it is there. What was
compiled lies in FOLDER (compiled_bits): a second run takes seconds.
"""

import os
import sys
import time
from itertools import product
from pathlib import Path
from unittest.mock import patch

import jax

from experiments.compiled_bits.layers import Asked, Layer, layers, share_alike, traced
from jvpipe import _jax
from jvpipe.cost.targets import find_target


def row(model: str, target: str, dtype: str, folder: Path) -> str:
    """A line of the table."""
    name, _, size = model.partition(":")
    start_s = time.perf_counter()
    asked = Asked(find_target(target), folder)
    found = list(layers(traced(name, size, dtype), asked))
    with patch.object(
        _jax, "with_layout_constraint", lambda x, _: x
    ):  # as it would be if nothing were done
        free = list(layers(traced(name, size, dtype), Asked(find_target(target), folder)))
    shown = [name, size, target, dtype, len(found)]
    shown += [f"{share_alike(x, lambda layer: layer.unlike):.0%}" for x in (free, found)]
    shown += [f"{share_alike(x, lambda layer: layer.other):.0%}" for x in (free, found)]
    shown += [f"{sum(x.kernels for x in found) / sum(x.kernels for x in free):.3f}"]
    shown += [f"{sum(x.bytes for x in found) / sum(x.bytes for x in free):.3f}"]
    shown += ["; ".join(unlike(found)), f"{time.perf_counter() - start_s:.0f}"]
    return f"| {' | '.join(map(str, shown))} |"


def unlike(found: list[Layer]) -> list[str]:
    """Names the layers whose sums differ, and where."""
    return [
        f"{number} {layer.name}: {', '.join(layer.unlike)}"
        for number, layer in enumerate(found)
        if layer.unlike
    ]


def main(models: str, targets: str, dtypes: str, folder: str = "compiled_bits") -> None:
    """Prints the table, cell by cell."""
    jax.config.update("jax_platforms", "cpu")
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    print(
        "| model | size | target | type | layers | sums alike, free | laid out | others alike, "
        "free | laid out | kernels | bytes | unlike | s |\n|" + "---|" * 13
    )
    for model, target, dtype in product(models.split(","), targets.split(","), dtypes.split(",")):
        print(row(model, target, dtype, Path(folder)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
