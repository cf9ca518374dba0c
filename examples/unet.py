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


def conv(x, w):
    return jax.lax.conv_general_dilated(
        x,
        w,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=LAYOUT,
    )


def block(x, p, time):
    """Applies two convolutions to x, [batch, height, width, channels].

    Between them, it adds a projection of `time`, [batch, 8], the encoded amount of noise.
    """
    y = conv(x, p["first"])
    noise = time @ p["time"]  # [batch, channels]
    y = jax.nn.silu(y + noise[:, None, None])
    pixels = (1, 2, 3)
    # Each picture is normalized by itself, so that results do not depend on the micro-batches.
    centered = y - y.mean(pixels, keepdims=True)
    variance = y.var(pixels, keepdims=True)
    y = centered * jax.lax.rsqrt(variance + 1e-5)
    y = conv(y, p["second"])
    return jax.nn.silu(y)


def rings(generator, count, side):
    """Returns pictures that show a ring each, [count, side, side, 1]."""
    middle = generator.uniform(4, side - 4, (2, count, 1, 1))
    radius = generator.uniform(2, 5, (count, 1, 1))
    y, x = np.mgrid[:side, :side]
    across = x - middle[0]
    along = y - middle[1]
    distance = np.hypot(across, along) - radius
    ink = np.exp(-(distance**2))[..., None]
    return ink.astype(np.float32)


@dataclass(frozen=True)
class UNet:
    side: int = 16
    channels: tuple = (8, 16, 32)
    batch_size = 32
    steps = 400

    def init(self, key):
        keys = iter(jax.random.split(key, 64))

        def drawn(*shape):
            scale = np.prod(shape[:-1]) ** -0.5
            return scale * jax.random.normal(next(keys), shape)

        def block_weights(inputs, outputs):
            return {
                "first": drawn(3, 3, inputs, outputs),
                "time": drawn(8, outputs),
                "second": drawn(3, 3, outputs, outputs),
            }

        widths = self.channels
        downwards = zip((1, *widths), widths)
        down = [block_weights(a, b) for a, b in downwards]
        # A block on the way up reads `a` channels of the block before it, and `b` of a skip.
        upwards = zip(widths[:0:-1], widths[-2::-1])
        up = [block_weights(a + b, b) for a, b in upwards]
        last = drawn(1, 1, widths[0], 1)
        return {"down": down, "up": up, "last": last}

    def loss_fn(self, params, clean, rng):
        keys = jax.random.split(rng)
        share = jax.random.uniform(keys[0], (len(clean),))
        noise = jax.random.normal(keys[1], clean.shape)
        rates = np.pi * np.arange(8)
        time = jnp.cos(share[:, None] * rates)  # [batch, 8]
        # If share is 0, x is only the picture; if it is 1, x is only noise. The squares of the two
        # factors add up to 1.
        share = share[:, None, None, None]
        picture_part = jnp.sqrt(1 - share) * clean
        x = picture_part + jnp.sqrt(share) * noise
        skips = []
        for p in params["down"]:
            x = block(x, p, time)
            skips.append(x)
            x = x[:, ::2, ::2]
        x = skips.pop()
        for p in params["up"]:
            x = jnp.repeat(x, 2, axis=1)  # twice as high
            x = jnp.repeat(x, 2, axis=2)  # and twice as wide
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
