"""A training recipe: the optimizer, gradient clipping and learning rates.

To add an optimizer, add it to the table `OPTIMIZERS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

_Decayed = Callable[[Any], Any]
_Made = Callable[["Recipe", optax.Schedule, _Decayed], optax.GradientTransformation]

OPTIMIZERS: Mapping[str, _Made] = {
    "adamw": lambda it, rate, decayed: optax.adamw(
        rate, b2=it.b2, weight_decay=it.weight_decay, mask=decayed
    ),
    "adam": lambda it, rate, _: optax.adam(rate, b2=it.b2),
    "adafactor": lambda it, rate, _: optax.adafactor(
        rate, multiply_by_parameter_scale=False, clipping_threshold=None
    ),
    "lamb": lambda it, rate, decayed: optax.lamb(rate, weight_decay=it.weight_decay, mask=decayed),
    "lion": lambda it, rate, decayed: optax.lion(rate, weight_decay=it.weight_decay, mask=decayed),
    "nadamw": lambda it, rate, decayed: optax.nadamw(
        rate, b2=it.b2, weight_decay=it.weight_decay, mask=decayed
    ),
    "rmsprop": lambda it, rate, _: optax.rmsprop(rate),
    "sgd": lambda it, rate, _: optax.sgd(rate),
    "momentum": lambda it, rate, _: optax.sgd(rate, momentum=0.9, nesterov=True),
}
"""Optimizers by name, as functions of a recipe, the learning rate and the mask of weight decay.

All options that the table does not name have optax's default values.

| name | optax | decay | learning rate, compared with AdamW's |
|---|---|---|---|
| `adamw`, `nadamw` | `adamw`, `nadamw` with the recipe's b2 | yes | the same |
| `adam` | `adam` with the recipe's b2 | no | the same |
| `adafactor` | `adafactor` with only the recipe's clipping and rate | no | the same |
| `lamb` | `lamb` | yes | larger |
| `lion` | `lion` | yes | a third to a tenth |
| `rmsprop` | `rmsprop` | no | the same |
| `sgd`, `momentum` | `sgd`, without and with Nesterov's momentum of 0.9 | no | much larger |
"""


@dataclass(frozen=True)
class Recipe:
    """An optimizer with clipped gradients, and a learning rate with warmup and cosine decay.

    Attributes:
        learning_rate: the peak rate, which the warmup reaches at its end. The last step's rate is
            near zero.
        warmup: the fraction of all steps that belong to the warmup.
        weight_decay: the weight decay of parameters with two axes or more. Biases and scales do not
            decay, even if those of several blocks are stacked.
        clip_norm: gradients of a larger global norm are scaled down to this norm.
        b2: Adam's decay rate of second moments.
        warmup_steps: the number of warmup steps; overrides `warmup`.
        optimizer_name: a key of `OPTIMIZERS`; AdamW is arXiv:1711.05101.
        trained: a pattern. Parameters whose path does not match the pattern stay unchanged.

    >>> Recipe(learning_rate=1.0, warmup=0.5).learning_rates(4).round(3).tolist()
    [0.5, 1.0, 1.0, 0.5]
    >>> Recipe(learning_rate=1.0, warmup_steps=1).learning_rates(4).round(3).tolist()
    [1.0, 1.0, 0.75, 0.25]
    """

    learning_rate: float
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    b2: float = 0.98
    warmup_steps: int | None = None
    optimizer_name: str = "adamw"
    trained: str = "*"

    def schedule(self, total_steps: int) -> optax.Schedule:
        """Returns a function from the number of updates so far to the learning rate."""
        updates = self.warmup_steps
        if updates is None:
            updates = round(self.warmup * total_steps)
        warmup_steps = min(max(1, updates), total_steps)
        # The first update of the warmup has the rate peak / warmup_steps, the last one has the
        # peak.
        peak = self.learning_rate
        rise = optax.linear_schedule(peak / warmup_steps, peak, max(1, warmup_steps - 1))
        fall = optax.cosine_decay_schedule(peak, max(1, total_steps - warmup_steps))
        return optax.join_schedules([rise, fall], [warmup_steps])

    def learning_rates(self, total_steps: int) -> np.ndarray:
        """Returns the learning rate of each step, [total_steps] float32, for the log.

        The rates are on the host, so that reading them does not wait for a device.
        """
        steps = jnp.arange(total_steps, dtype=jnp.float32)
        return np.asarray(jax.vmap(self.schedule(total_steps))(steps))

    def optimizer(self, total_steps: int, *, local: bool = False) -> optax.GradientTransformation:
        """Makes the optimizer: clipping by the global norm, then the optimizer's update.

        With `local`, each element of a gradient is clipped separately. Asynchronous pipelines need
        this, because they never have all gradients at once.
        """
        clip = optax.clip(self.clip_norm) if local else optax.clip_by_global_norm(self.clip_norm)
        make = OPTIMIZERS[self.optimizer_name]
        update = optax.chain(clip, make(self, self.schedule(total_steps), _decayed))
        if self.trained == "*":
            return update
        return optax.multi_transform({True: update, False: optax.set_to_zero()}, self._labels)

    def _labels(self, params: Any) -> Any:
        """Labels each parameter by whether it is trained."""

        def is_trained(path: Any, _: Any) -> bool:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return fnmatchcase(name, self.trained)

        return jax.tree_util.tree_map_with_path(is_trained, params)


def _decayed(params: Any) -> Any:
    """Tells for each parameter whether it decays."""

    def decays(path: Any, p: Any) -> bool:
        # Biases and scales are vectors, but a stack of them has two axes.
        is_vector = jax.tree_util.keystr(path[-1:], simple=True) in ("bias", "scale")
        return p.ndim > 1 and not is_vector

    return jax.tree_util.tree_map_with_path(decays, params)
