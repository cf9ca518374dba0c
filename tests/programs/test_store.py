"""Each distinct layer is made once, each program compiled once per device."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe._jax import ClosedJaxpr
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.store import Program, ProgramStore, in_parallel
from jvpipe.trace.flatten import flatten
from jvpipe.trace.graph import build_graph
from jvpipe.trace.loss import trace_loss
from tests.zoo import Case, mlp, three_readers, transformer

X = np.arange(6, dtype=np.float32)


def programs(case: Case, store: ProgramStore) -> list[LayerPrograms]:
    traced = build_graph(trace_loss(case.loss_fn, case.params, case.batch, case.rng))
    tensors = traced.graph.tensors
    return [
        store.layer(
            body,
            [c.name for c in layer.candidates],
            [t for t in layer.reading(ValueKind.TENSOR) if tensors[t].readers[-1] > layer.id],
        )
        for layer, body in zip(traced.graph.layers, traced.bodies, strict=True)
    ]


def letters(found: list[LayerPrograms]) -> str:
    names: dict[LayerPrograms, str] = {}
    by_identity = {id(p): p for p in found}
    assert len({p.key for p in by_identity.values()}) == len(by_identity)
    return "".join(names.setdefault(p, chr(ord("a") + len(names))) for p in found)


def test_layers_alike_share_programs() -> None:
    assert letters(programs(transformer(4), ProgramStore())) == "abcbcbcbde"
    assert (
        letters(programs(mlp(7, jax.nn.relu), ProgramStore())) == "abbbbbc"
    )  # nothing flows back to the batch


def test_a_partial_sum_makes_another_program() -> None:
    assert letters(programs(three_readers(7), ProgramStore()))[1:3] == "bc"


def test_models_share_programs_too() -> None:
    store = ProgramStore()
    short, long = programs(mlp(7), store), programs(mlp(9), store)
    assert {id(p) for p in short} == {id(p) for p in long}


def closed(scale: float) -> ClosedJaxpr:
    return flatten(lambda x: x * scale, X)


def test_a_program_is_compiled_once_per_device() -> None:
    store, (first, second) = ProgramStore(), jax.devices()[:2]
    doubled, tripled = (Program.of(closed(s), key=s) for s in (2.0, 3.0))
    run, same, there, other = store.compile(
        [(doubled, first), (doubled, first), (doubled, second), (tripled, first)]
    )
    assert run is same
    assert len({id(run), id(there), id(other)}) == 3
    assert store.compile([(doubled, second)])[0] is there
    for executable, device, scale in ((run, first, 2), (there, second, 2), (other, first, 3)):
        found, _ = executable(jax.device_put(X, device))
        assert found.devices() == {device}
        np.testing.assert_array_equal(found, scale * X)


def test_the_mark_of_a_program_has_four_bytes_that_are_not_donated() -> None:
    (run,) = ProgramStore().compile(
        [(Program.of(closed(2.0), [0], key="doubled"), jax.devices()[0])]
    )
    x = jnp.asarray(X) + 0
    found, mark = run(x)
    np.testing.assert_array_equal(found, 2 * X)
    assert (mark.shape, mark.nbytes) == ((), 4)
    assert x.is_deleted()


def test_after_an_error_no_item_begins() -> None:
    begun = []

    def fails(item: int) -> None:
        begun.append(item)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        in_parallel(fails, range(1000))
    assert len(begun) <= 2 * (os.cpu_count() or 1)
