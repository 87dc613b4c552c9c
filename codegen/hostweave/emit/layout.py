"""Renders the Jinja templates, and formats C++ in the style of clang-format. Templates have one statement per line."""

import re
from collections.abc import Callable, Iterable
from functools import cache
from itertools import accumulate, groupby
from operator import itemgetter

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hostweave.base.paths import TEMPLATES
from hostweave.emit.cpp import quoted

COLUMN_LIMIT = 130  # characters per line, as in .clang-format
INDENT = "  "
GuardedStatement = tuple[str, str]  # condition, statement


def format_cpp(text: str) -> str:
    """Formats C++ with one statement per line: indents, breaks long lines, and puts short top-level functions on one line."""
    lines: list[str] = []
    indents = [""]  # indentation of each enclosing block
    function = 0  # index of the first line of the current function
    for line in map(str.strip, text.splitlines()):
        is_code = bool(line) and not line.startswith(("//", "#"))
        if is_code and line.startswith("}") and len(indents) > 1:
            indents.pop()
            if lines and not lines[-1]:
                lines.pop()
        if line in ("public:", "private:"):
            lines.append(indents[-1][:-1] + line)
        elif line == "}" and len(indents) == 1 and (short := _short_function(lines[function:])):
            lines[function:] = short
        elif line:
            function = len(lines) if len(indents) == 1 and line != "}" else function
            lines.extend(_broken(line, "" if line.startswith("#") else indents[-1]))
        elif lines and lines[-1] and (not lines[-1].endswith("{") or lines[-1].startswith("namespace")):
            lines.append("")
        if is_code and line.endswith("{") and not line.startswith(("namespace", 'extern "C"')):
            indents.append(indents[-1] + (INDENT * 2 if line.endswith("= {") else INDENT))
    return "\n".join(_with_aligned_comments(lines)).strip("\n") + "\n"


def _short_function(lines: list[str]) -> list[str]:
    """The lines with a short function on one line, or an empty list if the function is not short."""
    opening = next((i for i, line in enumerate(lines) if line.endswith(") {")), -1)
    body = lines[opening + 1 :]
    if opening < 0 or len(body) > 1 or (body and (opening > 0 or body[0].lstrip().startswith(("if ", "for ")))):
        return []
    line = f"{lines[opening]} {body[0].strip()} }}" if body else f"{lines[opening]}}}"
    return [*lines[:opening], line] if len(line) <= COLUMN_LIMIT else []


# Lines that break after a head: `if` and `for` with a statement, kernels and constructors. The groups of a pattern are the head and the
# rest. The number is the indentation of the rest, in levels.
_HEADS = (
    (r"((?:if|for) \(.*?\)) (\w.*)", 1),
    (r"(__global__ void __launch_bounds__\(.*?\)) (.*)", 2),
    (r"((?:explicit )?[\w:]+\([^()]*\)) (: .*)", 2),
)


def _broken(line: str, indent: str) -> list[str]:
    if len(indent + line) <= COLUMN_LIMIT:
        return [indent + line]
    if line.startswith("//"):
        return _filled(f"{indent}//", line.split(" ")[1:], f"{indent}//{INDENT if line.startswith(('// - ', '// %')) else ''}")
    if trailing := re.fullmatch(r"(.*;)  (// .*)", line):
        return [*_broken(trailing[2], indent), *_broken(trailing[1], indent)]
    for head, levels in _HEADS:
        if found := re.fullmatch(head, line):
            return [indent + found[1], *_broken(found[2], indent + INDENT * levels)]
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', lambda literal: "_" * len(literal[0]), line)  # Underscores replace strings.
    depths = list(accumulate(((sign in "([{") - (sign in ")]}") for sign in bare), initial=0))
    if line.startswith(": "):
        first, *rest = _pieces(line, bare, depths, 0)
        return [indent + first, *(broken for initializer in rest for broken in _broken(initializer, indent + INDENT))]
    start = outer = bare.find("(") + 1 or bare.find("{") + 1
    if condition := re.match(r"(?:\} else )?if \(", line):
        first, *rest = re.split(r"(?<=&&) ", line)
        first, *rest = _filled(indent + first, rest, indent + " " * (condition.end() - 1))
        return [first, *(broken for each in rest for broken in _broken(each.strip(), indent + " " * condition.end()))]
    if choice := re.fullmatch(r"(?:([^({]* =) )?([^({]*?) (\? .*) (: .*)", line):
        if choice[1]:
            return [indent + choice[1], *_broken(line[choice.start(2) :], indent + INDENT * 2)]
        return [f"{indent}{choice[2]} {choice[3]}", " " * len(f"{indent}{choice[2]} ") + choice[4]]
    if not outer:
        return [indent + line]
    # If the only argument is a call or a list, as in `HW_CHECK(cudaMemcpyAsync(`, the outer call breaks before this argument if
    # the argument then fits on one line.
    while (inner := re.compile(r"[^,({]*[({]").match(bare, start)) and _end(depths, inner.end()) == _end(depths, start) - 1:
        start = inner.end()
    if start > outer and len(indent + INDENT * 2 + line[outer:]) <= COLUMN_LIMIT:
        return [indent + line[:outer], indent + INDENT * 2 + line[outer:]]
    first, *rest = _pieces(line, bare, depths, start)
    if not rest and 0 < (equals := bare.find(" = ")) < start:
        return [indent + line[: equals + 2], *_broken(line[equals + 3 :], indent + INDENT * 2)]
    beside = _filled(indent + line[:start] + first, rest, " " * (len(indent) + start - 1))
    below = [indent + line[:start], *_filled(indent + INDENT * 2 + first, rest, (indent + INDENT * 2)[:-1])]
    return below if len(below) < len(beside) else beside


