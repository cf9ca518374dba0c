"""A U-Net that learns to take noise from pictures, as diffusion models do; its long skips cross the whole pipeline.

python -m jvpipe.train --model examples/unet.py:unet --stages 2
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

LAYOUT = ("NHWC", "HWIO", "NHWC")


def conv(x, w, stride=1):
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=LAYOUT)


def block(x, p, time):
    """Two convolutions; how much noise there is comes in between."""
    y = jax.nn.silu(conv(x, p["first"]) + (time @ p["time"])[:, None, None])
    y = (y - y.mean((1, 2, 3), keepdims=True)) * jax.lax.rsqrt(
        y.var((1, 2, 3), keepdims=True) + 1e-5
    )
    return jax.nn.silu(conv(y, p["second"]))


def rings(generator, count, side):
    """Pictures of rings."""
    middle, radius = (
        generator.uniform(4, side - 4, (2, count, 1, 1)),
        generator.uniform(2, 5, (count, 1, 1)),
    )
    y, x = np.mgrid[:side, :side]
    distance = np.hypot(x - middle[0], y - middle[1]) - radius
    return np.exp(-(distance**2)).astype(np.float32)[..., None]


@dataclass(frozen=True)
class UNet:
    side: int = 16
    channels: tuple = (8, 16, 32)
    batch_size = 32
    steps = 400

    def init(self, key):
        keys = iter(jax.random.split(key, 64))
        drawn = lambda *shape: jax.random.normal(next(keys), shape) * np.prod(shape[:-1]) ** -0.5

        def block_weights(inside, outside):
            return {
                "first": drawn(3, 3, inside, outside),
                "time": drawn(8, outside),
                "second": drawn(3, 3, outside, outside),
            }

        widths = self.channels
        down = [block_weights(a, b) for a, b in zip((1, *widths), widths)]
        up = [block_weights(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1])]
        return {"down": down, "up": up, "last": drawn(1, 1, widths[0], 1)}

    def loss_fn(self, params, clean, rng):
        keys = jax.random.split(rng)
        share = jax.random.uniform(keys[0], (len(clean),))
        noise = jax.random.normal(keys[1], clean.shape)
        time = jnp.cos(share[:, None] * np.pi * np.arange(8))
        x = (
            jnp.sqrt(1 - share)[:, None, None, None] * clean
            + jnp.sqrt(share)[:, None, None, None] * noise
        )
        skips = []
        for p in params["down"]:
            x = block(x, p, time)
            skips.append(x)
            x = x[:, ::2, ::2]
        x = skips.pop()
        for p in params["up"]:
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = block(jnp.concatenate([x, skips.pop()], -1), p, time)
        return jnp.mean((conv(x, params["last"]) - noise) ** 2)

    def batches(self, seed, batch_size):
        generator = np.random.default_rng(seed)
        while True:
            yield rings(generator, batch_size, self.side)


unet = UNet()
