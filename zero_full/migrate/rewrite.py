"""Rewrite a DeepSpeed script: replace the text of names and imports, and keep the rest unchanged."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from zero_full.migrate.name_table import (
    ADAM,
    ADAM_RENAMED,
    MODULES,
    canonical,
    instead_of,
    is_module,
    target_of,
)
from zero_full.migrate.scopes import ROOT, Binding, Scopes, Use, optional_imports

OURS, COMM = "zero_full", MODULES["deepspeed.comm"]
WIDTH = 110


class ManualChange(NamedTuple):
    """A task that is left to do by hand, with its line."""

    line: int
    text: str


class NewImport(NamedTuple):
    """An import that the result needs."""

    module: str
    name: str | None = None  # None: `import module`
    local: str | None = None

    @property
    def text(self) -> str:
        """The import's text without `import` and `from module`."""
        name = self.name or self.module
        return name if self.local in (None, name) else f"{name} as {self.local}"


@dataclass
class EditedText:
    """A script's text and its pending replacements."""

    source: str
    edits: list[tuple[int, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", self.source)  # as Python counts them
        self.lines = lines
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))
        self.newline = "\r\n" if "\r\n" in self.source else "\n"

    def at(self, line: int, column: int) -> int:
        """Return the text offset of a line and column. Columns count UTF-8 bytes, as in `ast`."""
        before = self.lines[line - 1].encode()[:column].decode()
        return self.starts[line - 1] + len(before)

    def span(self, node: ast.stmt | ast.expr | ast.alias) -> tuple[int, int]:
        """Return the start and end offsets of a node."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def replace(self, start: int, stop: int, text: str) -> None:
        """Add a replacement, which `result` applies."""
        self.edits.append((start, stop, text))

    def moved(self, line: int) -> int:
        """Return a line's number in the result."""
        before = {edit for edit in self.edits if edit[1] <= self.starts[line - 1]}
        return line + sum(new.count("\n") - self.source[a:b].count("\n") for a, b, new in before)

    def result(self) -> str:
        """Return the text with all replacements applied."""
        text = self.source
        for start, stop, new in sorted(set(self.edits), reverse=True):
            text = text[:start] + new + text[stop:]
        return text


