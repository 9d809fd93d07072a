"""What records about this machine share: the folder that they lie in, and the hash of the sources
that they speak for.

The rule kept here: one place knows where the user's data lies, and finding it writes nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

ENV_DATA_DIR = "PORTATTN_DATA_DIR"


def data_path() -> str:
    """The user's data folder for portattn; the environment variable PORTATTN_DATA_DIR overrides."""
    return _data_path(os.environ.get(ENV_DATA_DIR))


@functools.cache
def _data_path(chosen: str | None) -> str:
    if chosen:
        return chosen
    import platformdirs

    return platformdirs.user_data_dir("portattn", appauthor=False)


def source_hash(files: tuple[str, ...]) -> str:
    """A hash of the names and contents of a backend's kernel sources."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda f: Path(f).name):
        path = Path(file)
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
