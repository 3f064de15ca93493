"""The rules about several keys of a configuration, for the page that checks one: Python, translated.

`zero_full/config/rules.py` is the only place where these rules stand. Its functions use little of Python,
and what is not known here stops the build. Whole numbers become BigInt, which compare with other numbers as
Python's do, and never turn into them by accident.
"""

import ast
import json
from pathlib import Path

from places import ROOT, SiteError

SOURCE = "zero_full/config/rules.py"
OPERATORS: dict[type[ast.AST], str] = {
    **{ast.And: "&&", ast.Or: "||", ast.Mult: "*", ast.Mod: "%", ast.Add: "+", ast.Pow: "**"},
    ast.FloorDiv: "/",  # of BigInts above 0
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
}
METHODS = {"lower": "toLowerCase"}


def translated() -> str:
    """JavaScript: an object with a generator for each function of the file."""
    tree = ast.parse(Path(ROOT / SOURCE).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    constants = [_statement(node) for node in tree.body if isinstance(node, ast.Assign)]
    names = ", ".join(node.name for node in functions)
    lines = [f"const {line}" for line in constants] + [_function(node) for node in functions]
    return "\n".join(["(() => {", '"use strict"', *lines, f"return {{ {names} }}", "})()"])


def _refused(node: ast.AST) -> SiteError:
    written = ast.unparse(node).partition("\n")[0]
    return SiteError(
        f"{SOURCE}, line {getattr(node, 'lineno', '?')}: rules_in_js.py cannot translate {written}"
    )


def _function(node: ast.FunctionDef) -> str:
    stored = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    loops = {name.id for each in ast.walk(node) if isinstance(each, ast.For) for name in _names(each.target)}
    local = dict.fromkeys(
        each.id for each in stored if isinstance(each.ctx, ast.Store) and each.id not in loops
    )
    arguments = ", ".join(argument.arg for argument in node.args.args)
    declared = [f"let {', '.join(local)}"] if local else []
    body = [_statement(each) for each in node.body if not _is_text(each)]
    return "\n".join([f"function* {node.name}({arguments}) {{", *declared, *body, "}"])


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _names(target: ast.expr) -> list[ast.Name]:
    return [node for node in ast.walk(target) if isinstance(node, ast.Name)]


def _block(nodes: list[ast.stmt]) -> str:
    return "{\n" + "\n".join(_statement(node) for node in nodes) + "\n}"


def _statement(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield | ast.YieldFrom):
        word = "yield" if isinstance(node.value, ast.Yield) else "yield*"
        return f";{word} {_expression(node.value.value)}" if node.value.value else ";yield"
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        plain = f"{_expression(node.targets[0])} = {_expression(node.value)}"
        return plain if isinstance(node.targets[0], ast.Name) else f";{plain}"
    if isinstance(node, ast.If):
        other = f" else {_block(node.orelse)}" if node.orelse else ""
        return f"if ({_expression(node.test)}) {_block(node.body)}{other}"
    if isinstance(node, ast.For) and not node.orelse:
        return f"for (const {_expression(node.target)} of {_expression(node.iter)}) {_block(node.body)}"
    raise _refused(node)


def _expression(node: ast.expr) -> str:
    """The same value in JavaScript, in brackets where it has parts."""
    match node:
        case ast.Constant(value=bool() | None):
            return json.dumps(node.value)
        case ast.Constant(value=int()):
            return f"{node.value}n"
        case ast.Constant(value=str() | float()):
            return json.dumps(node.value)
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{_expression(node.value)}.{node.attr}"
        case ast.Tuple():
            return f"[{', '.join(map(_expression, node.elts))}]"
        case ast.JoinedStr():
            return f"[{', '.join(map(_part, node.values))}].join('')"
        case ast.IfExp():
            return f"({_expression(node.test)} ? {_expression(node.body)} : {_expression(node.orelse)})"
        case ast.UnaryOp(op=ast.Not()):
            return f"!{_expression(node.operand)}"
        case ast.BoolOp():
            return f"({f' {OPERATORS[type(node.op)]} '.join(map(_expression, node.values))})"
        case ast.BinOp() if type(node.op) in OPERATORS:
            return f"({_expression(node.left)} {OPERATORS[type(node.op)]} {_expression(node.right)})"
        case ast.Compare(ops=[operator], comparators=[right]):
            return _comparison(node, operator, right)
        case ast.Call(keywords=[]):
            return _call(node)
    raise _refused(node)


def _part(node: ast.expr) -> str:
    if isinstance(node, ast.FormattedValue) and node.conversion == -1 and node.format_spec is None:
        return f"zeroPython.str({_expression(node.value)})"
    return _expression(node)


def _comparison(node: ast.Compare, operator: ast.cmpop, right: ast.expr) -> str:
    one, other = _expression(node.left), _expression(right)
    if isinstance(operator, ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
        sign = "!" if isinstance(operator, ast.NotEq | ast.IsNot) else ""
        return f"{sign}zeroPython.same({one}, {other})"
    if isinstance(operator, ast.In):
        return f"zeroPython.has({other}, {one})"
    if type(operator) in OPERATORS:
        return f"({one} {OPERATORS[type(operator)]} {other})"
    raise _refused(node)


def _call(node: ast.Call) -> str:
    arguments = [_expression(each) for each in node.args]
    if isinstance(node.func, ast.Name):
        if node.func.id == "Rule":
            key, why, remedy, *read = arguments
            return f"({{ key: {key}, why: {why}, remedy: {remedy}, read: {''.join(read) or '[]'} }})"
        return f"{node.func.id}({', '.join(arguments)})"
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and not arguments:
        return f"{_expression(node.func.value)}.{METHODS[node.func.attr]}()"
    raise _refused(node)
