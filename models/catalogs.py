"""Sentence pairs of two languages, from the message catalogs of an installed Django."""

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
"""Placeholders of values. Each placeholder is replaced by an X."""
_CODE = re.compile(r"[<>=_/\\]")
"""Characters that occur in code. Messages with any of them are left out."""


def catalog_pairs(source: str, target: str) -> list[Pair]:
    """Returns pairs of Django's messages in two languages, such as `en` and `de`.

    Each message is one line. The cache folder stores the pairs, so that a later version of Django
    does not change the data of a run.

    Raises:
        ValueError: Django has no catalog of one of the languages.
        MissingExtraError: Django is not installed.
    """
    path = cache_folder() / f"catalogs-{source}-{target}.json"
    if not path.exists():
        left, right = _texts(source), _texts(target)
        # A dictionary drops repetitions as a set does, and unlike a set it keeps the order.
        pairs = {(left[name], right[name]): None for name in left if name in right}
        write_whole(path, json.dumps(list(pairs)).encode())
    return [(a, b) for a, b in json.loads(path.read_text())]


def read_messages(content: bytes) -> Iterator[Pair]:
    r"""Yields the pairs (English, translation) of a compiled catalog (.mo).

    A message with a singular and a plural gives two pairs.

    >>> head = struct.pack("<7I", 0x950412DE, 0, 1, 28, 36, 0, 0)
    >>> list(read_messages(head + struct.pack("<4I", 4, 44, 5, 49) + b"door\0" + b"T\xc3\xbcr.\0"))
    [('door', 'Tür.')]
    """
    # GNU gettext's header has a magic number that shows the byte order, a version, the number of
    # texts, and the offsets of two tables (originals, translations). A row of a table is the length
    # and the offset of a text. NUL separates singular and plural.
    order = "<" if content[:4] == b"\xde\x12\x04\x95" else ">"
    count, originals, translations = struct.unpack_from(f"{order}3I", content, 8)
    for i in range(count):
        forms = []
        for table in (originals, translations):
            length, start = struct.unpack_from(f"{order}2I", content, table + 8 * i)
            text = content[start : start + length].decode()
            forms.append(text.split("\0"))
        english, translated = forms
        if english[0]:  # an empty original marks the catalog's header
            # EOT separates the text from a context before it, which users do not see.
            yield english[0].split("\4")[-1], translated[0]
            if len(english) > 1:
                yield english[1], translated[-1]


def _texts(language: str) -> dict[str, str]:
    """Maps each English message to its text in a language.

    A catalog pairs English messages with messages of another language. Django's catalogs for
    English itself are empty, so the English messages are read from the German catalogs.
    """
    pairs: dict[str, str] = {}
    for file in _catalogs("de" if language == "en" else language):
        for english, translated in read_messages(file.read_bytes()):
            plain, text = _one_line(english), _one_line(translated)
            if plain and text and not _CODE.search(plain + text):
                pairs.setdefault(plain, plain if language == "en" else text)
    return pairs


def _one_line(message: str) -> str:
    return _PLACE.sub("X", " ".join(message.split()))


def _catalogs(language: str) -> list[Path]:
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
