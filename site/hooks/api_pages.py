"""Reference of public names: signatures and docstrings as they stand in the code."""

import ast
import re
from functools import cache
from importlib import import_module

from places import ROOT, SiteError
from snippets import Defined, find, line_link, lines_of, tree_of

Function = ast.FunctionDef | ast.AsyncFunctionDef
COLUMNS = re.compile(r"(\S+(?: \S+)*)  +(\S.*)$")
WIDE = 96  # a signature that does not fit takes a line an argument


@cache
def exported(package: str) -> tuple[str, ...]:
    """The names in `__all__`."""
    return tuple(import_module(package).__all__)


def home_of(package: str, name: str) -> str:
    """The file that defines what a package gives under this name."""
    path = _module_file(package.replace(".", "/"))
    while True:
        tree = tree_of(path)
        if any(getattr(node, "name", None) == name or _assigns(node, name) for node in tree.body):
            return path
        source = next(
            (
                n
                for n in ast.walk(tree)
                if isinstance(n, ast.ImportFrom) and name in [alias.name for alias in n.names]
            ),
            None,
        )
        if source is None:
            raise SiteError(f"{path} neither defines nor imports {name}")
        path = _file_of(source, path)


def _file_of(source: ast.ImportFrom, importer: str) -> str:
    above = importer.split("/")[: -source.level] if source.level else []
    base = "/".join([*above, *(source.module or "").split(".")])
    return _module_file(base)


def _module_file(base: str) -> str:
    candidates = (f"{base}.py", f"{base}/__init__.pyi")  # a package's stub has its public names
    return next((path for path in candidates if (ROOT / path).exists()), f"{base}/__init__.py")


def _assigns(node: ast.stmt, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def render(dotted: str, page: str) -> str:
    """Markdown for `zero_full.Engine`: heading, signature, docstring and, for a class, its public members."""
    package, _, name = dotted.rpartition(".")
    path = home_of(package, name)
    defined = [n for n in tree_of(path).body if getattr(n, "name", None) == name]
    if not defined:
        return _constant(dotted, path, name, page)
    node = find(path, name)
    if isinstance(node, ast.ClassDef):
        return _class(dotted, path, node, page)
    return f"### {name} {{ #{dotted} }}\n\n{_signature(node, name, path, page)}\n\n{_says(node)}\n"


def _constant(dotted: str, path: str, name: str, page: str) -> str:
    node = next(n for n in tree_of(path).body if _assigns(n, name))
    return (
        f"### {name} {{ #{dotted} }}\n\n{_source(path, node, page)}\n\n```python\n{ast.unparse(node)}\n```\n"
    )


def _class(dotted: str, path: str, node: ast.ClassDef, page: str) -> str:
    fields = _fields(path, node)
    made = next((n for n in node.body if isinstance(n, Function) and n.name == "__init__"), None)
    bases = [ast.unparse(base) for base in node.bases if ast.unparse(base) not in ("ABC", "object")]
    parts = [f"### {node.name} {{ #{dotted} }}\n"]
    if made is not None:
        parts.append(_signature(made, node.name, path, page, skip_self=True))
    else:
        shown = [f"class {node.name}({', '.join(bases)}):", *(fields or ["    ..."])]
        parts.append(f"{_source(path, node, page)}\n\n```python\n" + "\n".join(shown) + "\n```")
    parts.append(_says(node))
    for file, owner in [(path, node), *_bases_of_ours(path, node)]:
        parts += [_member(dotted, file, n, page) for n in owner.body if _is_public(n, made)]
    return "\n\n".join(parts) + "\n"


def _fields(path: str, node: ast.ClassDef) -> list[str]:
    """The fields of a dataclass or a typed dict, with the comments that stand beside them."""
    kinds = {*map(ast.unparse, node.bases), *(ast.unparse(d).partition("(")[0] for d in node.decorator_list)}
    if not kinds & {"dataclass", "NamedTuple", "TypedDict"}:
        return []
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    return [lines_of(path)[i - 1] for n in fields for i in range(n.lineno, (n.end_lineno or n.lineno) + 1)]


def _bases_of_ours(path: str, node: ast.ClassDef) -> list[tuple[str, ast.ClassDef]]:
    """Base classes whose members are documented with those of the class: defined in the same package."""
    found: list[tuple[str, ast.ClassDef]] = []
    for base in node.bases:
        name = ast.unparse(base)
        sources = [n for n in ast.walk(tree_of(path)) if isinstance(n, ast.ImportFrom)]
        source = next((n for n in sources if name in [alias.name for alias in n.names]), None)
        if source is not None and (source.module or "").split(".")[0] == path.split("/")[0]:
            file = _file_of(source, path)
            owner = find(file, name)
            if isinstance(owner, ast.ClassDef) and name not in exported(path.split("/")[0]):
                found.append((file, owner))
    return found


def _is_public(node: ast.stmt, made: Function | None) -> bool:
    return isinstance(node, Function) and node is not made and not node.name.startswith("_")


def _member(owner: str, path: str, node: ast.stmt, page: str) -> str:
    assert isinstance(node, Function)
    kinds = {ast.unparse(d) for d in node.decorator_list}
    if any(kind.endswith(".setter") for kind in kinds):
        return ""
    if "property" in kinds or "cached_property" in kinds:
        returns = f": {ast.unparse(node.returns)}" if node.returns else ""
        shown = f"{_source(path, node, page)}\n\n```python\n{node.name}{returns}\n```"
    else:
        shown = _signature(node, node.name, path, page, skip_self="staticmethod" not in kinds)
    return (
        f"#### {owner.rpartition('.')[2]}.{node.name} {{ #{owner}.{node.name} }}\n\n{shown}\n\n{_says(node)}"
    )


def _signature(node: Function, name: str, path: str, page: str, skip_self: bool = False) -> str:
    arguments = _arguments(node.args, skip_self)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    text = f"{name}({', '.join(arguments)}){returns}"
    if len(text) > WIDE:
        text = f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returns}"
    return f"{_source(path, node, page)}\n\n```python\n{text}\n```"


