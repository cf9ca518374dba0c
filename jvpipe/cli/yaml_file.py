"""YAML as files of options are written: each name once, and numbers as people write them."""

import re
from collections.abc import Iterator
from typing import Any

from jvpipe.ir.extras import extra

_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$")
"""Numbers such as 1e-3, which YAML 1.1 takes for a text, for they have no point."""


def read(content: str) -> tuple[Any, dict[str, int]]:
    r"""Reads a document; also tells the line of each name at its top.

    Raises:
        ValueError: it is no YAML, or a name is there twice; the message has the line.

    >>> read("stages: 4\nlearning-rate: 1e-3\n")
    ({'stages': 4, 'learning-rate': 0.001}, {'stages': 1, 'learning-rate': 2})
    """
    with extra("cli"):
        import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
    try:
        top = yaml.compose(content, Loader=Loader)
        _check_names(_mappings(top))
        value = yaml.load(content, Loader=Loader)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}{problem.problem}") from problem
    names = top.value if isinstance(top, yaml.MappingNode) else []
    return value, {str(name.value): name.start_mark.line + 1 for name, _ in names}


def _mappings(node: Any) -> Iterator[Any]:
    """The mappings of a document, as lists of pairs of nodes."""
    pairs = node.value if node is not None and node.id == "mapping" else []
    if pairs:
        yield pairs
    below = [value for _, value in pairs]
    if node is not None and node.id == "sequence":
        below = node.value
    for each in below:
        yield from _mappings(each)


def _check_names(mappings: Iterator[Any]) -> None:
    """Raises ValueError for a name that a mapping has twice."""
    for pairs in mappings:
        first: dict[str, int] = {}
        for name, _ in pairs:
            line = name.start_mark.line + 1
            if name.value in first:
                raise ValueError(
                    f"line {line}: {name.value} is in line {first[name.value]} already: "
                    "take one of them out"
                )
            first[name.value] = line
