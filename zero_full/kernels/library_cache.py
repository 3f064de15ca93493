"""Directories of compiled libraries, their permissions, and the lock during a build.

[Note: trust] A library runs code in every process that loads it. The package's own directory is trusted like
the package. The cache is trusted if only this user and root can write to it. Windows has neither these
permissions nor flock: nothing is compiled or loaded on it.
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
BUILT = Path(__file__).resolve().parent / "built"  # libraries of an editable installation
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class NotTrustedError(BuildError):
    """Raised if other users may have written the library. See [Note: trust]."""


def check_platform() -> None:
    """Raise BuildError on systems without compiled operators. See [Note: trust]."""
    if fcntl is None or not hasattr(os, "geteuid"):
        raise BuildError("operators are compiled on Linux and macOS only")


def caches() -> list[Path]:
    """Return the directories to search for libraries that were built on first use. New ones go to the first.

    It is ZERO_FULL_CACHE, else zero_full in the user's cache, else, without a writable home, a directory
    among the temporary ones.
    """
    if chosen := os.environ.get("ZERO_FULL_CACHE"):
        return [Path(chosen)]
    home = None
    with contextlib.suppress(RuntimeError):  # a user without a home
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zero_full"
    if home is not None and _is_writable(home):
        return [home]
    temporary = Path(tempfile.gettempdir()) / f"zero_full-{os.geteuid()}"
    return [temporary] if home is None else [temporary, home]


def _is_writable(directory: Path) -> bool:
    """Return whether the directory is writable, or can be made."""
    for path in (directory, *directory.parents):
        try:
            path.stat()
        except FileNotFoundError:
            continue
        except OSError:  # no permission to look at it
            return False
        return os.access(path, os.W_OK | os.X_OK)
    return False


def libraries(directory: Path, prefix: str) -> list[Path]:
    """Return the libraries with this prefix; NotTrustedError if other users may have written one."""
    if directory != BUILT:
        check_folder(directory)
    try:
        paths = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(directory, error) from error
    found = [path for path in paths if path.name.startswith(prefix) and path.suffix == ".so"]
    for path in found if directory != BUILT else []:
        _check_owner(path, path.lstat(), must_be_file=True)
    return found


def check_folder(directory: Path) -> None:
    """Raise NotTrustedError if other users may write to the directory. It may be missing."""
    try:
        folder = directory.resolve(strict=True)
        own = {path: path.lstat() for path in (directory, folder)}
        parents = {path: path.lstat() for path in folder.parents}
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise _unreadable(directory, error) from error
    for path, status in own.items():
        _check_owner(path, status)
    for path, status in parents.items():
        if _is_writable_by_others(status) and not status.st_mode & stat.S_ISVTX:  # /tmp is fine
            raise NotTrustedError(
                f"{directory} is not trusted: other users may write to {path}. Set ZERO_FULL_CACHE"
            )


def _unreadable(directory: Path, error: OSError) -> BuildError:
    return BuildError(f"{directory} cannot be read ({error}): set ZERO_FULL_CACHE")


def _check_owner(path: Path, status: os.stat_result, must_be_file: bool = False) -> None:
    reason = ""
    if status.st_uid not in (0, os.geteuid()):
        reason = f"belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
    elif must_be_file and not stat.S_ISREG(status.st_mode):
        reason = "is not a regular file"
    elif _is_writable_by_others(status):
        reason = f"has mode {status.st_mode & 0o7777:04o}, so other users may write to it"
    if reason:
        raise NotTrustedError(f"{path} is not trusted: it {reason}. Remove it, or set ZERO_FULL_CACHE")


def _is_writable_by_others(status: os.stat_result) -> bool:
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) and not stat.S_ISLNK(status.st_mode)


def make_directory(directory: Path) -> None:
    """Make the directory and its parents. Those of a cache are private to this user, and are checked."""
    if directory == BUILT:
        directory.mkdir(parents=True, exist_ok=True)
        return
    for path in (*reversed(directory.parents), directory):
        if not path.exists():
            with contextlib.suppress(FileExistsError):  # another rank was faster
                path.mkdir(mode=0o700)
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
            log.warning(
                "the file system of %s has no locks (%s), so every process of this host compiles its own "
                "library: set ZERO_FULL_CACHE to another file system",
                path.parent,
                error.strerror,
            )
        yield
