"""Every model of the zoo with half of its parameters frozen: what is trained has the bits that it
had.
"""

from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest

import jvpipe
from tests.end_to_end.test_exactness import batch_of, key_of
from tests.zoo import CASES

MICRO = 4


def trained(name: str, labels: Any, **options: Any) -> tuple[jvpipe.Pipeline, list[Any]]:
    """A pipeline, and what two steps make of losses, parameters and model state."""
    m = CASES[name]()
    rules: dict[Any, Any] = {"frozen": optax.set_to_zero(), "trained": optax.adamw(1e-2)}
    kinds = {"has_aux": m.has_aux, "has_state": m.has_state}
    optimizer = optax.multi_transform(rules, labels)
    pipe = jvpipe.Pipeline(
        m.loss_fn, optimizer, microbatches=MICRO, planner="even", **kinds, **options
    )
    state, made = pipe.init(m.params, batch_of(m, MICRO), key_of(m), m.state), []
    for _ in range(2):
        state, metrics = pipe.step(state, batch_of(m, MICRO))
        made.append(np.asarray(metrics["loss"]))
    return pipe, [*made, *jax.tree.leaves((pipe.params(state), pipe.model_state(state)))]


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_what_is_trained_has_the_bits_that_it_had(name: str) -> None:
    tree = jax.tree.structure(CASES[name]().params)
    for first in ("frozen", "trained"):
        other = {"frozen": "trained", "trained": "frozen"}[first]
        labels = tree.unflatten([other if i % 2 else first for i in range(tree.num_leaves)])
        for options in ({"stages": 1}, {"stages": 2, "schedule": "zb-h1"}):
            with mock.patch("jvpipe.programs.stacked_trace.without_frozen", lambda x, *_: x):
                _, expected = trained(name, labels, **options)
            pipe, found = trained(name, labels, **options)
            assert any(parameter.frozen for parameter in pipe.session.graph.parameters)
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
            told = [peak.bytes for peak in pipe.session.peaks if peak]
            assert told == list(pipe.ledger.peak_bytes.values())
