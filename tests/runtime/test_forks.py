"""Who is forked from a process that has used JAX is told so at once."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jvpipe.runtime.engine import forks
from jvpipe.runtime.engine.forks import check_not_forked
from tests.session import tiny


def in_a_fork(act: Callable[[], Any]) -> str:
    """What a forked process is told of an act."""
    read, write = os.pipe()
    with warnings.catch_warnings(action="ignore"):
        child = os.fork()
    if child == 0:
        try:
            act()
            told = "nothing"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        told = said.read()
    os.waitpid(child, 0)
    return told


@pytest.mark.parametrize("call", ["Pipeline", "init", "step", "run", "evaluate", "params"])
def test_a_forked_process_is_told_at_once(call: str) -> None:
    pipe = tiny.pipeline()
    state = pipe.init(tiny.PARAMS, tiny.BATCH, None)
    acts = {
        "Pipeline": tiny.pipeline,
        "init": lambda: pipe.init(tiny.PARAMS, tiny.BATCH, None),
        "run": lambda: next(pipe.run(state, [tiny.BATCH])),
        "params": lambda: pipe.params(state),
    }
    told = in_a_fork(acts.get(call, lambda: getattr(pipe, call)(state, tiny.BATCH)))
    assert told.startswith("ValueError: process "), told
    assert f"was forked from process {os.getpid()} that has used JAX" in told
    assert told.endswith("start processes with multiprocessing.get_context('spawn')")
    assert "\n" not in told
    pipe.step(state, tiny.BATCH)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system tells of no threads")
def test_devices_that_only_jax_was_asked_for_are_seen_too() -> None:
    jax.devices()

    def forget() -> None:
        forks._owner.cache_clear()
        check_not_forked()

    assert "was forked from one that has used JAX, whose devices" in in_a_fork(forget)


def test_who_has_made_its_own_devices_is_not_refused() -> None:
    jax.devices()
    check_not_forked()
