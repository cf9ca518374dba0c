"""A tokenizer that is given is that of the run; what cannot be one is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from jvpipe import models
from jvpipe.cli.command_options import TrainOptions
from jvpipe.cli.own_model import find_model
from jvpipe.cli.run_model import as_in_folder, keep_tokenizer
from jvpipe.models.tokens import train_tokenizer
from tests.models.test_tokens import DOCUMENTS
from tests.models.test_weights import WEIGHTS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A tokenizer of another vocabulary than that of the text below."""
    path = tmp_path / "given.json"
    train_tokenizer(["quite other words, again and again"] * 9, 280).save(str(path))
    return path


def test_text_is_read_by_it(file: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(DOCUMENTS))
    run = tmp_path / "run"
    run.mkdir()
    workload = models.load("gpt2", "tiny")
    keep_tokenizer(TrainOptions(tokenizer=str(file)), workload, run)
    data = workload.open_data(tmp_path / "text.txt", run, 0, 4)
    tokenizer = Tokenizer.from_file(str(file))
    known = "".join(document.lower() for document in DOCUMENTS)
    for record in np.asarray(data.example["targets"]):
        (text, *_) = tokenizer.decode(record.tolist(), skip_special_tokens=False).split("[SEP]")
        assert text.strip() in known
    assert (run / "tokenizer.json").read_bytes() == file.read_bytes()


def test_where_no_tokenizer_is_given_none_is_kept(tmp_path: Path) -> None:
    keep_tokenizer(TrainOptions(), models.load("gpt2", "tiny"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_that_of_a_folder_of_weights_is_taken(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    shutil.copytree(WEIGHTS / "gpt2", folder)
    asked = TrainOptions(model="gpt2", init_from=str(folder))
    assert as_in_folder(asked).tokenizer is None
    shutil.copy(file, folder / "tokenizer.json")
    assert as_in_folder(asked).tokenizer == str(folder / "tokenizer.json")
    assert as_in_folder(replace(asked, tokenizer=str(file))).tokenizer == str(file)


def test_what_cannot_be_is_refused(file: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"model": 3}))
    for name, options, told in (
        (
            "bert",
            {"tokenizer": str(tmp_path / "none.json")},
            r"none\.json' is not a tokenizer .*No such file",
        ),
        (
            "bert",
            {"tokenizer": str(tmp_path / "other.json")},
            r"other\.json' is not a tokenizer .*: give a",
        ),
        ("amoebanet", {}, "amoebanet does not use a tokenizer"),
        ("examples/llama.py:Llama", {}, "Llama does not use a tokenizer"),
        ("bert", {"resume": True}, "a resumed run already has its tokenizer"),
    ):
        with pytest.raises(ValueError, match=told):
            keep_tokenizer(
                replace(TrainOptions(tokenizer=str(file)), **options), find_model(name), tmp_path
            )
