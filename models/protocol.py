"""The members that the command line expects of a model, whether it is a user's or jvpipe's own."""

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import jax

Tree = Any


@runtime_checkable
class Model(Protocol):
    """A model for `jvpipe train` and `jvpipe plan`.

    It is given as `--model file.py:name` or `--model package.module:name`. `name` is an object with
    the three methods below, or a class that makes such an object without arguments. The command
    line also uses the following members if the object has them:

    | member | what | without it |
    |---|---|---|
    | `optimizer(steps)` | an optax transformation for `steps` updates | AdamW, warmup, cosine |
    | `learning_rates(steps)` | an array of each update's rate, for the log | the log has no rate |
    | `held_out()` | batches that are evaluated and never trained on | no evaluation |
    | `batch_size`, `steps` | the number of examples in a step, and of steps | 32, 1000 |
    | `has_aux` | True: the loss returns `(loss, aux)` | False |
    | `has_state` | True: the loss is `(params, state, batch, rng) -> (loss, new state)` | False |
    | `initial_state()` | with `has_state`: the initial state | |
    | `sizes` | a dict from names to models, or to classes without arguments | no `--size` |

    The model's settings are its fields if it is a dataclass, or else the attributes of the object.
    Settings that are numbers or texts are saved in the run's folder, and a run resumes only with
    equal settings. For a dataclass, `--set NAME=VALUE` replaces a field, `--dtype` the field
    `dtype`, and `--sequence-length` the field `sequence_length` or `tokens`.

    The log shows tokens per second if a batch has leaves of integers, [examples, positions, ...],
    that are called `tokens`, `input_ids` or `inputs`. The number of tokens of a leaf is its number
    of examples times its positions. The log also shows all members of `aux` that are single
    numbers.
    """

    def loss_fn(self, params: Tree, batch: Tree, rng: jax.Array, /) -> Any:
        """Computes the loss of a micro-batch, a scalar or a `jvpipe.Weighted`.

        Each micro-batch has a different key `rng`.
        """
        ...

    def init(self, key: jax.Array, /) -> Tree:
        """Makes fresh parameters, a pytree of arrays.

        jvpipe traces this method. Each leaf is then computed on the device that will hold it.
        """
        ...

    def batches(self, seed: int, batch_size: int, /) -> Iterable[Tree]:
        """Yields the batches to train on, without end; equal seeds give equal batches.

        A batch is a pytree of arrays whose first axis counts examples. If the iterator has
        `get_state` and `set_state`, as that of a Grain dataset does, checkpoints store its
        position. Any other iterator starts from the beginning when a run is resumed, and the
        batches that the run has used are skipped.
        """
        ...
