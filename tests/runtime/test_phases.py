"""Each phase before the first step is told with its seconds, in the order in which they end."""

import logging
import re

import pytest

from jvpipe.runtime.engine.phases import phase
from tests.session.tiny import begun


def test_phases_are_told_in_turn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jvpipe"):
        begun(2)
    told = [
        m[1]
        for message in caplog.messages
        if (m := re.fullmatch(r"(.*) took \d+\.\d\d s", message))
    ]
    first, *middle, last = dict.fromkeys(told)
    assert (first, last) == ("tracing and cutting the loss", "making and placing the parameters")
    assert middle == [
        "tracing and cutting the optimizer",
        "measuring layers and links",
        "planning",
        "compiling, or loading what was compiled",
    ]


def test_a_phase_is_known_by_its_name_from_its_beginning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "jvpipe"), phase("waiting"):
        assert [(r.levelname, vars(r)["phase"]) for r in caplog.records] == [("DEBUG", "waiting")]
    assert [(r.levelname, vars(r)["phase"]) for r in caplog.records[1:]] == [("INFO", "waiting")]


def test_a_phase_that_fails_ends_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jvpipe"), pytest.raises(KeyError), phase("waiting"):
        raise KeyError
    assert [vars(r)["phase"] for r in caplog.records] == ["waiting"]
