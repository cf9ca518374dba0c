"""Models are found by name, by file and by module; whatever cannot be found is said in one line."""

from pathlib import Path

import pytest

from jvpipe import models
from jvpipe.cli.own_model import find_model

OWN = str(Path(__file__).parents[1] / "own.py")


def test_a_model_is_found_by_name_file_and_module() -> None:
    assert find_model("bert", "tiny", {"dtype": "bfloat16"}).config.dtype == "bfloat16"
    by_file, by_module = find_model(f"{OWN}:Plain"), find_model("tests.own:Plain")
    assert by_file.title == by_module.title == "Plain"
    assert by_file.settings == by_module.settings == {"blocks": 3}
    assert type(find_model(f"{OWN}:Plain").config) is type(by_file.config)


def test_what_a_package_announces_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "theirs-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(
        "[jvpipe.models]\ntheirs = tests.own:full\nlost = tests.own:lost\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_model("theirs", "deep")
    assert (found.title, found.settings) == ("theirs deep", {"blocks": 5, "dtype": "float32"})
    with pytest.raises(
        ValueError, match=r"--model lost cannot be imported: AttributeError: .*lost"
    ):
        find_model("lost")
    with pytest.raises(ValueError, match="unknown model 'their': did you mean 'theirs'"):
        find_model("their")


def test_the_models_of_jvpipe_follow_the_protocol() -> None:
    for name in models.NAMES:
        model: models.Model = find_model(name, "tiny")
        assert isinstance(model, models.Model)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "brt",
            r"unknown model 'brt': did you mean 'bert'\? .* for your own model, give file.py:NAME",
        ),
        ("own.py", "name an object in the file, as in own.py:NAME"),
        (":Mine", "--model :Mine: name the file or the module, as in file.py:Mine"),
        ("nowhere.py:Model", "--model nowhere.py:Model cannot be imported: there is no such file"),
        (f"{OWN}:Plane", "unknown name 'Plane': did you mean 'Plain'"),
        (
            "tests.nowhere:Model",
            "cannot be imported: ModuleNotFoundError: No module named 'tests.nowhere'",
        ),
        ("tests.bits:Model", "there is no Model, and no other model in tests.bits"),
    ],
)
def test_what_is_not_there_is_said(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        find_model(name)
    assert "\n" not in str(refused.value)


def test_a_file_that_fails_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import jax\n\nllama = lama\n")
    with pytest.raises(
        ValueError, match=r"NameError: name 'lama' is not defined.* \(line 3 of bad.py\)"
    ):
        find_model(f"{tmp_path}/bad.py:llama")
    (tmp_path / "bad.py").write_text("llama = (\n")
    with pytest.raises(ValueError, match=r"SyntaxError: '\(' was never closed \(bad.py, line 1\)"):
        find_model(f"{tmp_path}/bad.py:llama")
