from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jvpipe.models.tokens import CLS, SEP, open_tokenizer
from jvpipe.models.translation import open_parallel, open_translation, pack_pairs

WORDS = {
    "layer": "Schicht",
    "stage": "Stufe",
    "device": "Rechner",
    "update": "Neuerung",
    "memory": "Speicher",
}


def sentences(count: int) -> list[tuple[str, str]]:
    draw = np.random.default_rng(0)
    rows = [draw.choice(list(WORDS), draw.integers(1, 6)).tolist() for _ in range(count)]
    return [(" ".join(row), " ".join(WORDS[word] for word in row)) for row in rows]


def write(folder: Path, name: str, pairs: list[tuple[str, str]]) -> None:
    folder.mkdir(exist_ok=True)
    for suffix, side in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        (folder / f"{name}.{suffix}").write_text("\n".join(side) + "\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "texts", "train", sentences(200))
    return tmp_path / "texts"


def test_a_tenth_is_held_out_with_all_that_says_the_same(folder: Path) -> None:
    pairs = open_parallel(folder, "en-de")
    assert sorted(pairs.train + pairs.held_out) == sorted(sentences(200))
    assert 20 <= len(pairs.held_out) < 60
    assert not {a for a, _ in pairs.train} & {a for a, _ in pairs.held_out}
    turned = open_parallel(folder, "de-en")
    assert sorted((b, a) for a, b in turned.train + turned.held_out) == sorted(sentences(200))
    assert turned.digest != pairs.digest == open_parallel(folder, "en-de").digest


def test_valid_is_held_out(folder: Path) -> None:
    write(folder, "valid", [("a stage", "eine Stufe"), ("", "nichts")])
    write(folder, "more", [("a  device", " ein Rechner")])
    pairs = open_parallel(folder, "en-de")
    assert pairs.held_out == (("a stage", "eine Stufe"),)
    assert sorted(pairs.train) == sorted([*sentences(200), ("a device", "ein Rechner")])


def test_lines_end_at_line_feeds_alone(folder: Path) -> None:
    (folder / "train.en").write_bytes(b"a \r stage\r\na device\r\n")
    (folder / "train.de").write_bytes(b"eine Stufe\nein\rRechner\n")
    pairs = open_parallel(folder, "en-de")
    assert sorted(pairs.train + pairs.held_out) == [
        ("a device", "ein Rechner"),
        ("a stage", "eine Stufe"),
    ]


def test_batches_say_what_is_read_and_what_is_written(folder: Path, tmp_path: Path) -> None:
    def opened(seed: int) -> Any:
        return open_translation(
            folder, tmp_path / "run", seed, 4, languages="en-de", vocabulary=320, tokens=24
        )

    data: Any = opened(0)
    tokenizer, known = (
        open_tokenizer(tmp_path / "run", [], 320),
        {a: b.lower() for a, b in sentences(200)},
    )
    for batch in [next(data.train), *data.held_out]:
        for inputs, length, tokens, targets, weights in zip(
            *(batch[name] for name in ("inputs", "lengths", "tokens", "targets", "weights")),
            strict=True,
        ):
            count = int(weights.sum())
            assert inputs[length - 1] == targets[max(count, 1) - 1] == SEP or count == 0
            assert not inputs[length:].any()
            assert tokens[0] == CLS
            if count:
                np.testing.assert_array_equal(tokens[1:count], targets[: count - 1])
                read, written = (
                    tokenizer.decode(ids.tolist()) for ids in (inputs[:length], targets[:count])
                )
                assert known[read.strip()] == written.strip()
    assert 1 < data.baseline_loss < np.log(320)
    again: Any = opened(0)
    next(again.train)
    state = again.train.get_state()
    third = next(data.train)
    np.testing.assert_array_equal(next(again.train)["inputs"], third["inputs"])
    again.train.set_state(state)
    np.testing.assert_array_equal(next(again.train)["inputs"], third["inputs"])


def test_long_pairs_are_left_out(folder: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(
        tmp_path / "run", [text for pair in sentences(200) for text in pair], 320
    )
    assert len(pack_pairs([("layer", "Schicht"), ("layer " * 30, "Schicht")], tokenizer, 16)) == 1
    write(folder, "train", [("layer " * 30, "Schicht")] * 9 + [("stage " * 30, "Stufe")])
    with pytest.raises(
        ValueError,
        match=r"texts' gives 0 pairs of fewer than 8 tokens to train on and 0 to hold out",
    ):
        open_translation(
            folder, tmp_path / "run", 0, 4, languages="en-de", vocabulary=320, tokens=8
        )


def test_what_cannot_be_read_is_told_and_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    def refused(told: str, languages: str = "en-de", vocabulary: int = 320) -> None:
        with pytest.raises(ValueError, match=told) as problem:
            open_translation(
                folder,
                tmp_path / "run",
                0,
                4,
                languages=languages,
                vocabulary=vocabulary,
                tokens=16,
            )
        assert "\n" not in str(problem.value)

    refused(
        r"no two files such as train\.en and train\.fr in '.*texts': "
        r"give a folder .* other than en-fr",
        "en-fr",
    )
    refused("languages='en' must be two", "en")
    with (folder / "train.de").open("a") as file:
        file.write("Schicht\n")
    refused(
        r"train\.en' has 200 lines and '.*train\.de' 201: "
        r"line 201 of 'train\.de' has no translation in 'train\.en'"
    )
    assert not (tmp_path / "run").exists()
    write(folder, "train", sentences(200))
    open_tokenizer(tmp_path / "run", [text for pair in sentences(200) for text in pair], 330)
    refused(
        r"the tokenizer has \d+ tokens, but the model has 300: use the model size", vocabulary=300
    )
