"""Profiles that others measured, beside the checkout; a test that asks for one is skipped where it is not there."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "shared" / "profiles"


def profile(name: str) -> Path:
    """The path of a profile."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path
