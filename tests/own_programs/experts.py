"""A mixture of experts: each token goes to its best two, with a loss that balances them."""

import jax
import jax.numpy as jnp
import optax
# + import jvpipe

EXPERTS, WIDTH, TOKENS = 4, 8, 6
optimizer, key = optax.adamw(1e-2), jax.random.key(0)


def layer(key):
    router, up, down = jax.random.split(key, 3)
    return {
        "router": jax.random.normal(router, (WIDTH, EXPERTS)),
        "up": jax.random.normal(up, (EXPERTS, WIDTH, 16)) / 3,
        "down": jax.random.normal(down, (EXPERTS, 16, WIDTH)) / 4,
    }


def mixed(layer, x):
    shares = jax.nn.softmax(x @ layer["router"])
    best, which = jax.lax.top_k(shares, 2)
    gates = (jax.nn.one_hot(which, EXPERTS) * best[..., None]).sum(-2)
    hidden = jax.nn.relu(jnp.einsum("btd,edh->bteh", x, layer["up"]))
    found = jnp.einsum("bteh,ehd,bte->btd", hidden, layer["down"], gates)
    return x + found, EXPERTS * jnp.sum(shares.mean(1) ** 2, -1).mean()


def loss_fn(params, batch, rng):
    x, balance = batch["x"], 0.0
    for layer in params:
        x, unequal = mixed(layer, x)
        balance = balance + unequal
    return jnp.mean((x - batch["y"]) ** 2) + 0.01 * balance


params = [layer(k) for k in jax.random.split(key, 4)]
x = jax.random.normal(jax.random.key(1), (4, TOKENS, WIDTH))
batch = {"x": x, "y": x[:, ::-1]}
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
