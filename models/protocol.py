"""What a model is to the command line: a user's own and those of jvpipe alike."""

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import jax

Tree = Any


@runtime_checkable
class Model(Protocol):
    """A model that `python -m jvpipe.train` and `jvpipe.plan` take as `--model file.py:name` or `package.module:name`.

    An object with these three members, or a class of such objects that is made without arguments. What else it has of
    the following is used:

    | member | what | without it |
    |---|---|---|
    | `optimizer(steps)` | an optax transformation for so many updates | AdamW, warmed up, then along a cosine |
    | `learning_rates(steps)` | the rate of each update, an array, for the log | the log has none |
    | `held_out()` | a few batches that training never sees, evaluated at the end and with `--eval-every` | nothing is |
    | `batch_size`, `steps` | how many examples a step takes, and how many steps | 32, 1000 |
    | `has_aux` | True: the loss returns `(loss, aux)` | False |
    | `has_state` | True: the loss is `(params, state, batch, rng) -> (loss, new state)` | False |
    | `initial_state()` | with `has_state`: the first state | |
    | `sizes` | models by name, for `--size`; or classes of them, made without arguments | there is no `--size` |

    The fields of a dataclass, or else the attributes of the object, that are numbers and texts are kept in the run's
    folder: a run does not go on with others. Fields of a dataclass are replaced by `--set NAME=VALUE`, `dtype` by
    `--dtype`, `sequence_length` (or `tokens`) by `--sequence-length`. Leaves of batches that are called `tokens`,
    `input_ids` or `inputs` and hold integers, [examples, positions, ...], are counted for the tokens per second of the
    log; what the loss returns beside itself (`has_aux`) is logged as far as it is single numbers.
    """

    def loss_fn(self, params: Tree, batch: Tree, rng: jax.Array, /) -> Any:
        """The loss of a micro-batch, a scalar or a `jvpipe.Weighted`; each micro-batch has a key of its own."""
        ...

    def init(self, key: jax.Array, /) -> Tree:
        """Fresh parameters, a pytree of arrays; it is traced, and run leaf by leaf where the leaves are to lie."""
        ...

    def batches(self, seed: int, batch_size: int, /) -> Iterable[Tree]:
        """The batches to train on, without end, the same for the same seed: pytrees of arrays, examples first.

        The iterator of a Grain dataset keeps its place in checkpoints (it has `get_state` and `set_state`); any other
        begins again when a run is resumed, and what the run has seen is passed over.
        """
        ...
