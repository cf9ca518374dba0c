"""A network of Flax NNX with dropout and batch norm, trained by NNX's own optimizer."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
# + import jvpipe.nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.maps = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])
        self.norms = nnx.List([nnx.BatchNorm(8, rngs=rngs) for _ in range(4)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        for linear, norm in zip(self.maps, self.norms):
            x = x + self.dropout(jnp.tanh(norm(linear(x))))
        return x


batch = {"x": jax.random.normal(jax.random.key(1), (8, 8)), "y": jnp.ones((8, 8))}


def loss_fn(net, batch):
    return jnp.mean((net(batch["x"]) - batch["y"]) ** 2)


net = Net(nnx.Rngs(0))  # -
optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)  # -
# + made, key = jvpipe.nnx.loss(Net, loss_fn), jax.random.key(0)
# + pipe = jvpipe.Pipeline(made, optax.adam(1e-2), STAGES, 2, has_state=made.has_state)
# + state = pipe.init(made.init, batch, key, made.model_state(key))
losses = []
for step in range(3):
    loss, grads = nnx.value_and_grad(loss_fn)(net, batch)  # -
    optimizer.update(net, grads)  # -
    metrics = {"loss": loss}  # -
    # + state, metrics = pipe.step(state, batch)
    losses.append(float(metrics["loss"]))
