# SPDX-License-Identifier: BSD-3-Clause
"""Hard limits on the size of modules and functions."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

import paceline

SRC = Path(paceline.__file__).parent
FILES = {str(path.relative_to(SRC)): path for path in sorted(SRC.rglob("*.py"))}

MODULE_LINES = 400
FUNCTION_LINES = 50
PARAMETERS = 6
CONSTRUCTOR_PARAMETERS = 8
CORE_CODE_LINES = 1000

every_file = pytest.mark.parametrize("name", FILES)


def functions(tree):
    """Return every function and method, nested ones included."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def is_docstring(node):
    """Return whether the node is the docstring of a module, class, function or field."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def length(node):
    return node.end_lineno - node.lineno + 1


def lines_without_docstring(function):
    first = function.body[0]
    return length(function) - (length(first) if is_docstring(first) else 0)


def parameters(function):
    """Return the number of parameters that a caller may pass, without `self` and `cls`."""
    a = function.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    own = names[:1] in (["self"], ["cls"])
    return len(names) - own + (a.vararg is not None) + (a.kwarg is not None)


def code_lines(path):
    """Return the number of lines that aren't blank, a comment or a docstring."""
    source = path.read_text(encoding="utf-8")
    docs = {
        line
        for node in ast.walk(ast.parse(source))
        if is_docstring(node)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in (*empty, tokenize.ENDMARKER)
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docs)


@every_file
def test_module_fits_on_a_few_screens(name):
    assert len(FILES[name].read_text(encoding="utf-8").splitlines()) <= MODULE_LINES


@every_file
def test_function_fits_on_a_screen(name):
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    sizes = {function.name: lines_without_docstring(function) for function in functions(tree)}
    assert {key: size for key, size in sizes.items() if size > FUNCTION_LINES} == {}


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("cli")])
def test_function_has_few_parameters(name):
    """The command line is exempt: there every parameter is an option."""
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    limits = {"__init__": CONSTRUCTOR_PARAMETERS}
    too_many = {
        function.name: parameters(function)
        for function in functions(tree)
        if parameters(function) > limits.get(function.name, PARAMETERS)
    }
    assert too_many == {}


def test_core_can_be_read_in_an_hour():
    """The import of users' own rules doesn't count: it decides nothing."""
    names = [name for name in FILES if Path(name).parts[0] == "core"]
    core = [FILES[name] for name in names if name != "core/policy_import.py"]
    assert sum(map(code_lines, core)) <= CORE_CODE_LINES


def test_code_lines_are_counted_without_blank_lines_comments_and_docstrings(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(
        '"""A module\n\nof three lines."""\n\n# a comment\nx = 1  # one\n\n\n'
        'def f():\n    """Doc."""\n    return """two\n    lines"""\n',
        encoding="utf-8",
    )
    assert code_lines(path) == 4


def test_docstring_and_self_do_not_count():
    source = 'class A:\n def f(self, x, *, y=1, **z):\n  """Doc\n\n  long."""\n  return x\n'
    [function] = functions(ast.parse(source))
    assert (lines_without_docstring(function), parameters(function)) == (2, 3)
