"""The small programs of asynchronous updates against numpy, by the formulas of their docstring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.programs import weight_programs
from jvpipe.programs.store import Program

SHAPES = [jax.ShapeDtypeStruct((2, 3), np.float32), jax.ShapeDtypeStruct((4,), np.float32)]
RNG = np.random.default_rng(0)


def drawn() -> list[np.ndarray]:
    return [RNG.standard_normal(s.shape).astype(np.float32) for s in SHAPES]


def run(program: Program, *arrays: np.ndarray) -> list[np.ndarray]:
    assert [(x.shape, x.dtype) for x in arrays] == [(x.shape, x.dtype) for x in program.inputs]
    return [np.asarray(x) for x in program.fn(*map(jnp.asarray, arrays))]


@pytest.mark.parametrize("factor", [-3, 2])
def test_weights_are_moved_along_what_is_remembered(factor: int) -> None:
    w, v = drawn(), drawn()
    for got, a, b in zip(run(weight_programs.shifted(SHAPES, factor), *w, *v), w, v, strict=True):
        np.testing.assert_allclose(got, a + factor * b, rtol=1e-6)


def test_the_last_update_is_the_difference_and_takes_the_place_of_the_one_before() -> None:
    before, after, old = drawn(), drawn(), drawn()
    program = weight_programs.difference(SHAPES)
    for got, a, b in zip(run(program, *before, *after, *old), before, after, strict=True):
        np.testing.assert_array_equal(got, b - a)
    assert program.donated == (4, 5)


@pytest.mark.parametrize(("t", "anneal"), [(0, 4), (3, 4), (9, 4), (0, 0)])
def test_an_update_of_pipemare_is_scaled_and_its_mean_is_kept(t: int, anneal: int) -> None:
    tau, decay = 3, 0.5
    before, after, mean = drawn(), drawn(), drawn()
    out = run(
        weight_programs.settled(SHAPES, tau, decay, anneal),
        *before,
        *after,
        *mean,
        np.asarray(t, np.int32),
    )
    scale = tau ** -(1 - min(t / anneal, 1)) if anneal else 1.0
    gamma = decay ** (1 / tau)
    for i, (a, b, d) in enumerate(zip(before, after, mean, strict=True)):
        update = (b - a) * scale
        np.testing.assert_allclose(out[i], a + update, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            out[2 + i], gamma * d + (1 - gamma) * update, rtol=1e-5, atol=1e-6
        )
    assert out[-1] == t + 1


def test_weights_of_micro_batches_are_summed_in_their_order() -> None:
    parts = [np.float32(x) for x in (1e8, 1.0, -1e8, 0.5)]
    (total,) = run(
        weight_programs.total(jax.ShapeDtypeStruct((), np.float32), 4), *map(np.asarray, parts)
    )
    assert total == np.float32(np.float32(np.float32(parts[0] + parts[1]) + parts[2]) + parts[3])


def test_programs_that_differ_in_a_number_are_compiled_apart() -> None:
    programs = [
        weight_programs.shifted(SHAPES, 1),
        weight_programs.shifted(SHAPES, 2),
        weight_programs.difference(SHAPES),
    ]
    programs += [weight_programs.settled(SHAPES, tau, 0.5, 10) for tau in (2, 3)]
    programs += [weight_programs.shifted(SHAPES[:1], 1)]
    assert len({program.key for program in programs}) == len(programs)
    assert weight_programs.shifted(SHAPES, 1).key == programs[0].key
