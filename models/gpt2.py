"""GPT-2 (Radford et al., 2019): a causal language model, in Flax NNX.

Axes: B batch, T tokens, D model, H heads, V vocabulary.

Layer norm comes before each sublayer and after the last block. Position embeddings are learned. The
output projection is the transposed token embedding.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jvpipe.models.blocks import (
    Block,
    Key,
    TextConfig,
    TransformerConfig,
    Vectors,
    dropped,
    embedding,
    layer_norm,
    linear,
    looking_back,
    normed,
)
from jvpipe.models.folder_settings import Settings
from jvpipe.models.kinds import Parts
from jvpipe.models.losses import Logits, LossFunction, predicting
from jvpipe.models.weight_folder import Folder
from jvpipe.models.weights import Format, Source, norm, table
from jvpipe.models.weights import linear as linear_of
from jvpipe.models.workload import Data, Workload, sized


@dataclass(frozen=True)
class Gpt2Config(TransformerConfig):
    """The shape of a GPT-2.

    Attributes:
        tied: whether the output projection is the transposed token embedding.
    """

    vocabulary: int = 50257
    tokens: int = 1024
    tied: bool = True

    def bias(self, tokens: int) -> Float[Array, "1 T T"]:
        """Returns the bias that hides later tokens."""
        return looking_back(tokens)


SIZES = {
    "tiny": Gpt2Config(blocks=2, width=32, heads=2, vocabulary=300, tokens=16, dropout=0.0),
    "mini": Gpt2Config(blocks=4, width=256, heads=4, vocabulary=2048, tokens=64, dropout=0.0),
    "small": Gpt2Config(blocks=12, width=768, heads=12),
    "medium": Gpt2Config(blocks=24, width=1024, heads=16),
    "770m": Gpt2Config(blocks=36, width=1280, heads=20),
}


class Embeddings(nnx.Module):
    """The sum of the vectors of a token and of its position."""

    def __init__(self, config: Gpt2Config, *, rngs: nnx.Rngs) -> None:
        self.tokens = embedding(config, rngs, config.vocabulary)
        self.positions = embedding(config, rngs, config.positions or config.tokens, spread=0.01)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, tokens: Int[Array, "B T"], key: Key) -> Vectors:
        """Returns the vectors that the first block reads."""
        x = self.tokens(tokens)
        places = jnp.arange(tokens.shape[1])  # [T]; the table of positions may have more rows
        return dropped(self.dropout, x + self.positions(places)[None], key)


class Head(nnx.Module):
    """Maps the vector of a position to the logits of the next token."""

    def __init__(self, config: Gpt2Config, *, rngs: nnx.Rngs) -> None:
        self.norm, width, vocabulary = layer_norm(config, rngs), config.width, config.vocabulary
        self.output = None if config.tied else linear(config, rngs, width, vocabulary, bias=False)

    def __call__(self, x: Vectors, tokens: nnx.Embed) -> Float[Array, "B T V"]:
        """Returns logits in float32. If `tied`, the embedding of `tokens` is the projection."""
        # The first and the last layer read a tied table. Its gradient is the sum of theirs.
        project = tokens.attend if self.output is None else self.output
        return project(normed(self.norm, x)).astype(jnp.float32)


def parts(config: Gpt2Config) -> Parts:
    """Lists the kinds of modules of the model."""
    return Parts(config, {"embeddings": Embeddings, "blocks": Block, "head": Head})


def loss_function(config: Gpt2Config) -> LossFunction:
    """Makes `loss_fn(params, batch, rng)`, the loss of next tokens.

    The batch holds `tokens` and `targets` [B, T] int32, and `weights` [B, T] float32, which are 0
    for padding. The loss has the `total` of the cross entropies in nats, and the sum of the
    weights.
    """
    return predicting(logits_function(config), config.dropout)


def logits_function(config: Gpt2Config) -> Logits:
    """Makes `logits(params, batch, key)`, the logits [B, T, V] of next tokens."""
    model = parts(config)

    def logits(params: Any, batch: Any, key: Key) -> Float[Array, "B T V"]:
        embeddings = model.part("embeddings", params["embeddings"])
        x = embeddings(batch["tokens"], model.key("embeddings", key))
        # A cut between two blocks sends only [B, T, D].
        x = model.through("blocks", params["blocks"], x, key)
        return model.part("head", params["head"])(x, embeddings.tokens)

    return logits


def abstract_batch(config: TextConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of a batch."""
    shape = (batch_size, config.tokens)
    dtypes = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


