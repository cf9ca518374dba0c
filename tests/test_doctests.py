"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import jvpipe


def module_names() -> list[str]:
    """All modules of jvpipe, and of jvpipe.models with it."""
    return [
        "jvpipe",
        *(module.name for module in pkgutil.walk_packages(jvpipe.__path__, "jvpipe.")),
    ]


@pytest.mark.parametrize("name", module_names())
def test_the_examples_of_docstrings_run(name: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert result.failed == 0