def _filled(line: str, words: list[str], margin: str) -> list[str]:
    lines = [line]
    for word in words:
        if len(lines[-1]) + 1 + len(word) > COLUMN_LIMIT:
            lines.append(margin)
        lines[-1] += " " + word
    return lines


def _end(depths: list[int], start: int) -> int:
    return next((i for i in range(start, len(depths) - 1) if depths[i + 1] < depths[start]), len(depths) - 1)


def _pieces(line: str, bare: str, depths: list[int], start: int) -> list[str]:
    cuts = [i + 1 for i in range(start, _end(depths, start)) if bare[i] == "," and depths[i] == depths[start]]
    return [line[begin:end].strip() for begin, end in zip([start, *cuts], [*cuts, len(line)], strict=True)]


def _with_aligned_comments(lines: list[str]) -> list[str]:
    """Aligns the trailing comments of adjacent lines, as long as all lines stay within COLUMN_LIMIT."""
    runs: list[list[tuple[str, str]]] = []  # (code, comment) of each line, in runs of adjacent lines
    for line in lines:
        code, slashes, comment = (line, "", "") if line.lstrip().startswith(("//", "}", "#")) else line.partition("  // ")
        run = [*runs[-1], (code, slashes + comment)] if runs and runs[-1][-1][1] and slashes else []
        if run and sum(max(len(entry[column]) for entry in run) for column in (0, 1)) <= COLUMN_LIMIT:
            runs[-1] = run
        else:
            runs.append([(code, slashes + comment)])
    widths = [max(len(code) for code, _ in run) for run in runs]
    return [code.ljust(width) + comment if comment else code for run, width in zip(runs, widths, strict=True) for code, comment in run]


COMMON = "common"  # macros that do not depend on a transport


def rendered(path: str, **values: object) -> str:
    text = _environment().get_template(f"{path}.j2").render(values)
    return format_cpp(text) if path.endswith((".h", ".cpp", ".cu")) else text


def lay_out(macro: str, file: str = COMMON, **values: object) -> str:
    return macros_of(file)[macro](**values)


@cache
def macros_of(file: str) -> dict[str, Callable[..., str]]:
    """Macros of a file of `templates/instructions`, by name."""
    return vars(_environment().get_template(f"instructions/{file}.j2").module)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    environment.filters |= {"braced": braced, "lines": _lines, "quoted": quoted}
    return environment


def guarded(statements: Iterable[GuardedStatement]) -> str:
    """Lays out statements, each under its condition. The condition "" is always true. Neighbours with equal conditions share a block."""
    text = ""
    for condition, group in groupby(statements, key=itemgetter(0)):
        lines = [line for _, line in group]
        if condition:
            lines = [f"if ({condition}) {{", *lines, "}"] if len(lines) > 1 else [f"if ({condition}) {lines[0]}"]
        text += _lines(lines)
    return text


def braced(items: Iterable[str]) -> str:
    return "{" + ", ".join(items) + "}"


def _lines(lines: Iterable[str], before: str = "") -> str:
    return "".join(f"{before}{line}\n" for line in lines)
