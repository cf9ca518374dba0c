"""A convolutional network of Flax Linen with batch norm; its statistics are carried along."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
# + import jvpipe


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (4, 8, 8):
            x = nn.Conv(features, (3, 3))(x)
            x = jax.nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
        return nn.Dense(3)(x.mean((1, 2)))


model, optimizer, key = Net(), optax.sgd(0.1, momentum=0.9), jax.random.key(0)
batch = {
    "x": jax.random.normal(jax.random.key(1), (4, 8, 8, 3)),
    "y": jnp.arange(4) % 3,
}


def loss_fn(params, statistics, batch, rng):
    variables = {"params": params, "batch_stats": statistics}
    logits, changed = model.apply(variables, batch["x"], mutable="batch_stats")
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, changed["batch_stats"]


variables = model.init(key, batch["x"])
params, statistics = variables["params"], variables["batch_stats"]
opt_state = optimizer.init(params)  # -
# + pipe = jvpipe.Pipeline(loss_fn, optimizer, stages=STAGES, microbatches=1, has_state=True)
# + state = pipe.init(params, batch, key, statistics)
losses = []
for step in range(3):
    gradient = jax.value_and_grad(loss_fn, has_aux=True)  # -
    (loss, statistics), grads = gradient(params, statistics, batch, None)  # -
    updates, opt_state = optimizer.update(grads, opt_state, params)  # -
    params, metrics = optax.apply_updates(params, updates), {"loss": loss}  # -
    # + state, metrics = pipe.step(state, batch)
    losses.append(float(metrics["loss"]))
