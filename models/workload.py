"""A workload: everything that the command line needs to plan and train a model.

To add a model to jvpipe, write a module with `SIZES` and `workload`, and add its name to `NAMES`.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
import optax

from jvpipe.models.architecture import Supernet
from jvpipe.models.fields import with_fields
from jvpipe.models.recipe import Recipe
from jvpipe.util.extras import extra
from jvpipe.util.names import did_you_mean

Tree = Any
Config = TypeVar("Config")
Batch = dict[str, np.ndarray]

NAMES = (
    "bert",
    "gpt2",
    "llama",
    "qwen3",
    "gemma",
    "t5",
    "transformer",
    "gnmt",
    "xlnet",
    "resnet",
    "vgg",
    "unet",
    "amoebanet",
    "evolved-transformer",
    "evolved-amoebanet",
)
OF_FOLDERS = {
    **{name: name for name in ("bert", "gpt2", "t5", "llama", "qwen3", "gemma")},
    "gemma2": "gemma",
    "gemma3_text": "gemma",
}
"""The model that can load a folder of weights, by the `model_type` in the folder's config.json."""
_MODULES = {name: f"jvpipe.models.{name.replace('-', '_')}" for name in NAMES}


@runtime_checkable
class Batches(Iterator[Batch], Protocol):
    """An endless iterator over batches. Its state is a JSON object from which a run can resume."""

    def get_state(self) -> dict[str, Any]:
        """Returns the position, for `set_state`."""
        ...

    def set_state(self, state: dict[str, Any], /) -> None:
        """Continues at the position `state`."""
        ...


@dataclass(frozen=True)
class Data:
    """Data to train on and to evaluate.

    Attributes:
        train: endless batches to train on.
        example: a batch, or the shapes of a batch.
        held_out: a few batches that training never sees, the same for every seed.
        digest: a SHA-256 digest of the data, or of its first batch.
        baseline_loss: the held-out loss (in nats) of a predictor that knows only how often each
            token or class occurs in training; NaN if there is none.
    """

    train: Batches
    example: Tree
    held_out: Sequence[Tree]
    digest: str
    baseline_loss: float = math.nan


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model of some size with its loss, data and training recipe; it has all members of `Model`.

    Attributes:
        config: the configuration, whose fields distinguish models of the same name.
        init: maps a key to parameters, nested dicts of arrays.
        loss_fn: maps (parameters, batch, key) to a `jvpipe.Weighted`. If the key is None, there is
            no dropout.
        abstract_batch: maps a batch size to the shapes of a batch, so that a model can be planned
            without data.
        open_data: maps (path, run folder, seed, batch size) to the data. The path is a file or a
            folder; None for the default data. Files such as the tokenizer are stored in the run
            folder.
        optimizer: maps the total number of updates to a gradient transformation; with `local=True`,
            to a transformation that needs only one parameter at a time. If there is a recipe, this
            is the recipe's method.
        learning_rates: maps the total number of updates to the rate of each update.
        recipe: the training recipe, if the command line can change it; else None.
        batch_size: the default batch size.
        steps: the default number of steps.
        model_state: makes the initial model state, such as statistics of batch norms; None if the
            loss has no state. With a state, the loss maps (parameters, state, batch, key) to the
            loss and a new state.
        supernet: the space of architectures for a search, or None. If there is a space, `init` and
            `loss_fn` are those of its default architecture.
    """

    name: str
    size: str | None
    config: Any
    init: Callable[[jax.Array], Tree]
    loss_fn: Callable[..., Any]
    abstract_batch: Callable[[int], Tree]
    open_data: Callable[[Path | None, Path, int, int], Data]
    optimizer: Callable[..., optax.GradientTransformation]
    learning_rates: Callable[[int], np.ndarray]
    batch_size: int
    steps: int
    model_state: Callable[[], Tree] | None = None
    supernet: Supernet | None = None
    has_aux: bool = False
    recipe: Recipe | None = None

    @property
    def title(self) -> str:
        """The name, and the size if the model has sizes."""
        return f"{self.name} {self.size}" if self.size else self.name

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of the configuration that are texts, numbers or None, by name."""
        fields = dataclasses.fields(self.config) if dataclasses.is_dataclass(self.config) else ()
        values = {field.name: getattr(self.config, field.name) for field in fields}
        if not values:
            values = getattr(self.config, "__dict__", {})
        public = {name: value for name, value in values.items() if name[0] != "_"}
        plain = (str, int, float, NoneType)
        return {name: value for name, value in public.items() if isinstance(value, plain)}

    @property
    def has_state(self) -> bool:
        """Whether the loss takes and returns a model state."""
        return self.model_state is not None

    def initial_state(self) -> Tree:
        """Makes the model state before the first step; None if the loss has no state."""
        return None if self.model_state is None else self.model_state()

    def to_plan(self, batch_size: int | None = None) -> dict[str, Any]:
        """Returns arguments for `plan_for`, with this batch size or else the model's default."""
        return {
            "loss_fn": self.loss_fn,
            "params": self.init,
            "batch": self.abstract_batch(batch_size or self.batch_size),
            "optimizer": self.optimizer(self.steps),
            "model_state": self.initial_state(),
            "has_aux": self.has_aux,
            "has_state": self.has_state,
        }

    def batches(self, seed: int, batch_size: int) -> Batches:
        """Opens the training batches of the default data."""
        return self._default_data(seed, batch_size).train

    def held_out(self) -> Sequence[Tree]:
        """Opens the held-out batches of the default data, with the default batch size."""
        return self._default_data(0, self.batch_size).held_out

    def _default_data(self, seed: int, batch_size: int) -> Data:
        with TemporaryDirectory() as scratch:
            return self.open_data(None, Path(scratch), seed, batch_size)


