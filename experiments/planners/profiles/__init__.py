"""Profiles that others measured: in this folder, or in one that `JVPIPE_PROFILES` names."""

import os
from pathlib import Path


def profiles_folder() -> Path:
    """Returns the folder of the profiles.

    Raises:
        ValueError: `JVPIPE_PROFILES` names none.
    """
    folder = Path(os.environ.get("JVPIPE_PROFILES") or Path(__file__).parent)
    if not folder.is_dir():
        raise ValueError(f"JVPIPE_PROFILES={folder}: there is no such folder of profiles")
    return folder
