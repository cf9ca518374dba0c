"""A small GPT of Flax Linen."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
# + import jvpipe

VOCABULARY, WIDTH, TOKENS = 50, 16, 12


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(WIDTH)(jax.nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, WIDTH)
        x = embed(tokens) + nn.Embed(TOKENS, WIDTH)(jnp.arange(tokens.shape[1]))
        for _ in range(3):
            x = Block()(x)
        return embed.attend(nn.LayerNorm()(x))


model, optimizer, key = (
    GPT(),
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    jax.random.key(0),
)
ids = jax.random.randint(jax.random.key(1), (4, TOKENS + 1), 0, VOCABULARY)
batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def loss_fn(params, batch, rng):
    logits = model.apply(params, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


params = model.init(key, batch["tokens"])
opt_state = optimizer.init(params)  # -
# + pipe = jvpipe.Pipeline(loss_fn, optimizer, stages=STAGES, microbatches=2)
# + state = pipe.init(params, batch, key)
losses = []
for step in range(3):
    rng = jax.random.fold_in(key, step)  # -
    loss, grads = jax.value_and_grad(loss_fn)(params, batch, rng)  # -
    updates, opt_state = optimizer.update(grads, opt_state, params)  # -
    params, metrics = optax.apply_updates(params, updates), {"loss": loss}  # -
    # + state, metrics = pipe.step(state, batch)
    losses.append(float(metrics["loss"]))
