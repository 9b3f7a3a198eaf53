"""Folders that are dear to make: made once, whole or not at all, whoever comes first."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def made_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """`folder`, which `write` fills where it is not there yet. Raises what `write` does."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=folder.parent))
        write(new)
        try:
            os.rename(new, folder)
        except OSError:  # another process was first
            shutil.rmtree(new)
    return folder
