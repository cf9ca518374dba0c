"""TrainOptions change fields of the model and its recipe, and say what there is where they
cannot.
"""

import math

import numpy as np
import pytest

from jvpipe.cli.command_options import TrainOptions, fields_of
from jvpipe.cli.own_model import find_model
from jvpipe.cli.run_model import retrained
from tests.cli.test_found_model import OWN


def test_fields_of_jvpipe_s_models_and_of_one_s_own_are_replaced() -> None:
    options = TrainOptions(set=("blocks=3", "dropout=0.5"), sequence_length=32)
    config = find_model("bert", "tiny", fields_of(options)).config
    assert (config.blocks, config.dropout, config.tokens) == (3, 0.5, 32)
    assert find_model(f"{OWN}:Plain", None, {"blocks": "7"}).config.blocks == 7


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        ("bert", TrainOptions(set=("layer=3",)), "unknown option of bert 'layer'"),
        ("bert", TrainOptions(set=("block=3",)), "did you mean 'blocks'"),
        (
            "bert",
            TrainOptions(set=("blocks=many",)),
            "blocks of bert is 2: give a whole number, not 'many'",
        ),
        (
            "bert",
            TrainOptions(set=("blocks",)),
            "--set blocks: give a field of the model and its value, NAME=VALUE",
        ),
        (
            "amoebanet",
            TrainOptions(sequence_length=8),
            "unknown option of amoebanet 'sequence_length'",
        ),
        (
            f"{OWN}:Plain",
            TrainOptions(set=("block=3",)),
            r"own\.py:Plain: unknown option of Plain 'block': did you mean",
        ),
    ],
)
def test_what_cannot_be_replaced_is_named(model: str, options: TrainOptions, told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        find_model(model, "tiny" if "/" not in model else None, fields_of(options))
    assert "\n" not in str(refused.value)


def test_the_recipe_follows_the_options() -> None:
    bert, steps = find_model("bert", "tiny"), 100
    options = TrainOptions(steps=steps, learning_rate=0.5, warmup=10)
    rates = retrained(bert, options, int).learning_rates(steps)
    assert rates.argmax() in (9, 10)
    assert rates.max() == pytest.approx(0.5)
    # A schedule with two updates per step.
    twice = retrained(bert, options, lambda step: 2 * step).learning_rates(2 * steps)
    assert twice.argmax() in (19, 20)
    assert retrained(bert, TrainOptions(steps=steps), int) is bert
    np.testing.assert_array_equal(
        retrained(bert, TrainOptions(steps=steps, optimizer="lion"), int).learning_rates(9),
        bert.learning_rates(9),
    )


def test_an_optimizer_of_one_s_own_is_left_alone_or_replaced_whole() -> None:
    own = find_model(f"{OWN}:full")
    with pytest.raises(ValueError, match=r"--learning-rate 0\.1: full has an optimizer of its own"):
        retrained(own, TrainOptions(steps=3, learning_rate=0.1), int)
    assert math.isnan(own.learning_rates(3)[0])
    replaced = retrained(own, TrainOptions(steps=3, learning_rate=0.1, optimizer="sgd"), int)
    assert replaced.learning_rates(3).max() == pytest.approx(0.1)


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(ValueError, match="unknown optimizer 'adamx': did you mean 'adam"):
        TrainOptions(optimizer="adamx").check()
