"""An MLP-mixer of equinox, vmapped over examples, with fields that are no arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
# + import jvpipe

PATCHES, WIDTH = 6, 8


class Mixer(eqx.Module):
    tokens: list
    channels: list
    norm: eqx.nn.LayerNorm
    activation: callable

    def __init__(self, key):
        keys = jax.random.split(key, 6)
        self.tokens = [eqx.nn.MLP(PATCHES, PATCHES, 12, 1, key=k) for k in keys[:3]]
        self.channels = [eqx.nn.MLP(WIDTH, WIDTH, 16, 1, key=k) for k in keys[3:]]
        self.norm, self.activation = eqx.nn.LayerNorm(WIDTH), jax.nn.gelu

    def __call__(self, x):
        for tokens, channels in zip(self.tokens, self.channels):
            x = x + jax.vmap(tokens, in_axes=1, out_axes=1)(jax.vmap(self.norm)(x))
            x = x + self.activation(jax.vmap(channels)(jax.vmap(self.norm)(x)))
        return x.mean()


optimizer, key = optax.adamw(1e-2), jax.random.key(0)
batch = {"x": jax.random.normal(jax.random.key(1), (4, PATCHES, WIDTH)), "y": jnp.arange(4.0)}
params, static = eqx.partition(Mixer(key), eqx.is_array)


def loss_fn(params, batch, rng):
    model = eqx.combine(params, static)
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


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
