"""From DeepSpeed's names to ours, in scripts and configurations: `python -m zero_full migrate`."""

from zero_full.migrate.command import MigrateError, check, main, migrate

__all__ = ["MigrateError", "check", "main", "migrate"]
