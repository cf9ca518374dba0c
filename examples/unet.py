"""A U-Net that learns to find the noise in pictures, as in diffusion models.

A skip connection passes pictures from the way down to the way up, at each size. If the two ends of
a skip are on different stages, jvpipe sends the pictures directly from one stage to the other.

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
    """Applies two convolutions to x, [batch, height, width, channels].

    Between them, it adds a projection of `time`, [batch, 8], the encoded amount of noise.
    """
    y = conv(x, p["first"])
    noise = (time @ p["time"])[:, None, None]  # [batch, 1, 1, channels]
    y = jax.nn.silu(y + noise)
    pixels = (1, 2, 3)
    # Each picture is normalized by itself, so that results do not depend on the micro-batches.
    centered = y - y.mean(pixels, keepdims=True)
    variance = y.var(pixels, keepdims=True)
    y = centered * jax.lax.rsqrt(variance + 1e-5)
    return jax.nn.silu(conv(y, p["second"]))


def rings(generator, count, side):
    """Returns pictures that show a ring each, [count, side, side, 1]."""
    middle = generator.uniform(4, side - 4, (2, count, 1, 1))
    radius = generator.uniform(2, 5, (count, 1, 1))
    y, x = np.mgrid[:side, :side]
    distance = np.hypot(x - middle[0], y - middle[1]) - radius
    ink = np.exp(-(distance**2))
    return ink.astype(np.float32)[..., None]


@dataclass(frozen=True)
class UNet:
    side: int = 16
    channels: tuple = (8, 16, 32)
    batch_size = 32
    steps = 400

    def init(self, key):
        keys = iter(jax.random.split(key, 64))
        drawn = lambda *shape: jax.random.normal(next(keys), shape) * np.prod(shape[:-1]) ** -0.5

        def block_weights(inputs, outputs):
            first, time = drawn(3, 3, inputs, outputs), drawn(8, outputs)
            return {"first": first, "time": time, "second": drawn(3, 3, outputs, outputs)}

        widths = self.channels
        down = [block_weights(a, b) for a, b in zip((1, *widths), widths)]
        # A block on the way up reads `a` channels of the block before it, and `b` of a skip.
        upwards = zip(widths[:0:-1], widths[-2::-1])
        up = [block_weights(a + b, b) for a, b in upwards]
        return {"down": down, "up": up, "last": drawn(1, 1, widths[0], 1)}

    def loss_fn(self, params, clean, rng):
        keys = jax.random.split(rng)
        share = jax.random.uniform(keys[0], (len(clean),))
        noise = jax.random.normal(keys[1], clean.shape)
        time = jnp.cos(share[:, None] * np.pi * np.arange(8))  # [batch, 8]
        # If share is 0, x is only the picture; if it is 1, x is only noise. The squares of the two
        # factors add up to 1.
        picture_part = jnp.sqrt(1 - share)[:, None, None, None] * clean
        x = picture_part + jnp.sqrt(share)[:, None, None, None] * noise
        skips = []
        for p in params["down"]:
            x = block(x, p, time)
            skips.append(x)
            x = x[:, ::2, ::2]
        x = skips.pop()
        for p in params["up"]:
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)  # twice as high and as wide
            # A skip crosses all cuts between its two ends.
            x = jnp.concatenate([x, skips.pop()], -1)
            x = block(x, p, time)
        error = conv(x, params["last"]) - noise
        return jnp.mean(error**2)

    def batches(self, seed, batch_size):
        generator = np.random.default_rng(seed)
        while True:
            yield rings(generator, batch_size, self.side)


unet = UNet()
