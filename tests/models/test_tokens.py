from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from jvpipe.models import tokens
from jvpipe.models.tokens import CLS, SEP, cached_records, open_tokenizer, pack, train_tokenizer

WORDS = ["layer", "stage", "schedule", "update", "gradient", "buffer", "device", "memory", "forward"]
DOCUMENTS = [" ".join(np.random.default_rng(i).choice(WORDS, 40)).capitalize() + "." for i in range(50)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(DOCUMENTS, 300)


def test_training_is_deterministic(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(DOCUMENTS, 300).to_str() == tokenizer.to_str()
    assert tokenizer.get_vocab_size() <= 300


def test_a_run_keeps_its_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first = open_tokenizer(tmp_path / "run", DOCUMENTS, 300)
    assert first.to_str() == tokenizer.to_str()
    assert open_tokenizer(tmp_path / "run", ["other text"], 300).to_str() == first.to_str()


def test_records_hold_the_whole_text_in_order(tokenizer: Tokenizer) -> None:
    records = pack(DOCUMENTS, tokenizer, 16)
    assert records.dtype == np.int32
    assert (records[:, 0] == CLS).all()
    stream = records[:, 1:].reshape(-1)
    texts, expected = [], DOCUMENTS[:10]
    for part in np.split(stream, np.flatnonzero(stream == SEP))[:10]:
        texts.append(tokenizer.decode(part[part != SEP].tolist()).strip())
    assert texts == [document.lower() for document in expected]
    total = sum(len(tokenizer.encode(document).ids) + 1 for document in DOCUMENTS)
    assert len(records) == total // 15


def test_too_little_text_gives_no_record(tokenizer: Tokenizer) -> None:
    assert pack(["layer"], tokenizer, 16).shape == (0, 16)
    assert pack([], tokenizer, 16).shape == (0, 16)


def test_records_are_made_once(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = cached_records(DOCUMENTS, tokenizer, 16)
    assert isinstance(first, np.memmap)
    np.testing.assert_array_equal(first, pack(DOCUMENTS, tokenizer, 16))
    monkeypatch.setattr(tokens, "pack", None)
    np.testing.assert_array_equal(cached_records(DOCUMENTS, tokenizer, 16), first)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(cached_records(DOCUMENTS[:20], tokenizer, 16)) < len(first)
    assert cached_records(DOCUMENTS, tokenizer, 8).shape[1] == 8
    assert len(list((tmp_path / "jvpipe").iterdir())) == 3


def test_tokenizers_that_do_not_fit(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    with pytest.raises(ValueError, match=r"has \d+ tokens, the model 50: use the size"):
        open_tokenizer(tmp_path, DOCUMENTS, 50)
    path.write_text(tokenizer.to_str().replace("[MASK]", "[HIDE]"))
    with pytest.raises(ValueError, match="does not begin with"):
        open_tokenizer(tmp_path, DOCUMENTS, 300)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer .*: delete it"):
        open_tokenizer(tmp_path, DOCUMENTS, 300)
