"""Reads YAML, and finds the line of each name at the top level."""

import re
from typing import Any

from jvpipe.util.extras import extra

_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$")
"""Matches numbers such as 1e-3, which YAML 1.1 reads as texts because they lack a decimal point."""

_TEXTS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
"""The tags of names: a text, or `<<`, which stands for the names of another mapping."""


def read_yaml(content: str) -> tuple[Any, dict[str, int]]:
    r"""Reads a YAML document; returns its value, and the line of each name at the top level.

    Raises:
        ValueError: the text is not YAML, nests too deeply, or a mapping has a name twice or a name
            that is not a text. The message has the line, if the parser reports it.

    >>> read_yaml("stages: 4\nlearning-rate: 1e-3\n")
    ({'stages': 4, 'learning-rate': 0.001}, {'stages': 1, 'learning-rate': 2})
    """
    with extra("cli"):
        import yaml

    class Loader(yaml.SafeLoader):
        # If a mapping has a name twice, PyYAML would silently use the last value.
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            first: dict[str, int] = {}
            for name, _ in node.value:
                line = _line_of(name)
                if not isinstance(name.value, str):
                    raise ValueError(f"line {line}: a name must be a text, not a list or a mapping")
                if name.tag not in _TEXTS:
                    raise ValueError(
                        f"line {line}: a name must be a text, and {name.value} is one only in "
                        "quotes"
                    )
                if name.value in first:
                    earlier = first[name.value]
                    raise ValueError(
                        f"line {line}: {name.value} is in line {earlier} already: remove one of "
                        "the two"
                    )
                first[name.value] = line
            return super().construct_mapping(node, deep)

    # The safe loader makes only plain data and runs no code from the file.
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
    try:
        loader = Loader(content)
        top = loader.get_single_node()
        value = None if top is None else loader.construct_document(top)
    except RecursionError as problem:
        raise ValueError("this YAML is nested too deeply") from problem
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}{problem.problem}") from problem
    except yaml.YAMLError as problem:  # such as a control character
        raise ValueError(" ".join(str(problem).split())) from problem
    names = top.value if isinstance(top, yaml.MappingNode) else []
    return value, {str(name.value): _line_of(name) for name, _ in names}


def _line_of(node: Any) -> int:
    return node.start_mark.line + 1  # PyYAML counts lines from 0, and editors from 1
