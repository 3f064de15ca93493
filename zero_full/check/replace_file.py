"""Replace a text file atomically: a reader sees the old content or the new one."""

import os
from pathlib import Path

from zero_full.errors import UsageError


def replace_file(path: Path, content: bytes) -> None:
    """Write a file, or replace its content and keep its permissions. Links stay links."""
    target = path.resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb") as file:
            file.write(content)
        if target.exists():
            part.chmod(target.stat().st_mode & 0o7777)
        part.replace(target)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from None
    finally:
        part.unlink(missing_ok=True)
