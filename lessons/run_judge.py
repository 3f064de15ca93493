"""Starts `judge` in a process of its own, where files take the places of modules of zero_min."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lessons import interrupt, last_words, replace
from lessons.registry import ROOT
from lessons.sandbox import FOLDER

QUICK = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # these tests need no plugin, and start sooner without


def run_judge(
    places: Mapping[str, str], works: Sequence[Path], *arguments: str, sandbox: Path | None = None, **how: Any
) -> tuple["subprocess.CompletedProcess[str]", last_words.End | None]:
    """What came of it, and how it ended if the tests could not go on, in which line of `works`.

    `arguments` are `judge.main`'s behind the file for last words, and `how` is `interrupt.run`'s. With
    `sandbox` the files run as a hand-in's do, with this folder for files of their own.
    """
    env = {**os.environ, **replace.environment(places), **QUICK}
    if sandbox is not None:  # files of tests are in there, too
        sandbox.mkdir(exist_ok=True)
        env |= dict.fromkeys((FOLDER, "TMPDIR", "TEMP", "TMP"), str(sandbox))
    with tempfile.TemporaryDirectory() as folder:
        words = Path(folder) / "last_words.txt"
        command = [sys.executable, "-m", "lessons.judge", str(words), *arguments]
        done = interrupt.run(command, cwd=ROOT, env=env, **how)
        written = words.read_text(encoding="utf-8") if words.exists() else ""
    return done, last_words.read(written, works)
