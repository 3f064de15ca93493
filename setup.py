"""What pyproject.toml cannot say: compile csrc/ in an editable installation, and pack it into wheels.

A wheel has no binaries, because it would then fit one machine only: they are built on first use.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def compile_operators() -> None:
    """Compile what this machine has compilers for. Failures are printed: the package works without."""
    sys.path.insert(0, str(ROOT))
    # These import neither torch nor the rest of the package.
    from zero_full.kernels import builder, library_cache, toolchain

    for part in builder.PARTS:
        try:
            print(f"zero_full: {builder.build(part, library_cache.BUILT, again=True)}")
        except (toolchain.BuildError, OSError) as error:
            print(f"zero_full: no compiled operators for {part}, torch's own are used: {error}")


class BuildPy(build_py):
    """Copies the package, and compiles csrc/ or packs it."""

    def run(self) -> None:
        """Compile in an editable installation; copy csrc/ into a wheel."""
        super().run()
        if self.editable_mode:
            compile_operators()
        else:
            shutil.copytree(ROOT / "csrc", Path(self.build_lib) / "zero_full/csrc", dirs_exist_ok=True)

    def get_source_files(self) -> list[str]:
        """Add csrc/ to a source distribution."""
        sources = sorted((ROOT / "csrc").rglob("*.*"))
        return [*super().get_source_files(), *(os.path.relpath(path, ROOT) for path in sources)]


setup(cmdclass={"build_py": BuildPy})
