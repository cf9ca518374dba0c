"""A replay follows the versions that it is told, against plain JAX."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

import jvpipe
from jvpipe.ir.kinds import Kind
from jvpipe.ir.use import Use, synchronous_uses
from jvpipe.runtime.state.one_device import Replay
from tests.session.tiny import BATCH, HERE, MICRO, PARAMS, begun, loss_fn

MICRO_BATCHES = [{"x": BATCH["x"][2 * m : 2 * m + 2]} for m in range(MICRO)]


def gradients(params: Sequence[Any], m: int) -> list[np.ndarray]:
    return [np.asarray(g) for g in jax.grad(loss_fn)(params, MICRO_BATCHES[m], None)]


def replayed(schedule: str, uses: Sequence[Sequence[Use]]) -> tuple[list[Any], list[float]]:
    compiled = begun(HERE, schedule=schedule)[0].session.compiled
    run = Replay(compiled, PARAMS, {}, [])
    losses = [
        run.microbatch(compiled, uses[m], [MICRO_BATCHES[m]["x"]], None) for m in range(MICRO)
    ]
    return run.parameters, losses


def assert_close(a: Sequence[Any], b: Sequence[Any]) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_synchronous_step_is_one_update_by_the_mean_gradient() -> None:
    uses = synchronous_uses(3, MICRO)
    parameters, losses = replayed(
        "1f1b", [[use for use in uses if use.microbatch == m] for m in range(MICRO)]
    )
    mean = [
        np.mean(each, axis=0)
        for each in zip(*(gradients(PARAMS, m) for m in range(MICRO)), strict=True)
    ]
    assert_close(parameters, [w - 0.5 * g for w, g in zip(PARAMS, mean, strict=True)])
    assert_close(losses, [loss_fn(PARAMS, batch, None) for batch in MICRO_BATCHES])


@pytest.mark.parametrize("read", [0, 1])
def test_a_micro_batch_reads_the_version_that_it_is_told(read: int) -> None:
    """The second one reads the first weights or those of the first update."""

    def uses(m: int, version: int) -> list[Use]:
        reads = [Use(kind, layer, m, version) for layer in range(3) for kind in (Kind.F, Kind.B)]
        return [*reads, *(Use(Kind.U, layer, m, m + 1) for layer in range(3))]

    parameters, losses = replayed("pipedream", [uses(0, 0), uses(1, read)])
    once = [w - 0.5 * g for w, g in zip(PARAMS, gradients(PARAMS, 0), strict=True)]
    seen = once if read else PARAMS
    assert_close(parameters, [w - 0.5 * g for w, g in zip(once, gradients(seen, 1), strict=True)])
    assert_close(losses[1:], [loss_fn(seen, MICRO_BATCHES[1], None)])


def test_a_backward_may_read_other_weights_than_its_forward() -> None:
    """By hand: what the forward left is of the first weights, cotangents pass the newest."""
    uses = [
        [
            Use(kind, layer, 0, v)
            for kind, v in ((Kind.F, 0), (Kind.B, 0), (Kind.U, 1))
            for layer in range(3)
        ],
        [
            Use(kind, layer, 1, v)
            for kind, v in ((Kind.F, 0), (Kind.B, 1), (Kind.U, 2))
            for layer in range(3)
        ],
    ]
    parameters, _ = replayed("pipedream", uses)
    once = [w - 0.5 * g for w, g in zip(PARAMS, gradients(PARAMS, 0), strict=True)]
    made = [MICRO_BATCHES[1]["x"]]
    for w in PARAMS:
        made.append(np.tanh(made[-1] @ w))
    cotangent, expected = 2 * made[-1] / made[-1].size, []
    for i in reversed(range(3)):
        cotangent = cotangent * (1 - made[i + 1] ** 2)
        expected.append(once[i] - 0.5 * made[i].T @ cotangent)
        cotangent = cotangent @ once[i].T
    assert_close(parameters, expected[::-1])


def test_a_micro_batch_in_flight_has_a_loss_and_no_update() -> None:
    uses = [[Use(Kind.F, layer, m, 0) for layer in range(3)] for m in range(MICRO)]
    parameters, losses = replayed("pipedream", uses)
    assert_close(parameters, PARAMS)
    assert_close(losses, [loss_fn(PARAMS, batch, None) for batch in MICRO_BATCHES])


def test_what_the_run_did_not_have_is_refused() -> None:
    """A replay of fewer batches would give the parameters of an earlier step."""
    pipe, state = begun(HERE, schedule="pipedream")
    for _ in pipe.run(state, [BATCH] * 3):
        pass
    given: dict[str, Any] = {
        "ledger": pipe.ledger,
        "pipe": pipe,
        "params": PARAMS,
        "batches": [BATCH] * 3,
        "rng": None,
    }
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ledger": None}, "ledger must be the ledger of a run"),
        ({"pipe": pipe.session}, "pipe must be the jvpipe.Pipeline of the run"),
        ({"params": PARAMS[:2]}, "params: '2' is missing"),
        ({"batches": [BATCH] * 2}, "the run had 3 batches, and the replay got 2: give all of them"),
        ({"batches": BATCH}, "batches must be a list of all batches of the run"),
        ({"batches": 3}, "batches must be a list of all batches of the run"),
        ({"batches": ["x"] * 3}, "not an array"),
        ({"rng": jax.random.key(0)}, "the run had no key, and the replay got one"),
        ({"model_state": {"mean": 0.0}}, "model_state is {'mean': 0.0}, that of the run was None"),
    ]
    for changed, told in wrong:
        with pytest.raises(ValueError, match=told):
            jvpipe.replay(**given | changed)
    one_step, state = begun(HERE, schedule="1f1b")
    one_step.step(state, BATCH)
    synchronous: dict[str, Any] = {"ledger": one_step.ledger, "pipe": one_step}
    with pytest.raises(ValueError, match="synchronous schedule '1f1b'"):
        jvpipe.replay(**given | synchronous)
    more: dict[str, Any] = {"batches": itertools.repeat(BATCH)}
    assert len(jvpipe.replay(**given | more)[1]) == 3 * MICRO
