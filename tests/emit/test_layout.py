"""Layout of generated C++ follows clang-format's rules. CI runs clang-format on most golden files."""

from __future__ import annotations

from hostweave.emit.layout import COLUMN_LIMIT, format_cpp


def test_blocks_are_indented_without_blank_lines_at_their_ends() -> None:
    text = "namespace a {\n\nvoid f() {\n\nfor (;;) {\nif (x) {\na();\n} else {\nb();\n}\n}\n\n}\n\n}  // namespace a\n"
    lines = format_cpp(text).splitlines()
    assert lines[:3] == ["namespace a {", "", "void f() {"]
    assert lines[3:9] == ["  for (;;) {", "    if (x) {", "      a();", "    } else {", "      b();", "    }"]
    assert lines[9:] == ["  }", "}", "", "}  // namespace a"]


def test_classes_and_tables() -> None:
    assert format_cpp("class A {\npublic:\nA();\n\nprivate:\nint a_;\n};\n") == "class A {\n public:\n  A();\n\n private:\n  int a_;\n};\n"
    assert format_cpp("const T t = {\n.a = 1,\n};\n") == "const T t = {\n    .a = 1,\n};\n"


def test_short_functions_stay_on_one_line() -> None:
    assert (
        format_cpp("int f() {\nreturn 1;\n}\n\nvoid g() {\nif (x) h();\n}\n") == "int f() { return 1; }\n\nvoid g() {\n  if (x) h();\n}\n"
    )
    long = f"void f() {{\nreturn {'a' * COLUMN_LIMIT};\n}}\n"
    assert format_cpp(long).count("\n") == 3


def test_trailing_comments_are_aligned() -> None:
    assert format_cpp("struct S {\nint a;  // one\nlong bc;  // two\n};\n") == "struct S {\n  int a;    // one\n  long bc;  // two\n};\n"


def test_long_calls_break_between_arguments() -> None:
    arguments = [f"argument_{i}" for i in range(12)]
    lines = format_cpp(f"HW_CHECK(call({', '.join(arguments)}));\n").splitlines()
    assert len(lines) == 2
    assert all(len(line) <= COLUMN_LIMIT for line in lines)
    assert lines[1].startswith(" " * len("HW_CHECK(call(") + "argument_")


def test_a_call_that_fits_on_the_next_line_is_moved_there() -> None:
    call = f"call({'a' * 60}, {'b' * 52}, c)"
    assert format_cpp(f"HW_CHECK({call});\n") == f"HW_CHECK(\n    {call});\n"


def test_an_expression_without_commas_is_broken_after_the_equals_sign() -> None:
    value = " + ".join(f"term_{i} * (size_{i})" for i in range(6))
    assert format_cpp(f"const auto x = load({value});\n").splitlines() == ["const auto x =", f"    load({value});"]
    assert format_cpp(f"add({'a' * COLUMN_LIMIT});\n") == f"add({'a' * COLUMN_LIMIT});\n"


def test_conditions_and_launch_bounds_have_separate_lines() -> None:
    call = f"call({'a' * 60}, {'b' * 52});"
    assert format_cpp(f"void f() {{\nif (is_here_) {call}\n}}\n") == f"void f() {{\n  if (is_here_)\n    {call}\n}}\n"
    kernel = f"kernel(const float* {'a' * 40}, float* {'b' * 40}) {{"
    bounds = "__global__ void __launch_bounds__(hw::kRowThreads)"
    assert format_cpp(f"{bounds} {kernel}\ng();\nh();\n}}\n") == f"{bounds}\n    {kernel}\n  g();\n  h();\n}}\n"


def test_long_conditions_and_choices() -> None:
    one, two, three = (f"{letter * 40} % 8 == 0" for letter in "abc")
    names = [f"{letter * 60}" for letter in "def"]
    call = f"hw::aligned({names[0]},\n{' ' * 25}{names[1]},\n{' ' * 25}{names[2]})) {{"
    text = f"void f() {{\nif (x) {{\ng();\n}} else if ({one} && {two} && {three} && hw::aligned({', '.join(names)})) {{\nh();\n}}\n}}\n"
    lines = f"  }} else if ({one} && {two} &&\n{' ' * 13}{three} &&\n{' ' * 13}{call}\n    h();\n"
    assert lines in format_cpp(text)
    choice = f"const auto x =\n{' ' * 4}held ? load({names[0]})\n{' ' * 9}: {names[1]};\n"
    assert format_cpp(f"const auto x = held ? load({names[0]}) : {names[1]};\n") == choice


def test_constructors_break_between_initializers() -> None:
    short = "A::A(int a) : a_(a), b_(a) {\n}\n"
    assert format_cpp(short) == "A::A(int a) : a_(a), b_(a) {}\n"
    members = [f"member_{i}_(argument_{i})" for i in range(7)]
    assert format_cpp(f"A::A(int a) : {', '.join(members)} {{\n}}\n") == "A::A(int a)\n    : " + ",\n      ".join(members) + " {}\n"


def test_long_comments_are_filled() -> None:
    text = format_cpp("// " + "word " * 40 + "\n")
    assert [line.startswith("// word") for line in text.splitlines()] == [True, True]
    assert len(text.splitlines()[0]) <= COLUMN_LIMIT


def test_a_comment_that_does_not_fit_goes_before_its_line() -> None:
    words = " ".join(["word"] * 40)
    lines = format_cpp(f"struct S {{\nint a;  // {words}\n}};\n").splitlines()
    assert all(line.startswith("  // word") for line in lines[1:-2])
    assert lines[-2:] == ["  int a;", "};"]
    assert max(map(len, lines)) <= COLUMN_LIMIT


def test_brackets_and_commas_in_strings_break_no_line() -> None:
    text = '"f32[local(M, x on ranks 0, 1), K]"'
    line = f"{{{', '.join([text] * 5)}, f(1)}},"
    assert format_cpp(line + "\n") == line + "\n"
    call = f"in.x.expect({', '.join([text] * 5)});"
    assert "".join(format_cpp(call + "\n").split()) == "".join(call.split())
    assert all(part.count('"') % 2 == 0 for part in format_cpp(call + "\n").splitlines())


def test_the_colon_of_a_condition_begins_no_initializers() -> None:
    first, second = f"is_root(x) ? here({'a' * 30}) : there({'b' * 30})", "c" * 40
    broken = f"HW_CHECK(call({first},\n              {second}));\n"
    assert format_cpp(f"HW_CHECK(call({first}, {second}));\n") == broken


def test_a_long_line_begins_another_column_of_comments() -> None:
    members = [f"int {name};  // {comment}\n" for name, comment in (("b", "x" * 80), ("cccc", "x" * 80), ("a" * 60, "x"))]
    lines = format_cpp(f"struct S {{\n{''.join(members)}}};\n").splitlines()
    assert [line.index("//") for line in lines[1:4]] == [13, 13, 69]
