"""The style of error messages. `pytest tests/test_messages.py -n 0 -s` prints the messages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_WORDS = 45  # maximum number of words of one message, which has a place, a reason and a remedy
PRIVATE = re.compile(r"\b(beside what|what takes|in turn|(?<!there )(is|are) no [a-z]|cannot be[;:])")  # phrases that are hard to read


def template(node: ast.expr) -> str:
    """Text of a string expression, with {...} for each inserted value."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(template, parts))
        case ast.FormattedValue(value=value):
            return "{" + ast.unparse(value) + "}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
        case ast.IfExp(body=body, orelse=orelse):
            return f"[{template(body)} | {template(orelse)}]"
    return "{" + ast.unparse(node) + "}"


def python_messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each error that a file raises with a text of several words."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = max(map(template, node.exc.args), key=len)
            if " " in re.sub(r"\{[^{}]*\}", "", text).strip():
                yield node.lineno, text


def cpp_messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each error that a C++ file throws; {...} joins the parts of a text."""
    text = path.read_text()
    for found in re.finditer(r"throw [\w:]*(?:Error|error|argument)\(((?:[^;\"]|\"(?:[^\"\\]|\\.)*\")*)\);", text):
        parts = re.findall(r'"((?:[^"\\]|\\.)*)"', found[1])
        if parts:
            yield text.count("\n", 0, found.start()) + 1, "{...}".join(parts)


def messages() -> list[tuple[str, str]]:
    found = []
    for folder in ("codegen/hostweave", "runtime_cpp"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                read = python_messages if path.suffix == ".py" else cpp_messages
                found += [(f"{path.relative_to(ROOT)}:{line}", text) for line, text in read(path)]
    return found


def test_messages_are_short_and_plain() -> None:
    found = messages()
    assert len(found) > 700
    folder = ""
    for place, text in found:  # The messages are visible with pytest -s.
        if (above := str(Path(place).parent)) != folder:
            print(f"\n{(folder := above)}")
        print(f"  {Path(place).name}: {text}")
    wrong = [f"{place}: {text}" for place, text in found if len(re.sub(r"\{[^{}]*\}", "X", text).split()) > MOST_WORDS]
    wrong += [f"{place}: {text}" for place, text in found if PRIVATE.search(text)]
    assert not wrong, "\n".join(wrong)
