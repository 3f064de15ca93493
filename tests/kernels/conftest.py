"""What pytest hands to tests of the builder and of block I/O by name."""

from tests.kernels.compilers import cache, compiler, nvcc
from tests.kernels.file_io import compiled, in_new_process, io, server

__all__ = ["cache", "compiled", "compiler", "in_new_process", "io", "nvcc", "server"]
