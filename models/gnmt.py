"""GNMT (arXiv:1609.08144): translation by LSTMs with attention, in Flax NNX.

Axes: B batch, T tokens of a source sentence and of its translation, D model, I inputs of a layer, G
= 4 D gates, V vocabulary.

The encoder's first layer reads in both directions. In the encoder and in the decoder, each layer
from the third on adds its input to its output. The decoder's first layer attends to the encoder at
each step, and all layers above it read the result. In the paper, the first layer also reads the
attention result of the previous step. Here it does not, as in PipeDream's GNMT. So attention needs
no loop over steps, and layers run one after another. Attention scores come from a network with one
hidden layer, whose output vector has a learned length (arXiv:1602.07868).

    inputs ── source ── first (both ways) ── second ── encoder ... ──┐ read [B, T, D]
    tokens ── target ── first ───────────────────────────────── attention ──┬──────┬─── ...
                          └───────────────────────────────────── second ── third ── ... ── head

The size 16 has 8 layers each in the encoder and the decoder, and 290.6M parameters, published as
291M. That count results from 36,548 tokens and separate tables for the two languages and the
output. About 36,548 tokens result from 32,000 merges for WMT's English and German. With 32,000
tokens there would be 276.7M parameters. With 36,548 tokens, but one table for both languages, there
would be 253.2M.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jvpipe.models.blocks import Key, Vectors, dropped, embedding, linear
from jvpipe.models.kinds import Parts
from jvpipe.models.losses import Logits, LossFunction
from jvpipe.models.translators import (
    TranslatorConfig,
    abstract_batch,
    loss_of,
    open_data,
    unseen,
)
from jvpipe.models.workload import Workload, sized


@dataclass(frozen=True, kw_only=True)
class GnmtConfig(TranslatorConfig):
    """The shape of a GNMT. The encoder and the decoder have `blocks` layers each."""

    vocabulary: int = 36548
    tokens: int = 50
    dropout: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks < 2:
            raise ValueError(
                f"blocks={self.blocks} is too small: encoder and decoder need two layers each"
            )


SIZES = {
    "tiny": GnmtConfig(blocks=3, width=16, vocabulary=300, tokens=8, dropout=0.0, smoothing=0.0),
    "mini": GnmtConfig(blocks=3, width=128, vocabulary=1024, tokens=32),
    "8": GnmtConfig(blocks=4, width=1024),
    "16": GnmtConfig(blocks=8, width=1024),
}


class Embeddings(nnx.Module):
    """A vector per token."""

    def __init__(self, config: GnmtConfig, *, rngs: nnx.Rngs) -> None:
        self.tokens = embedding(config, rngs, config.vocabulary, spread=1.0)

    def __call__(self, tokens: Int[Array, "B T"]) -> Vectors:
        """Returns the vectors that a first layer reads."""
        return self.tokens(tokens)


State = Float[Array, "B D"]


class Lstm(nnx.Module):
    """A layer of LSTM cells, as a scan over time; it reads a second input if it has a `context`."""

    def __init__(
        self, config: GnmtConfig, inputs: int, *, context: bool = False, rngs: nnx.Rngs
    ) -> None:
        D = config.width
        self.inputs = linear(config, rngs, inputs, 4 * D)
        self.context = linear(config, rngs, D, 4 * D, bias=False) if context else None
        self.state = linear(config, rngs, D, 4 * D, bias=False)

    def __call__(self, x: Float[Array, "B T I"], attended: Vectors | None = None) -> Vectors:
        """Returns the cells' outputs at each step. The initial state is zero."""

        def step(
            state: tuple[State, State], gates_in: Float[Array, "B G"]
        ) -> tuple[tuple[State, State], State]:
            h, c = state
            i, f, g, o = jnp.split(gates_in + h @ kernel, 4, axis=-1)  # [B, D] each
            kept = jax.nn.sigmoid(f) * c
            entering = jax.nn.sigmoid(i) * jnp.tanh(g)
            c = kept + entering
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        # The part of the gates that does not depend on the state is one product for all steps.
        read = self.inputs(x)
        if self.context is not None and attended is not None:
            read = read + self.context(attended)
        inputs = jnp.swapaxes(read, 0, 1)  # [T, B, 4 D], because a scan runs along the first axis
        kernel = self.state.kernel[...].astype(inputs.dtype)
        zeros = jnp.zeros((x.shape[0], kernel.shape[0]), inputs.dtype)
        _, outputs = jax.lax.scan(step, (zeros, zeros), inputs)
        return jnp.swapaxes(outputs, 0, 1)


class BothWays(nnx.Module):
    """Two layers side by side: one reads forward, one backward from the end of each sentence."""

    def __init__(self, config: GnmtConfig, *, rngs: nnx.Rngs) -> None:
        self.forward = Lstm(config, config.width, rngs=rngs)
        self.backward = Lstm(config, config.width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Vectors, lengths: Int[Array, "B"], key: Key) -> Float[Array, "B T 2*D"]:
        """Returns the outputs of both layers side by side."""
        x = dropped(self.dropout, x, key)
        # The result is reversed again, so that the output for a token is at the token's position.
        back = turned(self.backward(turned(x, lengths)), lengths)
        return jnp.concatenate([self.forward(x), back], -1)


