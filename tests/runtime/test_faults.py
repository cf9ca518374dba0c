"""A failure names its stage, task, micro-batch and step, two steps later at most; after a restore
it is forgotten.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.ir.rows import Row
from jvpipe.ir.values import NEVER, NONE
from jvpipe.runtime.engine.binding import Bound
from tests.grid import grid

D, MICRO = 4, 4
SHAPE = jax.ShapeDtypeStruct((), np.float32)
PARAMS = [
    {"w": 0.3 * np.eye(D, dtype=np.float32) + 0.1 * i, "b": np.zeros(D, np.float32)}
    for i in range(4)
]
armed: set[str] = set()  # what is to fail now that no batch can tell


def tripped(flag: np.ndarray) -> np.ndarray:
    if (
        np.asarray(flag) > 0
    ):  # a comparison of JAX's own would wait for a place among the programs that wait for this
        raise RuntimeError("no such luck")
    return np.zeros((), np.float32)


def guard(flag: jax.Array) -> jax.Array:
    """0; raises on the host if the flag of a micro-batch is set."""
    return jax.pure_callback(tripped, SHAPE, jax.lax.stop_gradient(flag))


@jax.custom_vjp
def guarded_back(x: jax.Array, flag: jax.Array) -> jax.Array:
    return x


def guarded_bwd(flag: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return g + guard(flag), jnp.zeros((), jnp.float32)


guarded_back.defvjp(lambda x, flag: (x, flag), guarded_bwd)


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    x, flags = batch["x"], batch["flags"].max(0)
    for i, p in enumerate(params):
        x = jnp.tanh(x @ p["w"] + p["b"][None])
        if i == 1:
            x = guarded_back(x, flags[1])
        if i == 2:
            x = x + guard(flags[0])
    return jnp.mean((x - batch["y"]) ** 2)


def guarded_updates() -> optax.GradientTransformation:
    def fail(x: np.ndarray) -> np.ndarray:
        if "update" in armed:
            raise RuntimeError("no such luck")
        return x

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(
            lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x), updates
        ), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def batch(step: int, *flags: tuple[int, int]) -> dict[str, np.ndarray]:
    """The batch of a step; flags are (micro-batch, whether its forward or its backward is to fail:
    0 or 1).
    """
    x = np.random.default_rng(step).normal(size=(2 * MICRO, D)).astype(np.float32)
    marked = np.zeros((2 * MICRO, 2), np.float32)
    for m, kind in flags:
        marked[2 * m, kind] = 1
    return {"x": x, "y": np.flip(x, 1).copy(), "flags": marked}


CASES = {
    "gpipe, recomputed, on one device": ("gpipe", 1, {"checkpoint": "always"}),
    "1f1b, swapped, on two devices": ("1f1b", 2, {"fates": {"*": "swap"}}),
    "pipedream, swapped, on two devices": ("pipedream", 2, {"fates": {"*": "swap"}}),
    "2bw, recomputed, on one device": ("2bw", 1, {"checkpoint": "always"}),
}


def pipeline(name: str) -> jvpipe.Pipeline:
    schedule, devices, options = CASES[name]
    optimizer = optax.chain(optax.sgd(0.1, momentum=0.9), guarded_updates())
    used = (jax.devices()[:devices] * 2)[:2]
    return jvpipe.Pipeline(
        loss_fn, optimizer, 2, MICRO, schedule, planner="even", devices=used, **options
    )


def advanced(pipe: jvpipe.Pipeline, state: jvpipe.State, batches: Iterable[Any]) -> jvpipe.State:
    for newest, _ in pipe.run(state, batches):
        state = newest
    return state


def bits(pipe: jvpipe.Pipeline, state: jvpipe.State) -> list[np.ndarray]:
    """What two more steps make of the parameters."""
    return jax.tree.leaves(pipe.params(advanced(pipe, state, [batch(1), batch(2)])))


def told(pipe: jvpipe.Pipeline, state: jvpipe.State, batches: Sequence[Any], late: int) -> str:
    """The error of a run whose first batch fails: it is told in that call or at most so many
    later.
    """
    with pytest.raises(jvpipe.StageError) as error:
        advanced(pipe, state, batches[: 1 + late])
    return str(error.value)


def coming(pipe: jvpipe.Pipeline, state: jvpipe.State) -> tuple[Callable[[Bound], None], Bound]:
    """The rows of the next step, and what replaces them."""
    compiled = pipe.session.compiled
    if compiled.schedule.synchronous:
        return (lambda bound: setattr(compiled, "bound_step", bound)), compiled.step
    n = min(state.stream_steps, len(compiled.stream.steps) - 1)
    step, bound = compiled.stream_step(n)
    return (lambda bound: compiled.bound_steps.update({n: (step, bound)})), bound


@contextmanager
def failing(
    pipe: jvpipe.Pipeline, state: jvpipe.State, kind: str, error: BaseException
) -> Iterator[Row]:
    """Has the last row of a kind fail at its dispatch in the next step."""
    replace, bound = coming(pipe, state)
    rows = list(bound.instructions)
    at = max(i for i, it in enumerate(rows) if it.row.kind == kind)

    def fail(*args: Any) -> Any:
        raise error

    rows[at] = rows[at]._replace(run=fail)
    replace(Bound(bound.lowered, tuple(rows)))
    try:
        yield rows[at].row
    finally:
        replace(bound)


@pytest.mark.parametrize("name", grid(CASES, *list(CASES)[1:3]))
def test_every_failure_is_named_and_forgotten_after_a_restore(name: str, tmp_path: Path) -> None:
    pipe = pipeline(name)
    state = advanced(pipe, pipe.init(PARAMS, batch(0), None), [batch(0)])
    pipe.save(tmp_path / "saved", state)
    expected = bits(pipe, state)

    def restored() -> jvpipe.State:
        return pipe.restore(tmp_path / "saved")

    def assert_goes_on(state: jvpipe.State) -> None:
        for ours, theirs in zip(bits(pipe, state), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)

    # Programs that fail on the host, after their dispatch or within it
    later, late = (
        [batch(2), batch(3)],
        1 if pipe.session.compiled.schedule.synchronous else 2,
    )  # a backward may come a step later
    for m in (0, MICRO - 1):
        for kind, (stage, layer) in enumerate([(1, 2), (0, 1)]):
            task = f"{stage}{'FB'[kind]}{m}"
            text = told(pipe, restored(), [batch(1, (m, kind)), *later], 1 if kind == 0 else late)
            assert text.startswith(
                f"step 1, micro-batch {m}: stage {stage}, task {task}[layer {layer}], device "
            )
            assert text.endswith("RuntimeError: no such luck")
        assert_goes_on(restored())
    state = restored()
    armed.add("update")
    text = told(pipe, state, [batch(1), *later], 1)
    armed.clear()
    assert re.match(
        r"step [01](, micro-batch \d)?: stage \d, task \dU\d?\[layer \d\], device \d failed", text
    )
    assert_goes_on(restored())
    # An evaluation leaves the state as it is
    state = restored()
    with pytest.raises(
        jvpipe.StageError,
        match=r"step 1, micro-batch 2: stage 1, task 1E2\[layer 2\].*no such luck",
    ):
        pipe.evaluate(state, batch(1, (2, 0)))
    assert_goes_on(state)
    # Every kind of row, at its dispatch
    none = (NONE,) if pipe.session.compiled.schedule.synchronous else (NEVER,)
    for kind in {it.row.kind for it in coming(pipe, restored())[1].instructions} - {"DROP"}:
        state = restored()
        with failing(pipe, state, kind, RuntimeError("no link")) as row:
            text = told(pipe, state, [batch(1)], 0)
        step, m = divmod(row.microbatch, MICRO)
        assert text.startswith(
            (
                f"step {1 + step}, micro-batch {m}: ",
                "step 1: " if row.microbatch in none else "micro",
            )
        )
        assert f"{kind}" in text
        assert text.endswith(" failed: RuntimeError: no link")
    assert_goes_on(restored())
    # What comes from outside
    state = restored()
    with failing(pipe, state, "B", KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        advanced(pipe, state, [batch(1)])
    assert_goes_on(restored())
    with pytest.raises(OSError, match="the disk is gone"):
        advanced(pipe, restored(), breaking())
    assert_goes_on(restored())


def breaking() -> Iterator[Any]:
    """Batches from a disk that fails."""
    yield batch(1)
    raise OSError("the disk is gone")
