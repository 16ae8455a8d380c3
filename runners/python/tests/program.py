"""The program `shardcheck`, for tests that run it."""

import os
import shutil
from pathlib import Path


def program() -> str | None:
    """The program that judges: named, built in this checkout, or on PATH."""
    root = Path(__file__).resolve().parents[3]
    built = [root / "target" / kind / "shardcheck" for kind in ("release", "debug")]
    # the one that was built last is the one that is being worked on
    newest = sorted(filter(Path.is_file, built), key=lambda path: -path.stat().st_mtime)
    candidates = [os.environ.get("SHARDCHECK_BIN"), *map(str, newest), shutil.which("shardcheck")]
    return next((path for path in candidates if path and os.path.isfile(path)), None)
