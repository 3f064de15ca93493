"""What pytest hands to tests of block I/O by name."""

from tests.kernels.file_io import compiled, in_new_process, io, server

__all__ = ["compiled", "in_new_process", "io", "server"]
