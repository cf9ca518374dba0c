"""Models and data sets of the Hugging Face hub, by their names `owner/name`.

Folders of models are downloaded, and data sets are streamed.
"""

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jvpipe.util.brief import first_line
from jvpipe.util.extras import extra

_NAME = re.compile(
    r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<config>[\w.-]+))?$"
)
_FILES = (
    "*.safetensors",
    "model.safetensors.index.json",
    "*config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "chat_template.jinja",
)
"""Patterns of the files to download: weights as safetensors, settings and the tokenizer."""


def is_name(name: str | Path) -> bool:
    """Tells whether a name has the form `owner/name[@REVISION][:CONFIG]`, and no such path exists.

    >>> is_name("Qwen/Qwen3-0.6B"), is_name("Salesforce/wikitext@main:wikitext-2-v1")
    (True, True)
    >>> is_name("a/b/c"), is_name("/base"), is_name("texts.jsonl")
    (False, False, False)
    """
    has_form = _NAME.match(str(name)) is not None
    return has_form and not Path(name).exists()


def model_folder(source: str | Path) -> Path:
    """Returns the folder of a model: `source` itself, or the downloaded folder if it is a name.

    Downloaded models stay in the cache of huggingface-hub, so later calls need no network.

    Args:
        source: a path, or `owner/name[@REVISION]`.

    Raises:
        ValueError: `source` is a name, but the hub has no such model or cannot be reached.
        MissingExtraError: `source` is a name, but huggingface-hub is not installed.
    """
    if not is_name(source):
        return Path(source)
    with extra("hf"):
        import huggingface_hub
    name, revision, _ = _parts(source)
    cure = f"on a machine with a network, hf download {name} --local-dir DIR makes a folder of it"
    with _telling(f"there is no folder {source}, and the hub gave no model", cure):
        download: Any = huggingface_hub.snapshot_download
        return Path(download(name, revision=revision, allow_patterns=[*_FILES]))


def pinned(name: str, folder: Path) -> str:
    """Adds the downloaded revision to a model's name, so that a resumed run uses the same weights.

    >>> pinned("owner/name", Path("snapshots/0a1b")), pinned("base", Path("base"))
    ('owner/name@0a1b', 'base')
    """
    if not is_name(name):
        return name
    return f"{_parts(name)[0]}@{folder.name}"


def data_set(source: str | Path) -> Callable[[], Any]:
    """Opens a data set of the hub for streaming.

    Args:
        source: `owner/name[@REVISION][:CONFIG]`. Only the split `train` is read.

    Returns:
        A function; each call opens the stream at its first row.

    Raises:
        ValueError: there is no such data set, or the hub cannot be reached.
        MissingExtraError: datasets is not installed.
    """
    with extra("hf"):
        datasets = importlib.import_module("datasets")  # type checkers may not find it
    name, revision, config = _parts(source)
    cure = "without a network, give a folder of .jsonl, .parquet or text files"
    with _telling(f"there is no file or folder {source}, and the hub gave no data set", cure):
        rows: Any = datasets.load_dataset(
            name, config, split="train", streaming=True, revision=revision
        )
    # `skip` returns a new data set and leaves `rows` as it is, so each call begins at row 0.
    return lambda: rows.skip(0)


def _parts(name: str | Path) -> tuple[str, str | None, str | None]:
    found = _NAME.match(str(name))
    assert found is not None, "is_name has looked"
    return found["name"], found["revision"], found["config"]


@contextmanager
def _telling(subject: str, cure: str) -> Iterator[None]:
    """Turns any error of the libraries, the network or the hub into a ValueError of one line."""
    try:
        yield
    except Exception as problem:  # the libraries share no base class of errors
        raise ValueError(f"{subject} ({first_line(problem)}): {cure}") from problem
