"""An optimizer as straight lines: no branches, names of transformations, types that settle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvpipe.programs.optimizer_trace import TracedOptimizer, trace_optimizer, transformation
from jvpipe.programs.straight_line import straight_line
from jvpipe.trace.jaxprs import evaluate_jaxpr

SHAPE = jax.ShapeDtypeStruct((3,), np.float32)


def traced(update: Any) -> TracedOptimizer:
    """An optimizer with a state of one number."""
    optimizer = optax.GradientTransformation(lambda params: jnp.ones(1), update)
    return trace_optimizer(optimizer, [SHAPE], [1], 1, grad_norm=False)


def test_both_branches_run_and_one_is_picked() -> None:
    def fn(x: Any) -> Any:
        return jax.lax.cond(x.sum() > 0, lambda v: v * 2, lambda v: v - 1, x)

    line = straight_line(fn, SHAPE)
    assert not {"cond", "pjit", "jit"} & {eqn.primitive.name for eqn in line.jaxpr.eqns}
    for x in (np.ones(3, np.float32), -np.ones(3, np.float32)):
        (got,) = evaluate_jaxpr(line, [jnp.asarray(x)])
        np.testing.assert_array_equal(got, fn(jnp.asarray(x)))


def test_equations_know_the_transformation_that_they_come_from() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9))
    found = trace_optimizer(optimizer, [SHAPE, SHAPE], [1, 1], 2, grad_norm=False)
    assert {"clip_by_global_norm", "trace"} <= {
        transformation(eqn) for eqn in found.update.jaxpr.eqns
    }


def test_gradients_are_summed_in_the_order_of_their_readers_and_divided_once() -> None:
    found = trace_optimizer(optax.sgd(1.0), [SHAPE], [3], 4, grad_norm=True)
    sums = [np.full(3, x, np.float32) for x in (1e8, 1.0, -1e8)]
    params, norm = evaluate_jaxpr(found.update, [*sums, np.zeros(3, np.float32)])
    mean = np.float32(np.float32(np.float32(1e8 + 1.0) - np.float32(1e8)) / np.float32(4))
    np.testing.assert_array_equal(params, np.full(3, -mean))
    np.testing.assert_allclose(norm, np.sqrt(3) * mean)


def test_a_weight_is_an_input_where_micro_batches_are_not_counted() -> None:
    found = trace_optimizer(optax.sgd(1.0), [SHAPE], [1], None, grad_norm=False)
    assert [aval.shape for aval in found.update.in_avals] == [(3,), (), (3,)]
    (params,) = evaluate_jaxpr(
        found.update, [np.full(3, 6, np.float32), np.float32(2), np.zeros(3, np.float32)]
    )
    np.testing.assert_array_equal(params, np.full(3, -3.0))


def test_state_that_begins_as_a_plain_number_has_the_type_of_an_update_from_the_start() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, state + jnp.float32(1)

    found = trace_optimizer(
        optax.GradientTransformation(lambda params: 0, update), [SHAPE], [1], 1, grad_norm=False
    )
    assert [(array.dtype, array.shape) for array in found.state] == [("float32", ())]
    assert [aval.dtype for aval in found.init.out_avals] == [np.float32]


def test_state_whose_shape_or_leaves_change_is_refused() -> None:
    def grown(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, jnp.concatenate([state, state])

    with pytest.raises(
        ValueError, match=r"changes the shape of its state '' from \(1,\) to \(2,\)"
    ):
        traced(grown)

    def more(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, (state, state)

    with pytest.raises(ValueError, match="has 1 arrays, but 2 after an update"):
        traced(more)


def test_an_optimizer_that_changes_a_parameter_s_shape_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"shape of parameter '0' from \(\) to \(1,\): give the parameter that shape",
    ):
        trace_optimizer(
            optax.scale_by_distance_over_gradients(), [np.float32(1)], [1], 1, grad_norm=False
        )


def test_an_optimizer_that_needs_more_than_gradients_is_refused_with_the_reason() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, value: Any) -> Any:
        return updates, state

    hungry = optax.GradientTransformationExtraArgs(lambda params: (), update)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="passes only gradients, state and parameters"):
        trace_optimizer(hungry, [SHAPE], [1], 1, grad_norm=False)


@pytest.mark.parametrize("result", ["text", 10**30])
def test_a_result_of_an_optimizer_is_an_array(result: Any) -> None:
    refused = r"result of the optimizer '%s' is .*(not an array|no device can hold)"
    begun = optax.GradientTransformation(lambda params: (result,), optax.identity().update)
    with pytest.raises(ValueError, match=refused % "0"):
        trace_optimizer(begun, [SHAPE], [1], 1, grad_norm=False)
    with pytest.raises(ValueError, match=refused % "1"):
        traced(lambda updates, state, params=None: (updates, result))
    with pytest.raises(ValueError, match=refused % "0/0"):
        traced(lambda updates, state, params=None: ([result], state))
