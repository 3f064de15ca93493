"""What each name of DeepSpeed's is here: the tables that `python -m zero_full migrate` works by."""

from zero_full.migrate.calls import missing_of_engines
from zero_full.migrate.name_table import INSTEAD, MODULES, NAMES, PARAMETER


def same(_: str, page: str) -> str:
    """Names that have a counterpart, those of two modules in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for old, new in NAMES.items():
        (theirs, was), (ours, name) = (path.rsplit(".", 1) for path in (old, new))
        rows.setdefault((theirs, ours), []).append(f"`{was}`" if was == name else f"`{was}` → `{name}`")
    lines = ["| DeepSpeed | here | names |", "|---|---|---|"]
    lines += [f"| `{a}` | `{b}` | {', '.join(names)} |" for (a, b), names in rows.items()]
    whole = [old for old in MODULES if not any(old == theirs for theirs, _ in rows)]
    assert not whole, whole  # a module without names of its own would need a row
    comm = f"| `deepspeed.comm` | `{MODULES['deepspeed.comm']}` | all others that torch has |"
    return "\n".join([*lines, comm]) + "\n"


def other(_: str, page: str) -> str:
    """Names that have none, and methods of engines."""
    lines = ["| DeepSpeed | instead |", "|---|---|"]
    lines += [f"| `{name}` | {_as_prose(text)} |" for name, text in sorted(INSTEAD.items())[1:]]
    lines += [f"| `engine.{name}` | {_as_prose(text)} |" for name, text in missing_of_engines().items()]
    lines += [f"| `p.{name}` of a parameter | {_as_prose(text)} |" for name, text in PARAMETER.items()]
    return "\n".join(lines) + "\n"


def _as_prose(text: str) -> str:
    return text.replace("|", "\\|")
