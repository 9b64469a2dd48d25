"""Where things live: the repository, the cache of made targets, the outputs, and the runtime folder of engines."""

import os
import re
import tempfile
import time
from pathlib import Path

import platformdirs

STARTING_S = 10.0  # an engine that is being started has a folder before it has a state
REPOSITORY = Path(__file__).resolve().parent.parent


def cache() -> Path:
    """Folder of made targets: KIMI_EAGLE_CACHE, or the user's cache folder."""
    return Path(os.environ.get("KIMI_EAGLE_CACHE") or platformdirs.user_cache_dir("kimi_eagle"))


def outputs() -> Path:
    """Folder of the runs: KIMI_EAGLE_OUTPUTS, or `outputs/` of the repository."""
    return Path(os.environ.get("KIMI_EAGLE_OUTPUTS") or REPOSITORY / "outputs")


def engines() -> Path:
    """Private folder with one entry per running engine (short, since a Unix socket's path holds 107 bytes)."""
    folder = Path(os.environ.get("KIMI_EAGLE_ENGINES") or Path(tempfile.gettempdir()) / f"kimi-eagle-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def resolve(path: str | Path) -> Path:
    """A path of a parameter file: absolute as it is, relative against the repository, so that no run depends on where it starts."""
    given = Path(path).expanduser()
    return given if given.is_absolute() else REPOSITORY / given


def engine_entries() -> list[Path]:
    """The folders of engines in `engines()`, by name: a key of twelve hexadecimal digits, and not one that is being made just now.

    Whatever else lies there is somebody's own: the variable may point to a home folder.
    """
    found = []
    for folder in sorted(engines().iterdir()):
        if re.fullmatch(r"[0-9a-f]{12}", folder.name) and folder.is_dir():
            young = time.time() - folder.stat().st_mtime < STARTING_S
            if (folder / "state.json").is_file() or not young:
                found.append(folder)
    return found
