import gettext
from pathlib import Path

import pytest

from jvpipe.models import catalogs
from jvpipe.models.catalogs import catalog_pairs, read_messages
from jvpipe.util.extras import MissingExtraError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jvpipe"


def test_messages_are_those_that_gettext_reads() -> None:
    files = catalogs._catalogs("de")
    assert len(files) > 5
    for file in files:
        with file.open("rb") as opened:
            known = gettext.GNUTranslations(opened)
        found = dict(read_messages(file.read_bytes()))
        assert len(found) > 3
        assert set(found.values()) <= set(vars(known)["_catalog"].values())
        for english in ("Yes", "No", "Password", "site", "Delete"):
            assert found.get(english, english) == known.gettext(english)


def test_pairs_are_plain_sentences_gathered_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = catalog_pairs("en", "de")
    assert ("Password", "Passwort") in pairs
    assert len(pairs) == len(set(pairs)) > 600
    assert not any(set("<>{}\n") & set(a + b) for a, b in pairs)
    assert [(b, a) for a, b in pairs][:9] == catalog_pairs("de", "en")[:9]
    assert dict(catalog_pairs("fr", "de"))["Mot de passe"] == "Passwort"
    assert len(list(cache.iterdir())) == 3
    monkeypatch.setattr(catalogs, "_texts", None)
    assert catalog_pairs("en", "de") == pairs


def test_what_django_cannot_give(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown language 'klingon'"):
        catalog_pairs("en", "klingon")
    monkeypatch.setattr(catalogs, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"pip install 'jvpipe\[translation\]', or give --data FOLDER"
    ):
        catalog_pairs("en", "nl")
    assert not list(cache.iterdir())