class Rewrite:
    """The rewriting of one script."""

    def __init__(self, source: str) -> None:
        self.text = EditedText(source)
        self.tree = ast.parse(source)
        self.scopes = Scopes(self.tree)
        self.findings: set[ManualChange] = set()
        self.remarks: set[ManualChange] = set()
        self.optional = optional_imports(self.tree)
        self.new_names: dict[ast.expr, str] = {}  # node of a name or attribute -> its name in zero_full
        self.has_torch = "torch" in self.scopes.top.others
        self.written_imports: set[tuple[int, NewImport]] = set()  # imports written so far, per block
        statements: dict[ast.Import | ast.ImportFrom, list[Binding]] = {}
        for binding in self.scopes.bindings:
            statements.setdefault(binding.statement, []).append(binding)
        for statement, bindings in statements.items():
            self._rewrite_statement(statement, bindings)
        self._annotations()
        self._adam_arguments()

    def result(self) -> str:
        """Return the new text, after checking that it can be parsed."""
        result = self.text.result()
        ast.parse(result)
        return result

    def _report(self, node: ast.stmt | ast.expr, text: str) -> None:
        self.findings.add(ManualChange(node.lineno, text))

    def _report_missing(self, node: ast.stmt | ast.expr, path: str) -> None:
        self._report(node, f"{path} has no counterpart. Instead: {instead_of(path)}")

    # One name -----------------------------------------------------------------------------------

    def _replace_binding(self, binding: Binding) -> list[NewImport | None]:
        """Return the imports that replace this one. None in the list: keep it, as a use still needs it."""
        if binding.alias.name == "*":
            self._report(binding.statement, "import the names that you use, one by one")
            return [None]
        target = target_of(binding.path)
        if target is not None and not is_module(binding.path):
            module, _, name = target.rpartition(".")
            self.new_names |= {use.nodes[0]: target for use in binding.uses}
            return [NewImport(module, name, binding.local)]
        if binding.statement in self.optional and self._stays(binding, target):
            return [None]
        found = [(use, self._find_target(binding, use)) for use in binding.uses]
        if not (binding.uses or target):
            self._report_missing(binding.statement, binding.path)
        module = MODULES.get(canonical(binding.path), "")
        # Always replace deepspeed.comm by torch's module, because the two do not share a process group.
        needed = any(hit is None for _, hit in found) and module != COMM
        kept = [None] if needed or not (binding.uses or target) else []
        by_name = isinstance(binding.statement, ast.Import) and binding.alias.asname is not None
        keeps_local = not kept and (binding.clash or by_name or module == COMM)
        local = binding.local if keeps_local else None
        imports = {NewImport(module, None, local): None} if local and module else {}
        for use, hit in found:
            if hit is not None:
                required = self._rename_use(use, *hit, local, module)
                imports |= {required: None} if required else {}
        if not (imports or kept or binding.uses):
            imports = {NewImport(MODULES.get(canonical(binding.alias.name), OURS)): None}
        return [*kept, *imports]

    def _stays(self, binding: Binding, target: str | None) -> bool:
        """Return whether an optional import stays, as its name has no counterpart, after adding a remark."""
        paths = [".".join([binding.path, *use.names[:count]]) for use in binding.uses for count in range(9)]
        if target is not None or any(map(target_of, paths)):
            return False
        text = f"{binding.path} has no counterpart. This import stays, and fails if it is run. Instead: "
        self.remarks.add(ManualChange(binding.statement.lineno, text + instead_of(binding.path)))
        return True

    def _find_target(self, binding: Binding, use: Use) -> tuple[str, int] | None:
        """Return (new name, number of attributes that it replaces), or None after adding a finding."""
        for count in range(len(use.names), -1, -1):
            path = ".".join([binding.path, *use.names[:count]])
            target = target_of(path)
            if target is not None and (count == len(use.names) or not is_module(path)):
                if self._matches_source(use, count):
                    return target, count
                self._report(use.nodes[0], f"change {path} to {target} inside this string")
                return None
        self._report_missing(use.nodes[0], ".".join([binding.path, *use.names]))
        return None

    def _matches_source(self, use: Use, count: int) -> bool:
        """Return whether the text is at the parser's position, which may be wrong in f-strings."""
        start, stop = self.text.span(use.nodes[0])[0], self.text.span(use.nodes[count])[1]
        name = use.nodes[0]
        assert isinstance(name, ast.Name)
        return re.sub(r"\s", "", self.text.source[start:stop]) == ".".join([name.id, *use.names[:count]])

    def _rename_use(
        self, use: Use, target: str, count: int, local: str | None, module: str
    ) -> NewImport | None:
        """Write the new name. Returns the import that it needs, unless the kept local name suffices."""
        inside = local is not None and f"{target}.".startswith(f"{module}.")
        name = f"{local}{target[len(module) :]}" if inside else target
        self.new_names[use.nodes[count]] = target
        self.text.replace(self.text.span(use.nodes[0])[0], self.text.span(use.nodes[count])[1], name)
        if inside:
            return None
        required = target if target in MODULES.values() else target.rpartition(".")[0]
        return None if required == COMM and self.has_torch else NewImport(required)

    def _annotations(self) -> None:
        """Replace names in types that are written as strings."""
        for node in ast.walk(self.tree):
            places = [getattr(node, name, None) for name in ("annotation", "returns")]
            inside = (each for place in places if isinstance(place, ast.expr) for each in ast.walk(place))
            for each in inside:
                path = each.value if isinstance(each, ast.Constant) else None
                if isinstance(each, ast.Constant) and isinstance(path, str) and path.startswith(f"{ROOT}."):
                    start, stop = self.text.span(each)
                    target = target_of(path) if path.replace(".", "").isidentifier() else None
                    if target and self.text.source[start + 1 : stop - 1] == path:
                        self.text.replace(start + 1, stop - 1, target)

    def _adam_arguments(self) -> None:
        """Rename keyword arguments of Adams."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and self.new_names.get(node.func) == ADAM:
                for keyword in node.keywords:
                    if keyword.arg in ADAM_RENAMED:
                        start = self.text.at(keyword.lineno, keyword.col_offset)
                        self.text.replace(start, start + len(keyword.arg), ADAM_RENAMED[keyword.arg])

    # One statement ------------------------------------------------------------------------------

    def _rewrite_statement(self, statement: ast.Import | ast.ImportFrom, bindings: list[Binding]) -> None:
        block = id(bindings[0].block)
        outcome: dict[ast.alias, list[NewImport | None]] = {alias: [None] for alias in statement.names}
        for binding in bindings:
            made = self._replace_binding(binding)
            new = [m for m in made if m is None or m.name or (block, m) not in self.written_imports]
            self.written_imports |= {(block, m) for m in new if m is not None}
            outcome[binding.alias] = new
        if self._in_place(statement, outcome):
            return
        lines = [*self._comments(statement), *_new_statements(statement, outcome)]
        start, stop = self.text.span(statement)
        line_start = self.text.starts[statement.lineno - 1]
        indent = self.text.source[line_start:start]
        if not lines:
            self._delete(statement, bindings[0].block, start, stop)
        elif indent.strip():
            self.text.replace(start, stop, "; ".join(lines))
        else:
            self.text.replace(start, stop, f"{self.text.newline}{indent}".join(lines))

    def _in_place(
        self, statement: ast.Import | ast.ImportFrom, outcome: dict[ast.alias, list[NewImport | None]]
    ) -> bool:
        """Replace names only, if each becomes a single name, so that layout and comments stay."""
        imports = [new[0] for new in outcome.values() if len(new) == 1]
        if len(imports) < len(outcome):
            return False
        if isinstance(statement, ast.ImportFrom):
            modules = {m.module for m in imports if m is not None and m.name}
            if None in imports or len(modules) != 1 or not all(m and m.name for m in imports):
                return set(imports) == {None}
            start, _ = self.text.span(statement)
            old = re.compile(r"from\s+([\w.]+)").match(self.text.source, start)
            if old is None:
                return False
            self.text.replace(*old.span(1), modules.pop())
        elif any(m is not None and m.name for m in imports):
            return False
        for alias, m in zip(outcome, imports, strict=True):
            if m is not None:
                self.text.replace(*self.text.span(alias), m.text)
        return True

    def _comments(self, statement: ast.stmt) -> list[str]:
        """Return the comments inside a statement that will be rewritten."""
        start, stop = self.text.span(statement)
        tokens = tokenize.generate_tokens(io.StringIO(self.text.source[start:stop]).readline)
        return [token.string for token in tokens if token.type == tokenize.COMMENT]

    def _delete(self, statement: ast.stmt, block: list[ast.stmt], start: int, stop: int) -> None:
        line, after = self.text.starts[statement.lineno - 1], self.text.starts[statement.end_lineno or 0]
        alone = not (self.text.source[line:start] + self.text.source[stop:after]).strip()
        if len(block) == 1 or not alone:
            self.text.replace(start, stop, "pass")
        else:
            self.text.replace(line, after, "")


def _new_statements(
    statement: ast.Import | ast.ImportFrom, outcome: dict[ast.alias, list[NewImport | None]]
) -> Iterator[str]:
    """Yield the statements that replace this one, starting with the names that stay."""
    kept = [f"{a.name} as {a.asname}" if a.asname else a.name for a, new in outcome.items() if None in new]
    imports = list(dict.fromkeys(m for new in outcome.values() for m in new if m is not None))
    if kept:
        beginning = f"from {statement.module} " if isinstance(statement, ast.ImportFrom) else ""
        yield _line(f"{beginning}import", kept)
    plain = sorted((m for m in imports if m.name is None), key=lambda m: m.module == OURS)
    yield from (f"import {m.text}" for m in plain)
    for module in dict.fromkeys(m.module for m in imports if m.name is not None):
        yield _line(f"from {module} import", [m.text for m in imports if m.name and m.module == module])


def _line(beginning: str, names: Iterable[str]) -> str:
    line = f"{beginning} {', '.join(names)}"
    if len(line) <= WIDTH or not beginning.startswith("from"):
        return line
    return f"{beginning} ({line[len(beginning) + 1 :]})"