def _arguments(given: ast.arguments, skip_self: bool) -> list[str]:
    plain = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    shown = [_argument(a, d) for a, d in zip(plain, defaults, strict=True)][skip_self:]
    if given.vararg:
        shown.append(f"*{ast.unparse(given.vararg)}")
    elif given.kwonlyargs:
        shown.append("*")
    shown += [_argument(a, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [*shown, f"**{ast.unparse(given.kwarg)}"] if given.kwarg else shown


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(argument)
    sign = " = " if argument.annotation else "="
    return f"{ast.unparse(argument)}{sign}{ast.unparse(default)}"


def _source(path: str, node: ast.stmt, page: str) -> str:
    where = f'<a href="{line_link(path, node.lineno, page)}"><code>{path}</code>, line {node.lineno}</a>'
    return f'<p class="snippet-from">{where}</p>'


def _says(node: Defined) -> str:
    """The docstring, which is written in Markdown. A block of names and texts in columns becomes a list."""
    paragraphs = (ast.get_docstring(node) or "").split("\n\n")
    return "\n\n".join(_listed(p) if _in_columns(p) else p for p in paragraphs)


def _in_columns(paragraph: str) -> bool:
    lines = paragraph.splitlines()
    return len(lines) > 1 and all(COLUMNS.match(line) or line.startswith("   ") for line in lines)


def _listed(paragraph: str) -> str:
    items: list[str] = []
    for line in paragraph.splitlines():
        if columns := COLUMNS.match(line):
            items.append(f"* `{columns[1]}`: {columns[2]}")
        else:
            items[-1] += f" {line.strip()}"
    return "\n".join(items)


def check_complete(text: str, package: str, page: str) -> None:
    """Fail unless the page has every exported name once."""
    for name in exported(package):
        times = text.count(f"<!-- api: {package}.{name} -->")
        if times != 1:
            raise SiteError(f"{page} has `<!-- api: {package}.{name} -->` {times} times; it needs it once")
