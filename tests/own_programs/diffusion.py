"""Diffusion: noise of a random strength is added, by the key of the step, and is to be told."""

import jax
import jax.numpy as jnp
import optax
# + import jvpipe

WIDTH, STEPS = 8, 100
optimizer, key = optax.adam(1e-2), jax.random.key(0)
kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, STEPS))


def denoised(params, x, t):
    x = jnp.tanh(x @ params["in"] + params["time"][t])
    for w in params["blocks"]:
        x = x + jnp.tanh(x @ w)
    return x @ params["out"]


def loss_fn(params, batch, rng):
    of_time, of_noise = jax.random.split(rng)
    t = jax.random.randint(of_time, batch.shape[:1], 0, STEPS)
    noise = jax.random.normal(of_noise, batch.shape)
    mixed = jnp.sqrt(kept[t])[:, None] * batch + jnp.sqrt(1 - kept[t])[:, None] * noise
    return jnp.mean((denoised(params, mixed, t) - noise) ** 2)


keys = jax.random.split(key, 6)
params = {
    "in": jax.random.normal(keys[0], (2, WIDTH)),
    "time": jax.random.normal(keys[1], (STEPS, WIDTH)),
    "blocks": [jax.random.normal(k, (WIDTH, WIDTH)) / 3 for k in keys[2:5]],
    "out": jax.random.normal(keys[5], (WIDTH, 2)) / 3,
}
batch = jax.random.normal(jax.random.key(1), (8, 2))
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
