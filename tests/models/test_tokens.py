from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from jvpipe.models.tokens import (
    CLS,
    OURS,
    SEP,
    Marks,
    cached,
    marks_of,
    open_tokenizer,
    pack,
    train_tokenizer,
)

WORDS = [
    "layer",
    "stage",
    "schedule",
    "update",
    "gradient",
    "buffer",
    "device",
    "memory",
    "forward",
]
DOCUMENTS = [
    " ".join(np.random.default_rng(i).choice(WORDS, 40)).capitalize() + "." for i in range(50)
]


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


def test_records_are_made_once(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(texts: list[str], size: int, made: Any = pack) -> np.ndarray:
        return cached(str(size), texts, tokenizer, lambda: made(texts, tokenizer, size))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = kept(DOCUMENTS, 16)
    assert isinstance(first, np.memmap)
    np.testing.assert_array_equal(first, pack(DOCUMENTS, tokenizer, 16))
    np.testing.assert_array_equal(kept(DOCUMENTS, 16, made=None), first)
    assert len(kept(DOCUMENTS[:20], 16)) < len(first)
    assert kept(DOCUMENTS, 8).shape[1] == 8
    assert len(list((tmp_path / "jvpipe").iterdir())) == 3


@pytest.mark.parametrize(
    ("special", "marks"),
    [
        (["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], Marks(2, 3, 4, (0, 1, 2, 3, 4))),
        (["<s>", "<pad>", "</s>", "<unk>", "<mask>"], Marks(0, 2, 4, (0, 1, 2, 3, 4))),
        (["<pad>", "</s>", "<unk>"], Marks(0, 1, None, (0, 1, 2))),
        (["<|endoftext|>"], Marks(0, 0, None, (0,))),
        (["<unk>"], None),
    ],
)
def test_tokenizers_of_others_are_known_by_their_special_tokens(
    tmp_path: Path, tokenizer: Tokenizer, special: list[str], marks: Marks | None
) -> None:
    other = Tokenizer(BPE())
    other.pre_tokenizer = ByteLevel(add_prefix_space=True)
    other.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=280, special_tokens=special, initial_alphabet=ByteLevel.alphabet()
    )
    other.train_from_iterator([document.lower() for document in DOCUMENTS], trainer)
    other.enable_padding(length=500)
    other.enable_truncation(3)
    other.save(str(tmp_path / "tokenizer.json"))
    found = open_tokenizer(tmp_path, DOCUMENTS, 300)
    if marks is None:
        with pytest.raises(ValueError, match=r"has none of the tokens \[SEP\], </s>"):
            marks_of(found)
        return
    assert marks_of(found) == marks
    records = pack([document.lower() for document in DOCUMENTS], found, 16)
    assert (records[:, 0] == marks.start).all()
    text = records[:, 1:].reshape(-1)
    assert (text == marks.end).sum() >= len(DOCUMENTS) - 1
    assert (
        found.decode(text[: int(np.argmax(text == marks.end))].tolist()).strip()
        == DOCUMENTS[0].lower()
    )


def test_a_tokenizer_of_ours_has_our_own_marks(tokenizer: Tokenizer) -> None:
    assert marks_of(tokenizer) == OURS
    assert OURS.first == 4
    assert Marks(101, 102, 103, (0, 100, 101, 102, 103)).first == 0


def test_tokenizers_that_do_not_fit_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    with pytest.raises(
        ValueError, match=r"has \d+ tokens, but the model has 50: use the model size"
    ):
        open_tokenizer(tmp_path, DOCUMENTS, 50)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer .*: delete the file"):
        open_tokenizer(tmp_path, DOCUMENTS, 300)
