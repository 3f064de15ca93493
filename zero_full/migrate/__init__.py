"""Migrate DeepSpeed scripts and check their configurations: `python -m zero_full migrate`."""

from zero_full.errors import MigrateError
from zero_full.migrate.migrate_command import check, main, migrate

__all__ = ["MigrateError", "check", "main", "migrate"]
