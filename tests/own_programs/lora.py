"""LoRA: adapters are trained beside a base of bfloat16 that the optimizer leaves alone."""

import jax
import jax.numpy as jnp
import optax
# + import jvpipe

WIDTH, RANK = 16, 2
key = jax.random.key(0)
keys = jax.random.split(key, 4)
base = [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in keys]
adapters = [
    {"a": jax.random.normal(k, (WIDTH, RANK)) / 4, "b": jnp.zeros((RANK, WIDTH))} for k in keys
]
params = {"base": [w.astype(jnp.bfloat16) for w in base], "adapters": adapters}
labels = {"base": "frozen", "adapters": "trained"}
optimizer = optax.multi_transform(
    {"frozen": optax.set_to_zero(), "trained": optax.adamw(1e-2)}, labels
)
batch = {"x": jax.random.normal(jax.random.key(1), (8, WIDTH)), "y": jnp.ones((8, WIDTH))}


def loss_fn(params, batch, rng):
    x = batch["x"]
    for w, adapter in zip(params["base"], params["adapters"]):
        x = jnp.tanh(x @ w.astype(jnp.float32) + x @ adapter["a"] @ adapter["b"])
    return jnp.mean((x - batch["y"]) ** 2)


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
