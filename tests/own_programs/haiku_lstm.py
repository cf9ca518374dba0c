"""An LSTM of haiku, unrolled over time by a scan."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
# + import jvpipe

TIME, WIDTH = 10, 8


@hk.transform
def model(x):
    for _ in range(2):
        core = hk.LSTM(WIDTH)
        x, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
    return hk.Linear(1)(x)


optimizer, key = optax.adam(1e-2), jax.random.key(0)
x = jax.random.normal(jax.random.key(1), (4, TIME, 3))
batch = {"x": x, "y": jnp.cumsum(x[..., :1], 1)}


def loss_fn(params, batch, rng):
    found = model.apply(params, None, batch["x"].swapaxes(0, 1))
    return jnp.mean((found.swapaxes(0, 1) - batch["y"]) ** 2)


params = model.init(key, batch["x"].swapaxes(0, 1))
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
