"""Turns are short and nothing is collected while anybody works beside training, and only then."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from jvpipe.runtime.engine.beside_training import TURN_S, beside_training


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