def load(name: str, size: str | None = None, **options: Any) -> Workload:
    """Loads the workload called `name`.

    Args:
        name: one of `NAMES`.
        size: one of the model's sizes; None means `mini`.
        **options: values that replace fields of the size's configuration, e.g. `tokens=512`.

    Raises:
        ValueError: the model, the size or an option is unknown, or an option is out of range.

    >>> load("bert").size
    'mini'
    >>> load("bert", "large", dropout=0.0).config.blocks
    24
    >>> load("brt")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: unknown model 'brt': did you mean 'bert'? There are bert, gpt2, llama, ...
    """
    if name not in _MODULES:
        raise ValueError(did_you_mean("model", name, list(_MODULES)))
    return _module(name).workload(size, **options)


def sizes(name: str) -> list[str]:
    """Returns the names of a model's sizes, the smallest first."""
    return list(_module(name).SIZES)


def format_of(name: str) -> Any:
    """Returns the format of a model's published weights, a `jvpipe.models.weights.Format`."""
    return _module(name).FORMAT


def _module(name: str) -> Any:
    with extra("models"):
        return importlib.import_module(_MODULES[name])


def configured(
    model: str, sizes: Mapping[str, Config], size: str, options: Mapping[str, Any]
) -> Config:
    """Returns the configuration of a size, with fields replaced by `options`.

    Raises:
        ValueError: the size or an option is unknown.
    """
    if size not in sizes:
        raise ValueError(did_you_mean(f"size of {model}", size, list(sizes)))
    return with_fields(model, sizes[size], options)


def _trained(config: Any, init: Callable[[jax.Array], Tree]) -> str:
    """Returns a pattern of the parameters to train: adapters, or all if there are no adapters.

    Raises:
        ValueError: no layer matches the configuration's pattern `lora_on`.
    """
    if not getattr(config, "lora", 0):
        return "*"
    from jvpipe.models import lora  # needs an extra

    # Only the paths of the parameters are needed, so eval_shape, which computes nothing, suffices.
    lora.check_adapted(jax.eval_shape(init, jax.random.key(0)), config.lora_on)
    return lora.TRAINED


Init = Callable[[jax.Array], Tree]
Loss = Callable[..., Any]
State = Callable[[], Tree]


def sized(
    name: str,
    sizes: Mapping[str, Config],
    size: str | None,
    options: Mapping[str, Any],
    *,
    init: Callable[[Config], Init],
    loss_function: Callable[[Config], Loss],
    abstract_batch: Callable[[Config, int], Tree],
    open_data: Callable[[Config, Path | None, Path, int, int], Data],
    learning_rate: float,
    batch_size: int,
    mini_rate: float = 3e-3,
    model_state: Callable[[Config], State] | None = None,
    supernet: Callable[[Config], Supernet] | None = None,
    has_aux: bool = False,
) -> Workload:
    """Makes the workload of one of a model's sizes, with fields replaced by `options`.

    Each function argument takes the configuration as its first argument. The default size `mini`
    has a recipe that trains it within minutes, with the rate `mini_rate`. `learning_rate` and
    `batch_size` are for the other sizes.
    """
    size = size or "mini"
    config = configured(name, sizes, size, options)
    mini = size == "mini"
    rate = mini_rate if mini else learning_rate
    recipe = Recipe(rate, trained=_trained(config, init(config)))
    return Workload(
        name=name,
        size=size,
        config=config,
        init=init(config),
        loss_fn=loss_function(config),
        abstract_batch=partial(abstract_batch, config),
        open_data=partial(open_data, config),
        optimizer=recipe.optimizer,
        learning_rates=recipe.learning_rates,
        recipe=recipe,
        batch_size=32 if mini else batch_size,
        steps=800 if mini else 100_000,
        model_state=model_state(config) if model_state else None,
        supernet=supernet(config) if supernet else None,
        has_aux=has_aux,
    )
