"""Sentence pairs that an installed Django carries: its message catalogues, English and its translations."""

import json
import re
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from jvpipe.models.corpus import cache_folder, write_whole
from jvpipe.util.extras import MissingExtraError
from jvpipe.util.names import did_you_mean

Pair = tuple[str, str]

_PLACE = re.compile(r"%\(\w+\)[sdi]|%[sdi]|\{\w*\}")
"""Where a value is to be filled in, there is an X."""
_CODE = re.compile(r"[<>=_/\\]")
"""Marks of messages that are not plain sentences. Such messages are left out."""


def catalogue_pairs(source: str, target: str) -> list[Pair]:
    """What Django says in two languages, such as `en` and `de`; each as one line.

    Gathered once: a later version of the package does not change what a run is trained on.

    Raises:
        ValueError: it does not speak a language.
        MissingExtraError: it is not installed.
    """
    path = cache_folder() / f"catalogues-{source}-{target}.json"
    if not path.exists():
        left, right = _texts(source), _texts(target)
        # A dictionary and not a set: it drops repetitions and keeps the order.
        pairs = {(left[name], right[name]): None for name in left if name in right}
        write_whole(path, json.dumps(list(pairs)).encode())
    return [(a, b) for a, b in json.loads(path.read_text())]


def read_messages(content: bytes) -> Iterator[Pair]:
    r"""The English texts and the translations of a compiled catalogue (.mo), both forms of those that have two.

    >>> head = struct.pack("<7I", 0x950412DE, 0, 1, 28, 36, 0, 0)
    >>> list(read_messages(head + struct.pack("<4I", 4, 44, 5, 49) + b"door\0" + b"T\xc3\xbcr.\0"))
    [('door', 'Tür.')]
    """
    # GNU gettext's format: a magic number that tells the byte order, a version, the number of texts, and where
    # the tables of originals and of translations begin. A row is the length of a text and its place.
    order = "<" if content[:4] == b"\xde\x12\x04\x95" else ">"
    count, originals, translations = struct.unpack_from(f"{order}3I", content, 8)
    for i in range(count):
        forms = []
        for table in (originals, translations):
            length, start = struct.unpack_from(f"{order}2I", content, table + 8 * i)
            text = content[start : start + length].decode()
            forms.append(text.split("\0"))
        english, translated = forms
        if english[0]:  # the catalogue's own header has no name
            yield english[0].split("\4")[-1], translated[0]  # what precedes it says where it stands
            if len(english) > 1:
                yield english[1], translated[-1]


def _texts(language: str) -> dict[str, str]:
    """Returns the messages of a language, by their English; English itself is told by the catalogues of another one."""
    pairs: dict[str, str] = {}
    for file in _catalogues("de" if language == "en" else language):
        for english, translated in read_messages(file.read_bytes()):
            plain, text = _one_line(english), _one_line(translated)
            if plain and text and not _CODE.search(plain + text):
                pairs.setdefault(plain, plain if language == "en" else text)
    return pairs


def _one_line(message: str) -> str:
    return _PLACE.sub("X", " ".join(message.split()))


def _catalogues(language: str) -> list[Path]:
    spec = find_spec("django")
    if spec is None or spec.origin is None:
        raise MissingExtraError(
            "django is not installed: pip install 'jvpipe[translation]', or give --data FOLDER"
        )
    package = Path(spec.origin).parent
    files = sorted(package.rglob(f"locale/{language}/LC_MESSAGES/django.mo"))
    if not files:
        folders = [path for path in (package / "conf" / "locale").iterdir() if path.is_dir()]
        languages = sorted(path.name for path in folders if path.name[:2] != "__")
        raise ValueError(did_you_mean("language", language, languages))
    return files
