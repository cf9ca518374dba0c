"""Rotary positions (arXiv:2104.09864): pairs of numbers in queries and keys rotate by position.

The product of a rotated query and a rotated key depends only on the distance between their
positions, and not on the positions themselves.

Axes: B batch, T tokens, H heads, K width of a head, P = K / 2 pairs of numbers.
"""

from dataclasses import dataclass
from math import pi

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Heads = Float[Array, "B T H K"]


@dataclass(frozen=True)
class Rotation:
    """The angles by which pairs rotate per position. They range from 1 down to about 1 / `theta`.

    A text that is longer than those in training would reach angles that training never saw.
    `stretch` divides angles to prevent this:

    - Without `original`, it divides all angles (linear interpolation, arXiv:2306.15595).
    - With `original`, the length of texts in training, Llama 3.1's rule applies (arXiv:2407.21783).
      The angle of a pair that makes fewer than `low` turns in that length is divided. The angle of
      a pair that makes more than `high` turns stays. In between, the rule interpolates.

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
        """Returns the angle per position of each pair of a head of `width` numbers."""
        steps = jax.lax.iota(jnp.float32, width // 2)
        # Pair i turns by theta^(-2 i / K) (arXiv:2104.09864, equation 15).
        power = -2 / width * jnp.log(self.theta)
        rates = jnp.exp(steps * power)
        if self.stretch == 1:
            return rates
        if not self.original:
            return rates / self.stretch
        # Fast pairs keep their rates, because they distinguish neighbors. Slow pairs never made a
        # full turn in training.
        turns = rates * (self.original / (2 * pi))
        kept = jnp.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return kept * rates + (1 - kept) * rates / self.stretch


def turned(x: Heads, rates: Float[Array, "P"]) -> Heads:
    """Rotates each pair of numbers by its position times its rate.

    Numbers i and i + K / 2 of a head are a pair, as in Hugging Face's weights. In the paper,
    numbers 2 i and 2 i + 1 are a pair.

    Args:
        x: queries or keys.
        rates: the angle per position of each pair, from `Rotation.rates`.
    """
    # Positions are float32, because bfloat16 has no odd integers above 256: neighbors would
    # coincide.
    positions = jax.lax.iota(jnp.float32, x.shape[1])[None, :, None, None]
    angles = positions * rates[None, None, None]  # [1, T, 1, P]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=3)
    first = a * cos - b * sin
    second = a * sin + b * cos
    return jnp.concatenate([first, second], axis=3).astype(x.dtype)
