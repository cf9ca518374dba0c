"""Endings of losses under replicas: what runs is what plain JAX makes of it, what does not says
what to do.
"""

import re
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jvpipe
from tests.endings import BATCH, ENDINGS, MICRO, PARAMS, RATE, Ending, expected
from tests.grid import grid

WIDTHS = [(2, 1), (2, 2), (3, 2)]
KEY = jax.random.key(7)
CURES = re.compile(r"\b(use|give|return|say|write|pass|multiply|compute it)\b", re.IGNORECASE)
MUST_RUN = (
    "plain: mean",
    "plain: each by the size",
    "plain: stack of rows",
    "plain: stack of means",
    "plain: list of means",
    "plain: mean of a stack",
    "plain: dropout",
    "plain: dropout in a scan",
    "plain: sums of classes",
    "plain: scatter to one column",
    "plain: reversed",
    "weighted: masked",
    "weighted: mean times the count",
    "state: moving mean",
    "aux: each",
)
SAMPLE = [
    ("plain: each by the size", (2, 1)),
    ("plain: sums of classes", (3, 2)),
    ("plain: dropout in a scan", (3, 2)),
    ("weighted: mean times the count", (2, 1)),
    ("state: decayed sum", (3, 2)),
]
ALL = [(name, widths) for name in ENDINGS for widths in WIDTHS]
MOST_REFUSED = 0.3


def made(values: list[Any], how: str | None) -> Any:
    """What micro-batches yield beside their losses, as one: of numbers that are not counted the
    mean.
    """
    stacked = np.stack([np.asarray(v) for v in values])
    if how == "max":
        return stacked.max(0)
    is_mean = stacked.ndim == 1 and np.issubdtype(stacked.dtype, np.floating)
    return stacked.mean(0) if is_mean else stacked


def begun(ending: Ending, widths: tuple[int, ...]) -> tuple[jvpipe.Pipeline, Any]:
    pipe = jvpipe.Pipeline(
        ending.loss,
        optax.sgd(RATE),
        stages=2,
        microbatches=MICRO,
        planner="even",
        replicas=widths,
        **ending.options,
    )
    state = () if ending.state is None else (ending.state,)
    return pipe, pipe.init(PARAMS, BATCH, KEY, *state)


def differs(ending: Ending, widths: tuple[int, ...]) -> str:
    """What a step makes otherwise than plain JAX does, if anything."""
    pipe, state = begun(ending, widths)
    state, metrics = pipe.step(state, BATCH)
    loss, params, model_state, aux = expected(ending, KEY)
    found = {"loss": metrics["loss"], "params": pipe.params(state)}
    wanted = {"loss": loss, "params": params}
    if ending.state is not None:
        found["state"], wanted["state"] = pipe.model_state(state), model_state
    if aux:
        found["aux"] = metrics["aux"]["a"]
        how = ending.options.get("aux_reduce", {}).get("a")
        wanted["aux"] = made([a["a"] for a in aux], how)
    for name in found:
        pairs = zip(jax.tree.leaves(found[name]), jax.tree.leaves(wanted[name]), strict=True)
        for a, b in pairs:
            a, b = np.asarray(a), np.asarray(b)
            close = np.allclose(a, b, rtol=ending.tolerance, atol=ending.tolerance / 100)
            if a.shape != b.shape or not close:
                return f"{name}: {np.asarray(a).ravel()[:4]}, not {np.asarray(b).ravel()[:4]}"
    return ""


@pytest.mark.parametrize(("name", "widths"), grid(ALL, *SAMPLE))
def test_an_ending_is_what_plain_jax_makes_of_it(name: str, widths: tuple[int, ...]) -> None:
    refused = ""
    try:
        assert not differs(ENDINGS[name], widths)
    except ValueError as error:
        refused = str(error)
    if refused:
        assert CURES.search(refused)
        assert (name, widths) not in SAMPLE, refused
        assert name not in MUST_RUN, refused


@pytest.mark.thorough
def test_most_endings_run(capsys: pytest.CaptureFixture[str]) -> None:
    refused = []
    for name, widths in ALL:
        try:
            begun(ENDINGS[name], widths)
        except ValueError:
            refused.append((name, widths))
    with capsys.disabled():
        print(f"\n{len(ENDINGS)} endings, {len(ALL)} runs, {len(refused)} refused: {refused}")
    assert len(refused) <= MOST_REFUSED * len(ALL)
