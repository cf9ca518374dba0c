"""The parts that all translation models share: batches, data and the loss.

Axes: B batch, T tokens of a source sentence and of its translation, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jvpipe.models.blocks import TextConfig
from jvpipe.models.losses import Logits, LossFunction, predicting
from jvpipe.models.workload import Data


@dataclass(frozen=True, kw_only=True)
class TranslatorConfig(TextConfig):
    """The shape of a translation model.

    Attributes:
        languages: the source language and the target language, such as "en-de".
        smoothing: the fraction of a target's probability that label smoothing spreads over all
            tokens.
    """

    languages: str = "en-de"
    smoothing: float = 0.1


def abstract_batch(config: TranslatorConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of a batch, as `loss_of` describes them."""
    shape = (batch_size, config.tokens)
    dtypes = {"inputs": np.int32, "tokens": np.int32, "targets": np.int32, "weights": np.float32}
    shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
    # Targets need no lengths, because `weights` masks their padding and the decoder does not look
    # ahead.
    return shapes | {"lengths": jax.ShapeDtypeStruct(shape[:1], np.int32)}


def open_data(
    config: TranslatorConfig, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Opens sentence pairs as training data.

    Args:
        config: has the languages, the vocabulary and the number of tokens.
        data_path: the folder of the pairs, or None, as for `open_parallel`.
        run_dir: the folder in which the tokenizer is stored.
        seed: determines the order of examples.
        batch_size: the number of sentence pairs in a batch.
    """
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
    """Makes the loss of the target tokens, `loss_fn(params, batch, rng)`.

    The loss has the `total` of the weighted, smoothed cross entropies in nats, and as `weight` the
    sum of the batch's `weights`. The batch holds:

    | leaf | shape | what |
    |---|---|---|
    | `inputs` | [B, T] int32 | the tokens that the encoder reads |
    | `lengths` | [B] int32 | the lengths of the inputs without padding |
    | `tokens` | [B, T] int32 | the tokens that the decoder reads |
    | `targets` | [B, T] int32 | the tokens that the decoder predicts |
    | `weights` | [B, T] float32 | 0 for a position that does not count |
    """
    return predicting(logits, config.dropout, config.smoothing)


def present(lengths: Int[Array, "B"], tokens: int) -> Bool[Array, "B T"]:
    """Returns which positions of each sentence hold a token (True) or padding (False)."""
    return jax.lax.broadcasted_iota(jnp.int32, (1, tokens), 1) < lengths[:, None]


def unseen(lengths: Int[Array, "B"], tokens: int) -> Float[Array, "B T"]:
    """Returns the bias of attention scores that hides padding: 0 for a token, -1e9 for padding."""
    # The bias is finite, because a sentence may have only padding, and the softmax of -inf alone is
    # NaN.
    return jnp.where(present(lengths, tokens), 0.0, -1e9)
