"""Two towers and a contrastive loss: every text is told from all others of the batch."""

import jax
import jax.numpy as jnp
import optax
# + import jvpipe

WIDTH = 8
optimizer, key = optax.adam(1e-2), jax.random.key(0)


def tower(key):
    return [jax.random.normal(k, (WIDTH, WIDTH)) / 2 for k in jax.random.split(key, 3)]


def embedded(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def loss_fn(params, batch, rng):
    images, texts = (
        embedded(params["images"], batch["images"]),
        embedded(params["texts"], batch["texts"]),
    )
    logits = images @ texts.T * jnp.exp(params["temperature"])
    own = jnp.arange(logits.shape[0])
    rows = optax.softmax_cross_entropy_with_integer_labels(logits, own).mean()
    return (rows + optax.softmax_cross_entropy_with_integer_labels(logits.T, own).mean()) / 2


params = {"images": tower(key), "texts": tower(jax.random.key(1)), "temperature": jnp.float32(1.0)}
x = jax.random.normal(jax.random.key(2), (2, 8, WIDTH))
batch = {"images": x[0], "texts": x[1]}
opt_state = optimizer.init(params)  # -
# + pipe = jvpipe.Pipeline(loss_fn, optimizer, stages=STAGES, microbatches=1)
# + state = pipe.init(params, batch, key)
losses = []
for step in range(3):
    rng = jax.random.fold_in(key, step)  # -
    loss, grads = jax.value_and_grad(loss_fn)(params, batch, rng)  # -
    updates, opt_state = optimizer.update(grads, opt_state, params)  # -
    params, metrics = optax.apply_updates(params, updates), {"loss": loss}  # -
    # + state, metrics = pipe.step(state, batch)
    losses.append(float(metrics["loss"]))