def open_data(
    config: TextConfig, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Opens text as records in which each token is predicted from the tokens before it."""
    # Imported here because a plan needs neither data nor the libraries that read it.
    from jvpipe.models.text import open_next_tokens

    sizes = {"vocabulary": config.vocabulary, "tokens": config.tokens}
    return open_next_tokens(data_path, run_dir, seed, batch_size, **sizes)


def _fields(settings: Settings, folder: Folder) -> dict[str, Any]:
    """Reads the fields of a `Gpt2Config` from config.json, and rejects unsupported settings."""
    dropout = settings.number("resid_pdrop", 0.1, or_zero=True)
    settings.only("activation_function", "gelu_new")
    # Our model has a single dropout rate, so the three rates must be equal.
    settings.only("embd_pdrop", dropout)
    settings.only("attn_pdrop", dropout)
    settings.only("scale_attn_weights", True)
    settings.only("scale_attn_by_inverse_layer_idx", False)
    settings.only("add_cross_attention", False)
    settings.only("is_encoder_decoder", False)
    settings.only("is_decoder", False, True)
    return {
        "blocks": settings.count("n_layer"),
        "width": settings.count("n_embd"),
        "heads": settings.count("n_head"),
        "vocabulary": settings.count("vocab_size"),
        "positions": settings.count("n_positions"),
        "tokens": settings.count("n_positions"),
        "feed_forward": settings.count("n_inner", null=0),
        "epsilon": settings.number("layer_norm_epsilon", 1e-5, or_zero=True),
        "dropout": dropout,
        "tied": settings.flag("tie_word_embeddings", True),
    }


def _sources(config: Gpt2Config) -> dict[str, Source]:
    """Maps each parameter to its tensors in a folder."""
    sources = table("embeddings.tokens", "wte")
    sources |= table("embeddings.positions", "wpe")
    sources |= norm("head.norm", "ln_f")
    if not config.tied:
        sources |= linear_of("head.output", "lm_head", bias=False)
    for i in range(config.blocks):
        ours, theirs = f"blocks.{i:03}", f"h.{i}"
        # GPT-2's Conv1D stores kernels as [inputs, outputs], as our model does, so none is
        # transposed.
        sources |= norm(f"{ours}.attention_norm", f"{theirs}.ln_1")
        sources |= linear_of(f"{ours}.attention.inputs", f"{theirs}.attn.c_attn", turned=False)
        sources |= linear_of(f"{ours}.attention.output", f"{theirs}.attn.c_proj", turned=False)
        sources |= norm(f"{ours}.feed_forward_norm", f"{theirs}.ln_2")
        sources |= linear_of(f"{ours}.expand", f"{theirs}.mlp.c_fc", turned=False)
        sources |= linear_of(f"{ours}.contract", f"{theirs}.mlp.c_proj", turned=False)
    return sources


FORMAT = Format(
    _fields,
    _sources,
    harmless=(
        "initializer_range",
        "n_ctx",
        "n_special",
        "predict_special_tokens",
        "reorder_and_upcast_attn",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "vocab",
    ),
    copies={"lm_head.weight": "wte.weight"},
    ignored=("h.*.attn.bias", "h.*.attn.masked_bias"),
)
"""GPT2LMHeadModel and GPT2Model. Attention masks, which some folders store, are ignored."""


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes a GPT-2 of a size (`tiny`, `mini`, `small`, `medium`, `770m`; `mini` by default).

    `options` replace fields of `Gpt2Config`.
    """
    return sized(
        "gpt2",
        SIZES,
        size,
        options,
        init=lambda config: parts(config).init,
        loss_function=loss_function,
        abstract_batch=abstract_batch,
        open_data=open_data,
        learning_rate=2.5e-4,
        batch_size=32,
    )
