"""Find a script's imports of DeepSpeed and the uses of these names, by scope. The script is not executed."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

ROOT = "deepspeed"
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(eq=False)
class Binding:
    """A local name bound by an import of DeepSpeed."""

    statement: ast.Import | ast.ImportFrom
    alias: ast.alias
    local: str
    path: str  # full DeepSpeed name
    scope: "Scope"
    block: list[ast.stmt]
    uses: list["Use"] = field(default_factory=list)
    clash: bool = False  # the scope also binds this name to another object


@dataclass(frozen=True)
class Use:
    """A name with its chain of attributes, such as `deepspeed.zero.Init`."""

    nodes: tuple[ast.expr, ...]  # the name, then one for each attribute
    names: tuple[str, ...]  # the attributes


@dataclass(eq=False)
class Scope:
    """The names bound by a module, function, class or comprehension."""

    above: "Scope | None"
    is_class: bool = False
    imports: dict[str, list[Binding]] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    of_module: set[str] = field(default_factory=set)  # declared global

    def find(self, name: str) -> list[Binding]:
        """Return the DeepSpeed imports that this name refers to, if any."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.imports:
                return scope.imports[name]
            if name in scope.others and name not in scope.of_module:
                return []
            scope = scope.above
            while scope is not None and scope.is_class:
                scope = scope.above
        return []


class Scopes(ast.NodeVisitor):
    """All DeepSpeed bindings of a script with their uses."""

    def __init__(self, tree: ast.Module) -> None:
        self.top = self.scope = Scope(None)
        self.bindings: list[Binding] = []
        self.loads: list[tuple[Scope, str, Use]] = []
        self.fallbacks: list[tuple[Scope, ast.Name]] = []  # `deepspeed = None` in case the import fails
        self.blocks = {id(s): block for block in _blocks(tree) for s in block}
        self.visit(tree)
        self._resolve()

    def _resolve(self) -> None:
        for scope, name in self.fallbacks:
            if name.id in scope.imports:
                self.loads.append((scope, name.id, Use((name,), ())))
            else:
                scope.others.add(name.id)
        for binding in self.bindings:
            binding.clash = binding.local in binding.scope.others
        for scope, local, use in self.loads:
            for binding in scope.find(local):
                binding.uses.append(use)

    def _bind(self, name: str) -> None:
        self._scope_of(name).others.add(name)

    def _scope_of(self, name: str) -> Scope:
        """Return the scope in which a binding of this name would be."""
        return self.top if name in self.scope.of_module else self.scope

    # Imports ------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        """Bind `deepspeed` for `import deepspeed.zero`, or `z` for `import deepspeed.zero as z`."""
        for alias in node.names:
            local = alias.asname or alias.name.split(".")[0]
            if alias.name.split(".")[0] == ROOT:
                self._import(node, alias, local, alias.name if alias.asname else ROOT)
            else:
                self._bind(local)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Bind the names of a statement such as `from deepspeed.zero import Init`."""
        ours = node.level == 0 and (node.module or "").split(".")[0] == ROOT
        for alias in node.names:
            local = alias.asname or alias.name
            if ours:
                self._import(node, alias, local, f"{node.module}.{alias.name}")
            else:
                self._bind(local)

    def _import(self, node: ast.Import | ast.ImportFrom, alias: ast.alias, local: str, path: str) -> None:
        scope = self._scope_of(local)
        binding = Binding(node, alias, local, path, scope, self.blocks[id(node)])
        scope.imports.setdefault(local, []).append(binding)
        self.bindings.append(binding)

    # Uses ---------------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> None:
        """Record a use, or another binding of the name."""
        if isinstance(node.ctx, ast.Load):
            self.loads.append((self.scope, node.id, Use((node,), ())))
        else:
            self._bind(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Record a chain of attributes as one use."""
        chain: list[ast.expr] = [node]
        while isinstance(chain[-1], ast.Attribute):
            chain.append(chain[-1].value)
        name = chain[-1]
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load):
            chain.reverse()
            names = tuple(each.attr for each in chain if isinstance(each, ast.Attribute))
            self.loads.append((self.scope, name.id, Use(tuple(chain), names)))
        else:
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Record the targets of an assignment. `deepspeed = None` is a fallback for a failed import."""
        is_fallback = isinstance(node.value, ast.Constant) and node.value.value in (None, False)
        for target in node.targets:
            if is_fallback and isinstance(target, ast.Name) and target.id not in self.scope.of_module:
                self.fallbacks.append((self.scope, target))
            else:
                self.visit(target)
        self.visit(node.value)

    # Scopes -------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: Function) -> None:
        """Enter a function's scope with its arguments. Defaults and annotations belong to the outer scope."""
        inside: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else [*node.body]
        if not isinstance(node, ast.Lambda):
            self._bind(node.name)
        for outside in ast.iter_child_nodes(node):
            if outside not in inside:
                self.visit(outside)
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        every += [each for each in (node.args.vararg, node.args.kwarg) if each is not None]
        self._enter(Scope(self.scope, others={each.arg for each in every}), inside)

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Enter the scope of a class. Its names are not visible inside its methods."""
        self._bind(node.name)
        for outside in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(outside)
        self._enter(Scope(self.scope, is_class=True), list(node.body))

    def visit(self, node: ast.AST) -> None:
        """Visit a node. Comprehensions have a scope of their own."""
        if isinstance(node, Comprehension):
            self._enter(Scope(self.scope), ast.iter_child_nodes(node))
        else:
            super().visit(node)

    def _enter(self, scope: Scope, inside: Iterable[ast.AST]) -> None:
        self.scope, before = scope, self.scope
        for each in inside:
            self.visit(each)
        self.scope = before

    # Other ways to bind -------------------------------------------------------------------------

    def visit_Global(self, node: ast.Global) -> None:
        """Record names declared global."""
        self.scope.of_module.update(node.names)

    def visit_ExceptHandler(self, node: ast.ExceptHandler | ast.MatchAs) -> None:
        """Bind the name of `except Error as name`, `case Pattern() as name` or `case name`."""
        if node.name:
            self._bind(node.name)
        self.generic_visit(node)

    visit_MatchAs = visit_ExceptHandler  # noqa: N815


IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


def optional_imports(tree: ast.AST) -> set[ast.Import | ast.ImportFrom]:
    """Return imports that a script may do without: in an `if`, or in a `try` that catches ImportError."""
    found: set[ast.Import | ast.ImportFrom] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and not _is_always_true(node.test):
            inside = [*node.body, *node.orelse]
        elif isinstance(node, ast.Try) and any(map(_catches_import_error, node.handlers)):
            inside = [*node.body, *(each for handler in node.handlers for each in handler.body)]
        else:
            continue
        every = (each for statement in inside for each in ast.walk(statement))
        found.update(each for each in every if isinstance(each, ast.Import | ast.ImportFrom))
    return found


def _is_always_true(test: ast.expr) -> bool:
    """Return whether a condition holds in a script that is started: a constant, or `__name__ == ...`."""
    names = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}
    return "__name__" in names or (isinstance(test, ast.Constant) and bool(test.value))


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    kinds = (
        {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)} if handler.type else set()
    )
    return handler.type is None or not kinds.isdisjoint(IMPORT_ERRORS)


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block
