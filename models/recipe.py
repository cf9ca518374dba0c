"""How a model is trained unless the user says otherwise."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv:1711.05101) with a clipped gradient and a learning rate that warms up, then falls along a cosine.

    `warmup` is a fraction of all steps; the last step's rate is near zero. Biases and scales are not decayed.

    >>> AdamW(learning_rate=1.0, warmup=0.5).learning_rates(4).round(3).tolist()
    [0.5, 1.0, 1.0, 0.5]
    """

    learning_rate: float
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    b2: float = 0.98

    def schedule(self, total_steps: int) -> optax.Schedule:
        """The learning rate as a function of the number of updates so far."""
        warmup_steps = min(max(1, round(self.warmup * total_steps)), total_steps)
        rise = optax.linear_schedule(self.learning_rate / warmup_steps, self.learning_rate, max(1, warmup_steps - 1))
        fall = optax.cosine_decay_schedule(self.learning_rate, max(1, total_steps - warmup_steps))
        return optax.join_schedules([rise, fall], [warmup_steps])

    def learning_rates(self, total_steps: int) -> np.ndarray:
        """The learning rate of each step, [total_steps] float32, for a log: reading it waits for no device."""
        return np.asarray(jax.vmap(self.schedule(total_steps))(jnp.arange(total_steps, dtype=jnp.float32)))

    def optimizer(self, total_steps: int, *, local: bool = False) -> optax.GradientTransformation:
        """Clipping by the global norm, then AdamW under the schedule; `local`: each value clipped by itself.

        Asynchronous pipelines have no norm of all gradients at one time.
        """
        clip = optax.clip(self.clip_norm) if local else optax.clip_by_global_norm(self.clip_norm)
        decayed = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
        return optax.chain(
            clip,
            optax.adamw(self.schedule(total_steps), b2=self.b2, weight_decay=self.weight_decay, mask=decayed),
        )
