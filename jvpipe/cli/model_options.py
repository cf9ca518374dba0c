"""What options change of a model: the fields of its configuration, and how it is trained."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jvpipe import models
from jvpipe.cli.plan_options import Options as PlanOptions
from jvpipe.cli.train_options import Options
from jvpipe.ir.names import did_you_mean
from jvpipe.models.recipe import OPTIMIZERS, Recipe

_RATE = 1e-3
"""Of a model with an optimizer of its own, if another is named."""


def fields_of(options: Options | PlanOptions) -> dict[str, Any]:
    """The fields of the model that options tell, by name.

    Raises:
        ValueError: one is not told as NAME=VALUE.

    >>> fields_of(Options(set=("blocks=12", "dropout=0"), sequence_length=64))
    {'blocks': '12', 'dropout': '0', 'sequence_length': 64}
    """
    given = {
        name: getattr(options, name, None)
        for name in ("dtype", "sequence_length", "lora", "lora_on")
    }
    return _assigned(options.set) | {
        name: value for name, value in given.items() if value is not None
    }


def _assigned(told: Sequence[str]) -> dict[str, str]:
    for each in told:
        if not each.partition("=")[1]:
            raise ValueError(f"--set {each}: give a field of the model and its value, NAME=VALUE")
    return {each.partition("=")[0].strip(): each.partition("=")[2].strip() for each in told}


def retrained(workload: models.Workload, options: Options, updates: int) -> models.Workload:
    """The model under the optimizer, the rate and the warm-up that were asked for.

    Args:
        workload: as it would be trained.
        options: of the command line.
        updates: of the whole run.

    Raises:
        ValueError: there is no such optimizer, or the model has one of its own.
    """
    assert options.steps is not None
    rates = {"--learning-rate": options.learning_rate, "--warmup": options.warmup}
    given = [f"{flag} {value:g}" for flag, value in rates.items() if value is not None]
    if options.optimizer is None and not given:
        return workload
    if options.optimizer is not None and options.optimizer not in OPTIMIZERS:
        raise ValueError(did_you_mean("optimizer", options.optimizer, list(OPTIMIZERS)))
    if workload.recipe is None and options.optimizer is None:
        raise ValueError(
            f"{given[0]}: {workload.name} has an optimizer of its own, change it there; or name another by --optimizer"
        )
    recipe = workload.recipe or Recipe(_RATE)
    recipe = replace(
        recipe,
        optimizer_name=options.optimizer or recipe.optimizer_name,
        learning_rate=recipe.learning_rate
        if options.learning_rate is None
        else options.learning_rate,
        warmup_steps=None if options.warmup is None else options.warmup * updates // options.steps,
    )
    return replace(
        workload, recipe=recipe, optimizer=recipe.optimizer, learning_rates=recipe.learning_rates
    )
