"""Plain files, and JSON of any source."""

import errno
import json
import stat
from pathlib import Path
from typing import Any

# No file that a tool reads is nested deeper; its readers may recurse.
DEEPEST = 64
# The file by which a directory is a checkpoint of a run.
FACTS = "facts.json"
# The model configs and tables that come with the project.
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def plain_file(path: str | Path) -> Path:
    """The path, if a plain file is there; OSError otherwise: a FIFO could block for ever.

    Where the directory has no `configs/...`, as beside an installed wheel, it is the project's own file.
    """
    path = Path(path)
    if path.parts[:1] == (CONFIGS.name,) and not path.exists():
        own = CONFIGS.parent / path
        path = own if own.exists() else path
    if not stat.S_ISREG(path.stat().st_mode):
        kind = "is a directory" if path.is_dir() else "is not a plain file"
        raise OSError(errno.EINVAL, kind, str(path))
    return path


def plain_text(path: str | Path, most_mib: int = 64, errors: str = "strict") -> str:
    """The text of a plain file; OSError where it is larger, as a file given by mistake may be."""
    path = plain_file(path)
    if path.stat().st_size > most_mib * 2**20:
        raise OSError(errno.EFBIG, f"is larger than {most_mib} MiB", str(path))
    return path.read_text("utf-8-sig", errors)


def shipped_config(name: str) -> str:
    """The path of a config that comes with the project, by its name; other names unchanged."""
    ours = name.removesuffix(".json") in {path.stem for path in CONFIGS.glob("*.json")}
    if not ours or Path(name).exists():
        return name
    return f"{CONFIGS.name}/{name.removesuffix('.json')}.json"


def parse_json(text: str | bytes) -> Any:
    """JSON from any source; ValueError for anything else, and for JSON that is nested too deeply."""
    try:
        value = json.loads(text)
        if _depth(value) <= DEEPEST:
            return value
    except RecursionError:
        pass
    raise ValueError("nested too deeply")


def _depth(value: Any) -> int:
    """Levels of a JSON value; 1 for a number or a text."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)
