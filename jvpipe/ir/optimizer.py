"""The protocol of an optimizer.

Type annotations use this protocol instead of optax's own type, because importing optax is slow.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Optimizer(Protocol):
    """Any `optax.GradientTransformation`.

    >>> import optax
    >>> isinstance(optax.sgd(0.1), Optimizer)
    True
    """

    @property
    def init(self) -> Callable[..., Any]:
        """The function from parameters to the first state."""
        ...

    @property
    def update(self) -> Callable[..., Any]:
        """The function from gradients, a state and parameters to updates and the next state."""
        ...
