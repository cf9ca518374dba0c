"""DAPPLE's table VI: BERT-48 on two V100s, each alone in its machine, in micro-batches of 2.

Tokens are SQuAD's 384, the framework is TensorFlow 1 without XLA, the optimizer is Adam: as BERT's authors wrote it,
operation by operation.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import optax

from experiments.predicts.layers import Layer, layers_of, run_by, update_s
from experiments.predicts.pipeline import Order, Stage, step_s
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.families import TENSORFLOW

CLUSTER = find_cluster("v100-b")
DEVICE = run_by(TENSORFLOW, CLUSTER.device)
MICRO_BATCH = 2


@dataclass(frozen=True)
class Setting:
    """A row: the order of a step, its micro-batches, and whether forwards run again."""

    order: Order
    microbatches: int
    again: bool


SETTINGS: Mapping[str, Setting] = {
    f"{system}{' + RC' if again else ''}, M={m}": Setting(order, m, again)
    for system, order, again, counts in (
        ("GPipe", "gpipe", False, (2,)),
        ("GPipe", "gpipe", True, (2, 5)),
        ("DAPPLE", "1f1b", False, (2, 8, 16)),
        ("DAPPLE", "1f1b", True, (2, 8, 16)),
    )
    for m in counts
}


def layers() -> list[Layer]:
    """The layers of BERT-48, as BERT's authors have them."""
    return layers_of("bert", "48 published=1 tokens=384", MICRO_BATCH, DEVICE)


def predicted(layers: list[Layer], setting: Setting) -> float:
    """Predicts the examples per second of a setting."""
    before_s = list(accumulate(layer.seconds for layer in layers))
    cut = bisect_right(before_s, before_s[-1] / 2)
    halves = layers[:cut], layers[cut:]
    send_s = CLUSTER.network.seconds(layers[cut - 1].handed_bytes)
    each = [
        Stage(
            forward_s, forward_s if setting.again else 0.0, sum(x.backward_s for x in half), send_s
        )
        for half in halves
        if (forward_s := sum(x.forward_s for x in half))
    ]
    parameters = max(sum(x.parameters for x in half) for half in halves)
    step = step_s(setting.order, each, setting.microbatches)
    return (
        MICRO_BATCH
        * setting.microbatches
        / (step + update_s(optax.adamw(1e-3), parameters, DEVICE))
    )
