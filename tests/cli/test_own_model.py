"""A user's model is completed with defaults, and what it lacks is named with what it should be."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from jvpipe.cli.own_model import completed
from tests.own import Full, Plain, full


def test_defaults_stand_for_what_a_model_lacks() -> None:
    model = completed("own.py:Plain", "Plain", Plain, None)
    assert (model.title, model.batch_size, model.steps, model.has_aux, model.has_state) == (
        "Plain",
        32,
        1000,
        False,
        False,
    )
    assert model.learning_rates(10).max() == pytest.approx(1e-3)
    assert model.optimizer(10, local=True).init({"w": np.ones(2)})
    shapes = model.abstract_batch(6)
    assert jax.tree.map(lambda x: x.shape, shapes) == {"x": (6, 4), "y": (6, 4)}


def test_what_a_model_has_is_used() -> None:
    model = completed("own.py:full", "full", full, "deep", {"dtype": "bfloat16"})
    assert (model.title, model.batch_size, model.steps, model.has_aux) == ("full deep", 8, 3, True)
    assert model.settings == {"blocks": 5, "dtype": "bfloat16"}
    assert model.initial_state().shape == (4,)
    assert all(map(math.isnan, model.learning_rates(2)))
    members = {
        "optimizer": lambda self, steps: None,
        "learning_rates": lambda self, steps: jax.numpy.arange(steps, dtype="bfloat16"),
    }
    told = completed("own.py:mine", "mine", without("", **members), None)
    assert told.learning_rates(3).tolist() == [0, 1, 2]
    assert completed("own.py:full", "full", full, "plain").config == Plain()


def without(name: str, **members: Any) -> Any:
    """A model that lacks a member, and has others."""
    kept = {
        k: v for k, v in vars(Plain).items() if k in ("init", "loss_fn", "batches") and k != name
    }
    return type("Mine", (), kept | members)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (
            without("loss_fn"),
            r"is not a model \(Mine\): it has no loss_fn, which should be a function of \(params, batch",
        ),
        (without("init"), "it has no init, which should be a function of a key"),
        (
            without("batches"),
            r"it has no batches, which should be a function of \(seed, batch_size\)",
        ),
        (without("", init=3), "its init is 3, which should be"),
        (
            without("", loss_fn=lambda self, params: 0.0),
            r"is called with \(params, batch, rng\), has_state=False: too",
        ),
        (
            without("", has_state=True, initial_state=len),
            r"called with \(params, model_state, batch, rng\)",
        ),
        (without("", has_state=True), r"has_state needs initial_state\(\)"),
        (
            without("", batches=lambda self, seed: []),
            r"batches\(seed\) must accept the call batches\(seed, batch_size\): too",
        ),
        (
            without("", optimizer=lambda self: None),
            r"optimizer\(\) must accept the call optimizer\(steps\)",
        ),
        (
            without("", learning_rates=lambda self, steps: np.ones(steps)),
            "Mine has learning_rates, but not the optimizer that has these rates: add optimizer",
        ),
        (without("", held_out=[]), r"held_out\(\) should be a function"),
        (without("", has_aux=1), "has_aux must be True or False, not 1"),
        (without("", steps=0), "steps must be a whole number of at least 1, not 0"),
        (
            without("", __init__=lambda self, blocks: None),
            "the class Mine cannot be called without arguments",
        ),
        (lambda: None, r"is not a model \(function\): it has no loss_fn"),
    ],
)
def test_what_is_no_model_is_told_why(found: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        completed("own.py:mine", "mine", found, None)
    assert str(refused.value).startswith("--model own.py:mine")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "rates",
    [[0.1], 0.1, [], np.ones((2, 2)), len, ["a", "b"], [0.1, math.nan], [[0.1], [0.1, 0.2]]],
)
def test_learning_rates_that_are_not_a_number_for_each_update_are_told(rates: Any) -> None:
    members = {"optimizer": lambda self, steps: None, "learning_rates": lambda self, steps: rates}
    model = completed("own.py:mine", "mine", without("", **members), None)
    told = r"^--model own\.py:mine: learning_rates\(2\) must return 2 finite numbers, the rate of"
    with pytest.raises(ValueError, match=told) as refused:
        model.learning_rates(2)
    assert "\n" not in str(refused.value)


def test_sizes_and_fields_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="unknown size of full 'dep': did you mean 'deep'"):
        completed("own.py:full", "full", full, "dep")
    with pytest.raises(ValueError, match="it has no sizes, so leave out --size deep"):
        completed("own.py:Full", "Full", Full, "deep")
    with pytest.raises(ValueError, match=r"sizes must be a dict from names to models, not \['deep"):
        completed("own.py:mine", "mine", without("", sizes=["deep"]), "deep")
    with pytest.raises(ValueError, match=r"--model own\.py:Plain: unknown option of Plain 'dtype'"):
        completed("own.py:Plain", "Plain", Plain, None, {"dtype": "bfloat16"})
    with pytest.raises(
        ValueError,
        match="blocks=3 needs a model that is a dataclass, but Mine is not: make it a dataclass",
    ):
        completed("own.py:mine", "mine", without(""), None, {"blocks": "3"})
