"""DAPPLE's table VI: BERT-48 on two V100s, each alone in its machine, in micro-batches of 2.

Tokens are SQuAD's 384, the framework is TensorFlow 1 without XLA, the optimizer is Adam: as BERT's
authors wrote it, operation by operation.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
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


_ORDERS: Mapping[str, Order] = {"GPipe": "gpipe", "DAPPLE": "1f1b"}
_COUNTS = {"GPipe": (2,), "GPipe + RC": (2, 5), "DAPPLE": (2, 8, 16), "DAPPLE + RC": (2, 8, 16)}
SETTINGS: Mapping[str, Setting] = {
    f"{system}, M={m}": Setting(_ORDERS[system.split()[0]], m, system.endswith("RC"))
    for system, counts in _COUNTS.items()
    for m in counts
}


def layers() -> list[Layer]:
    """The layers of BERT-48, as BERT's authors have them."""
    return layers_of("bert", "48 published=1 tokens=384", MICRO_BATCH, DEVICE)


def predicted(layers: Sequence[Layer], setting: Setting) -> float:
    """Predicts the examples per second of a setting."""
    before_s = list(accumulate(layer.seconds for layer in layers))
    cut = bisect_right(before_s, before_s[-1] / 2)
    halves = layers[:cut], layers[cut:]
    send_s = CLUSTER.network.seconds(layers[cut - 1].handed_bytes)
    stages = [_stage(half, setting.again, send_s) for half in halves]
    parameters = max(sum(layer.parameters for layer in half) for half in halves)
    work_s = step_s(setting.order, stages, setting.microbatches)
    step = work_s + update_s(optax.adamw(1e-3), parameters, DEVICE)
    return MICRO_BATCH * setting.microbatches / step


def _stage(layers: Sequence[Layer], again: bool, send_s: float) -> Stage:
    forward_s = sum(layer.forward_s for layer in layers)
    backward_s = sum(layer.backward_s for layer in layers)
    return Stage(forward_s, forward_s if again else 0.0, backward_s, send_s)
