"""The members of a model for the command line: a user's own model has the same ones as jvpipe's."""

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import jax

Tree = Any


@runtime_checkable
class Model(Protocol):
    """A model for `jvpipe train` and `jvpipe plan`.

    The command line names it by `--model file.py:name` or `package.module:name`. `name` is an
    object with the three methods below, or a class that makes one without arguments. The command
    line also uses these members if the object has them:

    | member | what | without it |
    |---|---|---|
    | `optimizer(steps)` | an optax transformation for so many updates | AdamW, warmup, cosine |
    | `learning_rates(steps)` | an array of each update's rate, for the log | the log has no rate |
    | `held_out()` | batches that are evaluated and never trained on | no evaluation |
    | `batch_size`, `steps` | how many examples a step takes, and how many steps | 32, 1000 |
    | `has_aux` | True: the loss returns `(loss, aux)` | False |
    | `has_state` | True: the loss is `(params, state, batch, rng) -> (loss, new state)` | False |
    | `initial_state()` | with `has_state`: the first state | |
    | `sizes` | models by name, or classes without arguments | there is no `--size` |

    The model's settings are the fields of a dataclass, or else the attributes of the object.
    Settings that are numbers or texts are saved in the run's folder, and a run resumes only with
    equal settings. For a dataclass, `--set NAME=VALUE` replaces a field, `--dtype` the field
    `dtype`, and `--sequence-length` the field `sequence_length` or `tokens`.

    The log has the tokens per second: the examples times positions of those leaves of a
    batch that hold integers, [examples, positions, ...], and are called `tokens`,
    `input_ids` or `inputs`. The log also has those members of `aux` that are single
    numbers.
    """

    def loss_fn(self, params: Tree, batch: Tree, rng: jax.Array, /) -> Any:
        """Computes the loss of a micro-batch, a scalar or a `jvpipe.Weighted`; `rng` is its own
        key.
        """
        ...

    def init(self, key: jax.Array, /) -> Tree:
        """Makes fresh parameters, a pytree of arrays.

        It is traced. Each leaf is then computed on the device that will hold it.
        """
        ...

    def batches(self, seed: int, batch_size: int, /) -> Iterable[Tree]:
        """Yields the batches to train on without end, the same ones for the same seed.

        A batch is a pytree of arrays whose first axis counts examples. The iterator of a Grain
        dataset (it has `get_state` and `set_state`) saves its position in checkpoints. Any other
        iterator starts from the beginning when a run is resumed, and the batches that the run has
        seen are skipped.
        """
        ...
