"""The directories of compiled libraries, their permissions, and the lock during a build.

[Note: trust] The author of a library runs code in every process that loads it. The package's own directory is
trusted like the package. The cache is trusted if only this user and root can write to it. Windows has neither
these permissions nor flock: nothing is compiled or loaded on it.
"""

import contextlib
import errno
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from zero_full.kernels.toolchain import BuildError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("zero_full")
BUILT = Path(__file__).resolve().parent / "built"  # where an editable installation puts what it builds
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class NotTrustedError(BuildError):
    """Other users may have written the library. See [Note: trust]."""


def refuse_here() -> None:
    """Raise BuildError on systems without compiled operators. See [Note: trust]."""
    if fcntl is None or not hasattr(os, "geteuid"):
        raise BuildError("they are compiled on Linux and macOS only: elsewhere torch's own are used")


def caches() -> list[Path]:
    """The directories to search for libraries that were built on first use. New ones go to the first.

    It is ZERO_FULL_CACHE, else zero_full in the user's cache, else, without a writable home, a directory
    among the temporary ones.
    """
    if chosen := os.environ.get("ZERO_FULL_CACHE"):
        return [Path(chosen)]
    home = _users_cache()
    if home is not None and _can_be_made(home):
        return [home]
    temporary = Path(tempfile.gettempdir()) / f"zero_full-{os.geteuid()}"
    return [temporary] if home is None else [temporary, home]


def _users_cache() -> Path | None:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zero_full"
    except RuntimeError:  # a user without a home
        return None


def _can_be_made(directory: Path) -> bool:
    """Whether the directory is writable, or can be made."""
    for place in (directory, *directory.parents):
        try:
            place.stat()
        except FileNotFoundError:
            continue
        except OSError:  # it cannot even be looked at
            return False
        return os.access(place, os.W_OK | os.X_OK)
    return False


def libraries(directory: Path, prefix: str) -> list[Path]:
    """The libraries with this prefix; NotTrustedError if other users may have written one."""
    if directory != BUILT:
        check_folder(directory)
    try:
        there = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise BuildError(f"{directory} cannot be looked at ({error}): set ZERO_FULL_CACHE") from error
    found = [path for path in there if path.name.startswith(prefix) and path.suffix == ".so"]
    for path in found if directory != BUILT else []:
        _refuse(path, path.lstat(), must_be_file=True)
    return found


def check_folder(directory: Path) -> None:
    """Raise NotTrustedError if other users may write to the directory. It may be missing."""
    try:
        folder = directory.resolve(strict=True)
        inside = {place: place.lstat() for place in (directory, folder)}
        above = {place: place.lstat() for place in folder.parents}
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise BuildError(f"{directory} cannot be looked at ({error}): set ZERO_FULL_CACHE") from error
    for place, status in inside.items():
        _refuse(place, status)
    for place, status in above.items():
        if _others_may_write(status) and not status.st_mode & stat.S_ISVTX:  # /tmp is fine
            told = f"{directory} is not trusted: others may write to {place}. Set ZERO_FULL_CACHE"
            raise NotTrustedError(told)


def _refuse(place: Path, status: os.stat_result, must_be_file: bool = False) -> None:
    reason = ""
    if status.st_uid not in (0, os.geteuid()):
        reason = f"belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    elif must_be_file and not stat.S_ISREG(status.st_mode):
        reason = "is a link or something else that is no file"
    elif _others_may_write(status):
        reason = f"has mode {status.st_mode & 0o7777:04o}, so others may write it"
    if reason:
        raise NotTrustedError(f"{place} is not trusted: it {reason}. Remove it, or set ZERO_FULL_CACHE")


def _others_may_write(status: os.stat_result) -> bool:
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) and not stat.S_ISLNK(status.st_mode)


def make(directory: Path) -> None:
    """Make the directory and its parents. Those of a cache are private to this user, and are checked."""
    if directory == BUILT:
        directory.mkdir(parents=True, exist_ok=True)
        return
    for place in (*reversed(directory.parents), directory):
        if not place.exists():
            with contextlib.suppress(FileExistsError):  # another rank was faster
                place.mkdir(mode=0o700)
    check_folder(directory)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock on the file in the `with` block. The lock ends with the process; the file stays.

    On a file system without locks every process continues at once, with a warning.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            told = "so every process of this host compiles for itself: set ZERO_FULL_CACHE to another"
            log.warning("the file system of %s has no locks (%s), %s", path.parent, error.strerror, told)
        yield
