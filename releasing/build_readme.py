"""Setuptools as a build backend, which writes the README for readers outside of the repository
first.

`JVPIPE_HOME` is the address under which pages of the repository's files are found: relative links
of the README then begin with it, and so do pictures, with `?raw=true` for the file itself. Without
it links are plain words and pictures are left out, so that nothing is dead.
"""

import os
import re
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - a backend is a module with these functions

_PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)\n*")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


def outside(text: str, home: str) -> str:
    """The README with links that are absolute, or none."""
    base = home.rstrip("/")
    if not base:
        return _LINK.sub(r"\1", _PICTURE.sub("", text))
    text = _PICTURE.sub(rf"![\1]({base}/\2?raw=true)\n\n", text)
    return _LINK.sub(rf"[\1]({base}/\2)", text)


def _write() -> None:
    folder = Path("build")
    folder.mkdir(exist_ok=True)
    text = Path("README.md").read_text()
    (folder / "README.md").write_text(outside(text, os.environ.get("JVPIPE_HOME", "")))


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):  # noqa: ANN001, ANN201, D103
    _write()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):  # noqa: ANN001, ANN201, D103
    _write()
    return build_meta.build_sdist(sdist_directory, config_settings)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):  # noqa: ANN001, ANN201, D103
    _write()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):  # noqa: ANN001, ANN201, D103
    _write()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):  # noqa: ANN001, ANN201, D103
    _write()
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def get_requires_for_build_wheel(config_settings=None):  # noqa: ANN001, ANN201, D103
    _write()
    return build_meta.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_sdist(config_settings=None):  # noqa: ANN001, ANN201, D103
    _write()
    return build_meta.get_requires_for_build_sdist(config_settings)


def get_requires_for_build_editable(config_settings=None):  # noqa: ANN001, ANN201, D103
    _write()
    return build_meta.get_requires_for_build_editable(config_settings)
