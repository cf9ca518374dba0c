"""vPipe's BERT-large on eight RTX 2080 Ti: hku-systems/vpipe, runtime/bert and runtime/configs.

PipeDream runs micro-batches of 4 records of 128 tokens, vPipe of 16; each updates after every
micro-batch. Its slowest stage is what a stream takes. The optimizer is a fused LAMB, around which
weights are stashed: copied to and fro by `load_old_params`, `load_new_params` and `get_params`, and
gradients are set to zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import optax

from experiments.predicts.layers import Layer, layers_of, run_by, update_s
from jvpipe.cost.families import PYTORCH
from jvpipe.cost.presets import RTX_2080TI

DEVICE = run_by(PYTORCH, RTX_2080TI)
STASHED_BYTES = 3 * 8 + 4
"""Of a parameter, read and written per micro-batch: three copies, and its gradient set to zero."""


@dataclass(frozen=True)
class Setting:
    """How many of BERT's 97 parts each device has, and the share of them whose forward runs
    again.
    """

    partition: tuple[int, ...]
    again: tuple[float, ...] = (0.0,) * 8


PIPEDREAM = Setting((11, 12, 13, 13, 13, 13, 12, 10))
VPIPE = Setting((11, 11, 12, 12, 13, 13, 14, 11), (1, 0.85, 0.8, 0.6, 0.5, 0.2, 0, 0))


def per_s(examples: int, setting: Setting) -> float:
    """Predicts the examples per second of a stream, at so many in a micro-batch."""
    layers = layers_of("bert", "large published=1", examples, DEVICE)
    blocks = [layer for layer in layers if layer.name.startswith("blocks")]
    first = [layer for layer in layers if layer.name.startswith("embeddings")]
    last = [layer for layer in layers if layer.name.startswith("head")]
    stage_s = []
    for d, (parts, again) in enumerate(zip(setting.partition, setting.again, strict=True)):
        ends = (first if d == 0 else []) + (last if d == len(setting.partition) - 1 else [])
        share = parts / sum(setting.partition)
        forward_s = share * sum(x.forward_s for x in blocks) + sum(x.forward_s for x in ends)
        backward_s = share * sum(x.backward_s for x in blocks) + sum(x.backward_s for x in ends)
        stage_s.append(forward_s * (1 + again) + backward_s + _update_s(blocks, share, ends))
    return examples / max(stage_s)


def _update_s(blocks: Sequence[Layer], share: float, ends: Sequence[Layer]) -> float:
    count = round(share * sum(x.parameters for x in blocks) + sum(x.parameters for x in ends))
    stashed_s = STASHED_BYTES * count / DEVICE.memory_bytes_per_s
    return stashed_s + update_s(optax.lamb(1e-3), count, DEVICE)


def predicted(larger: Setting = PIPEDREAM) -> float:
    """Predicts how many times the rate of PipeDream's micro-batches of 4 that of 16 is, under a
    setting.
    """
    return per_s(16, larger) / per_s(4, PIPEDREAM)
