"""Lines of C++ as clang-format lays them out, so that templates need not care: indented by their braces, broken at commas
where they are too long, trailing comments aligned."""

from __future__ import annotations

import re
from itertools import groupby

COLUMNS = 130
INDENT = "  "


def format_cpp(text: str) -> str:
    """Source text with one statement a line, indented and broken."""
    lines: list[str] = []
    indents = [""]  # of the blocks around the line
    function = 0  # where the present one begins
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
        if is_code and line.endswith("{") and not line.startswith("namespace"):
            indents.append(indents[-1] + (INDENT * 2 if line.endswith("= {") else INDENT))
    return "\n".join(_with_aligned_comments(lines)).strip("\n") + "\n"


def _short_function(lines: list[str]) -> list[str]:
    """A function with at most one statement, closed on the line that opens it; nothing where that is too long."""
    opening = next((i for i, line in enumerate(lines) if line.endswith(") {")), -1)
    body = lines[opening + 1 :]
    if opening < 0 or len(body) > 1 or (body and (opening > 0 or body[0].lstrip().startswith(("if ", "for ")))):
        return []
    line = f"{lines[opening]} {body[0].strip()} }}" if body else f"{lines[opening]}}}"
    return [*lines[:opening], line] if len(line) <= COLUMNS else []


# --- long lines -------------------------------------------------------------------------------------------------------


def _broken(line: str, indent: str) -> list[str]:
    """One statement on as many lines as it needs."""
    if len(indent + line) <= COLUMNS:
        return [indent + line]
    if line.startswith("//"):
        return _filled([indent + "//"], line[2:].split(" ")[1:], indent + "//")
    code, slashes, comment = line.partition(";  // ")
    if slashes:
        return [*_broken(f"// {comment}", indent), *_broken(f"{code};", indent)]
    if line.startswith("if (") and not line.endswith("{"):
        condition = _closing(line, len("if (")) + 1
        return [indent + line[:condition], *_broken(line[condition:].strip(), indent + INDENT)]
    bounds, paren, function = line.partition(") ")
    if paren and bounds.startswith("__global__ void __launch_bounds__("):
        return [indent + bounds + ")", *_broken(function, indent + INDENT * 2)]
    head, colon, initializers = line.partition(") : ")
    if colon:
        return [indent + head + ")", *_broken_initializers(initializers, indent + INDENT * 2)]
    brackets = _without_strings(line)
    start = _arguments(brackets)
    if start is None:
        return [indent + line]
    outer = _opening(brackets)
    if start > outer and len(indent + INDENT * 2 + line[outer:]) <= COLUMNS:
        return [indent + line[:outer], indent + INDENT * 2 + line[outer:]]
    first, *rest = _split(line[start:])
    return _filled([indent + line[:start] + first], rest, " " * (len(indent) + start - 1))


def _filled(lines: list[str], words: list[str], margin: str) -> list[str]:
    for word in words:
        if len(lines[-1]) + 1 + len(word) > COLUMNS:
            lines.append(margin)
        lines[-1] += " " + word
    return lines


def _broken_initializers(text: str, indent: str) -> list[str]:
    """A constructor's initializers: all on one line, or each on its own."""
    if len(indent + ": " + text) <= COLUMNS:
        return [indent + ": " + text]
    first, *rest = _split(text)
    return [indent + ": " + first, *(indent + INDENT + initializer for initializer in rest)]


def _arguments(line: str) -> int | None:
    """Where the arguments of the innermost call that is a sole argument itself begin: after `HW_CHECK(` or `allocate({`."""
    start = _opening(line)
    while start:
        if line[start : start + 1] == "{" and line[_closing(line, start + 1) + 1 : _closing(line, start + 1) + 2] == ")":
            return start + 1
        inner = line.find("(", start)
        closing = _closing(line, start)
        if inner < 0 or inner > closing or _closing(line, inner + 1) != closing - 1 or "," in line[start:inner]:
            return start
        start = inner + 1
    return None


def _opening(line: str) -> int:
    """Where the arguments of the first call begin, behind a condition; 0 where there is none."""
    return line.find("(", _closing(line, len("if (")) if line.startswith("if (") else 0) + 1


def _closing(line: str, start: int) -> int:
    """The index of the bracket that closes the one before `start`."""
    depth = 1
    for i in range(start, len(line)):
        depth += (line[i] in "([{") - (line[i] in ")]}")
        if depth == 0:
            return i
    return len(line)


def _without_strings(text: str) -> str:
    """The same with blanks in its string literals: brackets and commas there are none."""
    return re.sub(r'"(?:[^"\\]|\\.)*"', lambda literal: '"' + " " * (len(literal[0]) - 2) + '"', text)


def _split(text: str) -> list[str]:
    """Arguments with their commas; the last one with all that follows."""
    pieces, depth, begin = [], 0, 0
    for i, sign in enumerate(_without_strings(text)):
        depth += (sign in "([{") - (sign in ")]}")
        if depth < 0:
            break
        if sign == "," and depth == 0:
            pieces.append(text[begin : i + 1].strip())
            begin = i + 1
    return [*pieces, text[begin:].strip()]


# --- trailing comments ------------------------------------------------------------------------------------------------


def _with_aligned_comments(lines: list[str]) -> list[str]:
    result: list[str] = []
    for has_comment, run in groupby(lines, lambda line: "  // " in line and not line.lstrip().startswith(("//", "}", "#"))):
        block = list(run)
        if has_comment:
            width = max(line.index("  // ") for line in block)
            block = [line[: line.index("  // ")].ljust(width) + line[line.index("  // ") :] for line in block]
        result.extend(block)
    return result
