"""What models that translate share: the shapes of their batches, their data and their loss.

Axes: B batch, T tokens that are read, and as many that are written, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jvpipe.models.blocks import Logits, LossFunction, TextConfig, predicting
from jvpipe.models.workload import Data


@dataclass(frozen=True, kw_only=True)
class TranslatorConfig(TextConfig):
    """The shape of a model that translates.

    The first of the `languages` is read and the second written; `smoothing` is the share of a target that is
    spread over all tokens.
    """

    languages: str = "en-de"
    smoothing: float = 0.1


def abstract_batch(config: TranslatorConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and types of a batch."""
    shape = (batch_size, config.tokens)
    dtypes = {"inputs": np.int32, "tokens": np.int32, "targets": np.int32, "weights": np.float32}
    shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
    # Only of the inputs: what is written is masked by `weights`, and nobody there looks ahead.
    return shapes | {"lengths": jax.ShapeDtypeStruct(shape[:1], np.int32)}


def open_data(
    config: TranslatorConfig, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Sentences and their translations."""
    # Imported here because a plan needs neither data nor the libraries that read it.
    from jvpipe.models.translation import open_translation

    return open_translation(
        data_path,
        run_dir,
        seed,
        batch_size,
        languages=config.languages,
        vocabulary=config.vocabulary,
        tokens=config.tokens,
    )


def loss_of(config: TranslatorConfig, logits: Logits) -> LossFunction:
    """The loss of the tokens that are written, `loss_fn(params, batch, rng)`.

    The batch holds `inputs`, `tokens` and `targets` [B, T] int32, which the encoder reads, the decoder reads and the
    decoder predicts, the `lengths` [B] int32 of the inputs, and `weights` [B, T] float32; a position of weight 0 does
    not count. `total` is the sum of the smoothed cross entropies in nats, `weight` their number.
    """
    return predicting(logits, config.dropout, config.smoothing)


def present(lengths: Int[Array, "B"], tokens: int) -> Bool[Array, "B T"]:
    """Which tokens are of the sentence, not of what fills it up."""
    return jax.lax.broadcasted_iota(jnp.int32, (1, tokens), 1) < lengths[:, None]


def unseen(lengths: Int[Array, "B"], tokens: int) -> Float[Array, "B T"]:
    """What is added to the scores of attention, so that nobody looks at what fills a sentence up."""
    # Finite: a sentence of padding alone would have a row of -inf, whose softmax is not a number.
    return jnp.where(present(lengths, tokens), 0.0, -1e9)
