"""What an optimizer is to jvpipe; optax itself, which takes long to import, is left to whoever makes one."""

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
        """Maps parameters to a first state."""
        ...

    @property
    def update(self) -> Callable[..., Any]:
        """Maps gradients, a state and parameters to updates and the next state."""
        ...
