"""Profiles that others measured."""

from pathlib import Path

from experiments.planners.profiles import profiles_folder


def profile(name: str) -> Path:
    """The path of a profile."""
    return profiles_folder() / name