def turned(x: Vectors, lengths: Int[Array, "B"]) -> Vectors:
    """Reverses each sentence. Its padding stays in place."""
    at = jax.lax.broadcasted_iota(jnp.int32, x.shape[:2], 1)
    ends = lengths[:, None]
    mirrored = jnp.where(at < ends, ends - 1 - at, at)  # [B, T]
    return jnp.take_along_axis(x, mirrored[:, :, None], axis=1)


class Layer(nnx.Module):
    """An LSTM with dropout. If `adds`, the layer adds its input to its output."""

    def __init__(
        self,
        config: GnmtConfig,
        inputs: int,
        *,
        context: bool = False,
        adds: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self.lstm = Lstm(config, inputs, context=context, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)
        self.adds = adds

    def __call__(self, x: Float[Array, "B T I"], *rest: Any) -> Vectors:
        """Returns the outputs of all steps.

        Args:
            x: the inputs.
            rest: the key; before it, the result of attention if the layer has a `context`.
        """
        *attended, key = rest
        y = self.lstm(dropped(self.dropout, x, key), *attended)
        return x + y if self.adds else y


class Attention(nnx.Module):
    """Attention of the decoder's steps to the encoder's steps, scored by a small network."""

    def __init__(self, config: GnmtConfig, *, rngs: nnx.Rngs) -> None:
        D = config.width
        self.queries = linear(config, rngs, D, D, bias=False)
        self.keys = linear(config, rngs, D, D)
        self.output = nnx.Param(jax.random.normal(rngs.params(), (D,)))
        self.length = nnx.Param(jnp.ones(()))

    def __call__(self, x: Vectors, read: Vectors, lengths: Int[Array, "B"]) -> Vectors:
        """Mixes the vectors of `read` for each step of `x`. `lengths` hides padding of `read`."""
        # `hidden` has all pairs of a decoder step and an encoder step: [B, T, T, D], the largest
        # array of the model.
        queries = self.queries(x)[:, :, None]
        keys = self.keys(read)[:, None]
        hidden = jnp.tanh(queries + keys)
        # Weight normalization (arXiv:1602.07868, equation 2) learns a length and a direction.
        length = self.length[...] * jax.lax.rsqrt(jnp.sum(self.output[...] ** 2))
        output = self.output[...] * length
        scores = (hidden @ output.astype(hidden.dtype)).astype(jnp.float32)
        mask = unseen(lengths, read.shape[1])[:, None]  # [B, 1, T]
        weights = jax.nn.softmax(scores + mask).astype(x.dtype)
        return weights @ read


class Head(nnx.Module):
    """Maps the vector of a decoder step to the logits of the next token."""

    def __init__(self, config: GnmtConfig, *, rngs: nnx.Rngs) -> None:
        self.output = linear(config, rngs, config.width, config.vocabulary)

    def __call__(self, x: Vectors) -> Float[Array, "B T V"]:
        """Returns logits in float32."""
        return self.output(x).astype(jnp.float32)


def parts(config: GnmtConfig) -> Parts:
    """Lists the kinds of modules. `encoder` and `decoder` are for the layers from the third on."""
    D = config.width
    kinds: dict[str, Any] = {
        "source": Embeddings,
        "encoder_first": BothWays,
        "encoder_second": partial(Layer, inputs=2 * D),
        "encoder": partial(Layer, inputs=D, adds=True),
        "target": Embeddings,
        "decoder_first": partial(Layer, inputs=D),
        "attention": Attention,
        "decoder_second": partial(Layer, inputs=D, context=True),
        "decoder": partial(Layer, inputs=D, context=True, adds=True),
        "head": Head,
    }
    return Parts(config, kinds, stacked=("encoder", "decoder"), count=config.blocks - 2)


def logits_function(config: GnmtConfig) -> Logits:
    """Makes `logits(params, batch, key)`, the logits [B, T, V] of target tokens."""
    model = parts(config)

    def logits(params: Any, batch: Any, key: Key) -> Float[Array, "B T V"]:
        def part(name: str, *inputs: jax.Array) -> jax.Array:
            return model.part(name, params[name])(*inputs)

        def layer(name: str, *inputs: jax.Array) -> jax.Array:
            return model.part(name, params[name])(*inputs, model.key(name, key))

        lengths = batch["lengths"]
        x = part("source", batch["inputs"])  # [B, T, D]
        x = layer("encoder_first", x, lengths)  # [B, T, 2 D]
        x = layer("encoder_second", x)  # [B, T, D]
        read = model.through("encoder", params["encoder"], x, key)
        y = layer("decoder_first", part("target", batch["tokens"]))
        # Attention runs only once, before the layers above. A cut between them sends two arrays of
        # [B, T, D]: y and `attended`.
        attended = part("attention", y, read, lengths)
        y = layer("decoder_second", y, attended)
        y = model.through("decoder", params["decoder"], y, key, attended)
        return part("head", y)

    return logits


def loss_function(config: GnmtConfig) -> LossFunction:
    """Makes `loss_fn(params, batch, rng)`, the loss of target tokens as in `loss_of`."""
    return loss_of(config, logits_function(config))


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes a GNMT of a size (`tiny`, `mini`, `8` or `16` layers; `mini` by default).

    `options` replace fields of `GnmtConfig`.
    """
    return sized(
        "gnmt",
        SIZES,
        size,
        options,
        init=lambda config: parts(config).init,
        loss_function=loss_function,
        abstract_batch=abstract_batch,
        open_data=open_data,
        learning_rate=1e-3,
        batch_size=128,
    )
