"""Equinox: the arrays of a module are its parameters; the rest of the module is not trained.

The model learns the frequencies of noisy sine waves.

python -m jvpipe.train --model examples/with_equinox.py:Waves --stages 2
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, POINTS = 64, 128


class Mixer(eqx.Module):
    norm: eqx.nn.LayerNorm
    mix: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.dropout = eqx.nn.Dropout(0.1)
        hidden = 2 * WIDTH
        self.mix = eqx.nn.MLP(
            WIDTH,
            WIDTH,
            hidden,
            depth=1,
            activation=jax.nn.silu,
            key=key,
        )

    def __call__(self, x, key):
        y = self.mix(self.norm(x))
        return x + self.dropout(y, key=key, inference=key is None)


class Net(eqx.Module):
    first: eqx.nn.Linear
    mixers: list[Mixer]
    last: eqx.nn.Linear

    def __init__(self, key):
        first, last, *rest = jax.random.split(key, 6)
        self.first = eqx.nn.Linear(POINTS, WIDTH, key=first)
        self.last = eqx.nn.Linear(WIDTH, 1, key=last)
        self.mixers = [Mixer(k) for k in rest]

    def __call__(self, x, key):
        x = self.first(x)
        for i, mixer in enumerate(self.mixers):
            mixer_key = None if key is None else jax.random.fold_in(key, i)
            x = mixer(x, mixer_key)
        return self.last(x)[0]


def waves(generator, count):
    """Returns noisy sine waves, and the frequency of each."""
    swings = generator.uniform(1, 8, (count, 1))
    phase = generator.uniform(0, 2 * np.pi, (count, 1))
    times = np.linspace(0, 2 * np.pi, POINTS)
    angles = swings * times + phase
    noise = 0.2 * generator.normal(size=(count, POINTS))
    x = np.sin(angles) + noise
    return {
        "x": x.astype(np.float32),
        "swings": swings[:, 0].astype(np.float32),
    }


class Waves:
    batch_size, steps = 64, 500
    # `static` is the module without its arrays, for example its activation functions. It does not
    # depend on the values of the parameters.
    abstract = eqx.filter_eval_shape(Net, jax.random.key(0))
    _, static = eqx.partition(abstract, lambda x: hasattr(x, "shape"))

    def init(self, key):
        return eqx.filter(Net(key), eqx.is_array)

    def optimizer(self, steps):
        clip = optax.clip_by_global_norm(1.0)
        adamw = optax.adamw(1e-3)
        return optax.chain(clip, adamw)

    def loss_fn(self, params, batch, rng):
        net = eqx.combine(params, self.static)
        # An Equinox module takes a single example. Under `vmap`, each example gets its own key.
        # Evaluation has no key.
        x = batch["x"]
        keys = None if rng is None else jax.random.split(rng, len(x))
        key_axis = None if rng is None else 0
        nets = jax.vmap(net, in_axes=(0, key_axis))
        error = nets(x, keys) - batch["swings"]
        return jnp.mean(error**2)

    def batches(self, seed, batch_size):
        generator = np.random.default_rng(seed)
        while True:
            yield waves(generator, batch_size)
