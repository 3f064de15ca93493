"""Where libraries are: never of somebody else, somewhere even without a home, and with or without locks."""

import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernels.compilers import Compiler
from zero_full.kernels import builder, library_cache, load
from zero_full.kernels.toolchain import BuildError

Spoil = Callable[[Path], object]  # what somebody may do to a library in a cache
SPOILED: dict[str, tuple[Spoil, str]] = {
    "others write the file": (lambda p: p.chmod(0o775), "has mode 0775, so other users may write"),
    "others write the folder": (lambda p: p.parent.chmod(0o777), "cache is not trusted: it has mode 0777"),
    "a sticky folder": (lambda p: p.parent.chmod(0o1777), "cache is not trusted: it has mode 1777"),
    "others write above": (
        lambda p: p.parent.parent.chmod(0o777),
        "other users may write to .*Set ZERO_FULL_CACHE",
    ),
    "another's file": (lambda p: os.chown(p, 12345, -1), "belongs to user 12345"),
    "another's folder": (
        lambda p: os.chown(p.parent, 12345, -1),
        "cache is not trusted: it belongs to user 12",
    ),
    "a link": (
        lambda p: p.symlink_to(p.rename(p.with_name("x"))),
        "is not a regular file",
    ),
    "a link to nothing": (lambda p: (p.unlink(), p.symlink_to("/nowhere")), "is not a regular file"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "is not a regular file"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_what_another_may_have_written_is_never_loaded(
    how: str,
    cache: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoil, reason = SPOILED[how]
    if "another" in how and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    spoil(builder.build("cpu", cache))
    loaded: list[Path] = []
    monkeypatch.setattr(load.torch.ops, "load_library", loaded.append)
    for attempt in (lambda: builder.find("cpu"), lambda: builder.build("cpu", cache, again=True)):
        with pytest.raises(BuildError, match=reason):
            attempt()
    for each in (load.find("cpu"), load.load.__wrapped__(load.torch.device("cpu"))):
        assert each.path is None and re.search(reason, each.reason)
    assert not loaded and [record.levelname for record in caplog.records] == ["WARNING"]


def test_sticky_folders_above_and_links_of_ones_own_are_fine(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir(mode=0o700)
    monkeypatch.setattr(library_cache, "BUILT", tmp_path / "built")
    monkeypatch.setenv("ZERO_FULL_CACHE", str(tmp_path / "link"))
    umask = os.umask(0o002)
    try:
        assert [builder.build("cpu", library_cache.caches()[0])] == builder.find("cpu")
    finally:
        os.umask(umask)


def test_a_cache_of_somebody_else_does_not_hide_what_the_installation_has_built(
    cache: Path, compiler: Compiler
) -> None:
    builder.build("cpu", cache).chmod(0o777)
    installed = builder.build("cpu", library_cache.BUILT)
    assert builder.find("cpu") == [installed]


# Homes ---------------------------------------------------------------------------------------------


def nobody() -> Path:
    raise RuntimeError("Could not determine home directory.")


HOMES = ("no home", "a home that cannot be entered", "a home that cannot be written to", "usual")


@pytest.mark.parametrize("home", HOMES)
def test_without_a_home_the_cache_is_a_private_folder_among_temporary_ones(
    home: str, tmp_path: Path, cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ZERO_FULL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if home == "no home":
        monkeypatch.setattr(Path, "home", nobody)
    elif home == "a home that cannot be entered":  # root may enter everything that is a folder
        (tmp_path / "home").rmdir()
        (tmp_path / "home").touch()
    elif home == "a home that cannot be written to":
        allowed = os.access

        def outside(path: object, mode: int) -> bool:
            return not str(path).startswith(str(tmp_path / "home")) and allowed(str(path), mode)

        monkeypatch.setattr(os, "access", outside)
    expected = tmp_path / ("home/.cache/zero_full" if home == "usual" else f"zero_full-{os.geteuid()}")
    made = builder.build("cpu", library_cache.caches()[0])
    assert made.parent == expected and expected.stat().st_mode & 0o777 == 0o700
    assert builder.find("cpu") == [made]


def test_what_is_ready_in_a_home_that_cannot_be_written_to_is_found(
    tmp_path: Path, cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZERO_FULL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = builder.build("cpu", library_cache.caches()[0])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert made.parent == tmp_path / "home/zero_full" and builder.find("cpu") == [made]


def test_where_nothing_can_be_written_the_reference_is_used_and_the_reason_said(
    cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZERO_FULL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", no_temporary)
    for tempdir, reason in (
        ("/dev/null", "cannot be written to .*set ZERO_FULL_CACHE"),
        (None, "No usable temporary"),
    ):
        monkeypatch.setattr(tempfile, "tempdir", tempdir)
        loaded = load.load.__wrapped__(load.torch.device("cpu"))
        assert loaded.path is None and re.search(reason, loaded.reason)
        assert load.find("cpu").path is None


def no_temporary() -> str:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")


def test_a_cache_that_cannot_be_written_to_is_named(tmp_path: Path, compiler: Compiler) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match=r"cannot be written to .* set ZERO_FULL_CACHE"):
        builder.build("cpu", tmp_path / "file/below")


# Locks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_named_and_the_work_is_done(
    code: int,
    cache: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    if code == errno.EIO:
        with pytest.raises(BuildError, match="Input/output error"):
            builder.build("cpu", cache)
        return
    assert builder.build("cpu", cache).read_text() == "made\n"
    (record,) = caplog.records
    assert record.levelname == "WARNING" and f"{cache} has no locks" in record.getMessage()
