"""A U-Net, whose levels skip to the other side."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
# + import jvpipe


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        skips = []
        for features in (4, 8):
            x = jax.nn.relu(nn.Conv(features, (3, 3))(x))
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = jax.nn.relu(nn.Conv(8, (3, 3))(x))
        for features, skip in zip((8, 4), reversed(skips)):
            x = nn.ConvTranspose(features, (2, 2), (2, 2))(x)
            x = jax.nn.relu(nn.Conv(features, (3, 3))(jnp.concatenate([x, skip], -1)))
        return nn.Conv(1, (1, 1))(x)[..., 0]


model, optimizer, key = UNet(), optax.adam(1e-2), jax.random.key(0)
x = jax.random.normal(jax.random.key(1), (4, 8, 8, 1))
batch = {"x": x, "y": (x[..., 0] > 0).astype(jnp.float32)}


def loss_fn(params, batch, rng):
    return optax.sigmoid_binary_cross_entropy(model.apply(params, batch["x"]), batch["y"]).mean()


params = model.init(key, batch["x"])
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
