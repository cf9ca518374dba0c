"""Turns are short and nothing is collected while anybody works beside training, and only then."""

import gc
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any, cast

import jax
import pytest

from jvpipe.programs.store import in_parallel
from jvpipe.runtime.engine.beside_training import TURN_S, Thread, beside_training
from jvpipe.session import session
from tests.forks import forked


def _now() -> tuple[float, bool]:
    return sys.getswitchinterval(), gc.isenabled()


def test_all_is_as_before_when_the_last_has_left_whoever_that_is() -> None:
    before, met = _now(), Barrier(2)

    def first() -> tuple[float, bool]:
        with beside_training():
            met.wait()  # both are inside
        met.wait()  # this one has left
        found = _now()
        met.wait()
        return found

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(first)
        with beside_training():
            for _ in range(3):
                met.wait()
        assert found.result() == (pytest.approx(TURN_S), False)
    assert _now() == before


def test_an_error_brings_it_back() -> None:
    before = _now()
    with pytest.raises(ZeroDivisionError), beside_training():
        raise ZeroDivisionError
    assert _now() == before


def test_who_collects_nothing_will_not_afterwards() -> None:
    gc.disable()
    try:
        with beside_training():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_call_finds_the_width_of_numbers_of_whoever_asks() -> None:
    thread = Thread("jvpipe-test")
    thread.switch(on=True)
    read = partial(thread.ask, jax.config.read, "jax_enable_x64")
    with jax.enable_x64(True):
        wide = read()
    assert (wide.result(), read().result()) == (True, False)
    thread.switch(on=False)


class _Slow:
    """In place of a model's compiled plans: groups of 1,000 programs."""

    def in_groups(self, apart: Any) -> Any:
        in_parallel(lambda _: time.sleep(0.1), range(1000))


def ending(_: Sequence[str]) -> None:
    thread = Thread("jvpipe-test")
    thread.switch(on=True)
    thread.ask(session.in_groups_or_apart, cast(Any, _Slow()), cast(Any, None))
    time.sleep(0.3)
    print("ends", flush=True)


def test_a_program_that_ends_waits_for_no_groups_and_says_nothing_of_them() -> None:
    with forked(ending) as process:
        process.wait_for(lambda: process.has_said("ends"))
        since = time.monotonic()
        end = process.ended()
    assert time.monotonic() - since < 8
    assert (end.returncode, end.stderr) == (0, "")
