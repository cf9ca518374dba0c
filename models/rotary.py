"""Rotary positions (arXiv:2104.09864): queries and keys turn with their position.

Axes: B batch, T tokens, H heads, K width of a head, P pairs of it.
"""

from dataclasses import dataclass
from math import pi

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Heads = Float[Array, "B T H K"]


@dataclass(frozen=True)
class Rotation:
    """By which angles pairs of numbers turn from one position to the next: they fall from 1 towards 1 / `theta`.

    For texts that are longer than those of training, angles are divided by `stretch`. Without `original`, all angles
    are (arXiv:2306.15595). If `original` gives the length of training, Llama 3.1's rule holds (arXiv:2407.21783):
    angles that make less than `low` turns in that length are divided, angles that make more than `high` turns stay,
    and the others change by something in between.

    >>> Rotation(1e4).rates(4).round(6).tolist()
    [1.0, 0.009999999776482582]
    >>> Rotation(1e4, stretch=8.0, original=100).rates(4).round(6).tolist()
    [1.0, 0.0012499999720603228]
    """

    theta: float
    stretch: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 0

    def rates(self, width: int) -> Float[Array, "P"]:
        """The angle per position of each pair of a head of so many numbers."""
        steps = jax.lax.iota(jnp.float32, width // 2)
        # theta^(-2 i / K), arXiv:2104.09864, equation 15.
        power = -2 / width * jnp.log(self.theta)
        rates = jnp.exp(steps * power)
        if self.stretch == 1:
            return rates
        if not self.original:
            return rates / self.stretch
        # Fast pairs tell neighbours apart and stay; slow ones never came round in training and are stretched.
        turns = rates * (self.original / (2 * pi))
        kept = jnp.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return kept * rates + (1 - kept) * rates / self.stretch


def turned(x: Heads, rates: Float[Array, "P"]) -> Heads:
    """Pairs of numbers, half a head apart, turned by the position times `rates`."""
    # The product of a turned query and a turned key depends on the difference of their positions alone.
    positions = jax.lax.iota(jnp.float32, x.shape[1])[None, :, None, None]
    angles = positions * rates[None, None, None]  # [1, T, 1, P]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    # Positions are float32: bfloat16 has no odd integers above 256, so neighbouring positions would become equal.
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=3)
    both = [a * cos - b * sin, a * sin + b * cos]
    return jnp.concatenate(both, axis=3).astype(x.dtype)
