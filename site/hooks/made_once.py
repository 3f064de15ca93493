"""What takes seconds to make is kept in build/ until something that it was made from changes."""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from places import ROOT

CACHE = ROOT / "build" / "site-data"


def made_once(name: str, made_from: Iterable[Path], make: Callable[[], str]) -> str:
    """`make()`, or what it returned when these files were as they are now."""
    digest = hashlib.sha256()
    for path in sorted(made_from):
        digest.update(path.as_posix().encode() + path.read_bytes())
    kept = CACHE / f"{name}-{digest.hexdigest()[:16]}"
    if not kept.exists():
        text = make()
        CACHE.mkdir(parents=True, exist_ok=True)
        for old in CACHE.glob(f"{name}-*"):
            old.unlink(missing_ok=True)
        fresh = CACHE / f"new-{name}-{os.getpid()}"
        fresh.write_text(text)
        fresh.replace(kept)  # at once: another build may look for it
    return kept.read_text()
