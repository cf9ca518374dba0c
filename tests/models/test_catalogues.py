import gettext
from pathlib import Path

import pytest

from jvpipe.models import catalogues
from jvpipe.models.catalogues import catalogue_pairs, read_messages
from jvpipe.util.extras import MissingExtraError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jvpipe"


def test_messages_are_those_that_gettext_reads() -> None:
    files = catalogues._catalogues("de")
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
    pairs = catalogue_pairs("en", "de")
    assert ("Password", "Passwort") in pairs
    assert len(pairs) == len(set(pairs)) > 600
    assert not any(set("<>{}\n") & set(a + b) for a, b in pairs)
    assert [(b, a) for a, b in pairs][:9] == catalogue_pairs("de", "en")[:9]
    assert dict(catalogue_pairs("fr", "de"))["Mot de passe"] == "Passwort"
    assert len(list(cache.iterdir())) == 3
    monkeypatch.setattr(catalogues, "_texts", None)
    assert catalogue_pairs("en", "de") == pairs


def test_what_django_cannot_give(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown language 'klingon'"):
        catalogue_pairs("en", "klingon")
    monkeypatch.setattr(catalogues, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"pip install 'jvpipe\[translation\]', or give --data FOLDER"
    ):
        catalogue_pairs("en", "nl")
    assert not list(cache.iterdir())
