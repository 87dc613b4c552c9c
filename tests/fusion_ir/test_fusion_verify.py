"""The verifier of fusions: messages about invalid fusions, and valid steps of reshards."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.ir import Fusion, Stream
from hostweave.fusion_ir.verify import verify_fusion, verify_ops


def text(ops: str, result: str = "%y", inputs: str = "%x: f32[8@x, 4], %w: f32[4, 6], %z: f32[M, N]", mesh: str = "mesh(x=4)") -> str:
    body = "".join(f"  {line}\n" for line in ops.split("\n"))
    return f"fusion @f({inputs}) {mesh} {{\n{body}  return {result}\n}}\n"


AS_GIVEN = [
    ("%y: f32[8, 4] = add(%x)", "text:2: add: takes 2 operands, not 1"),
    ("%y: f32[8, 4] = negative(%x, axis=(0,))", "text:2: negative: there is no attribute axis=(0,); its attributes: none"),
    ("%y: f32[8] = sum(%x, axis=1)", "text:2: sum: there is no attribute axis=1; its attributes: axis (tuple), keepdims (bool)"),
    ("%y: f32[8] = sum(%x)", "text:2: sum: attribute axis is missing; write axis=(0,)"),
    ("%y: f32[8] = sum(%x, axis=(2,))", "text:2: sum: axis=(2,) is out of range; dims go from 0 to 1"),
    ("%y: f32[4] = select(%x, index=0)", "text:2: select: attribute axis is missing; write axis=0"),
    ("%y: f32[4] = select(%x, axis=0, index=8)", "text:2: select: index 8 of dim 0 of f32[8@x, 4] is out of range; indices go from 0 to 7"),
    ("%y: f32[4] = select(%x, axis=2, index=0)", "text:2: select: axis=2 of f32[8@x, 4] is out of range; dims go from 0 to 1"),
    (
        "%s: f32[] = sum(%x, axis=(0, 1))\n%y: f32[] = max(%s, axis=(0,))",
        "text:3: max: axis=(0,) is out of range; the operand has no dims",
    ),
    (
        "%y: f32[3, 4] = slice(%x, axis=0, start=2, step=3)",
        "text:2: slice: 3 elements from index 2 by step 3 exceed dim 0 of f32[8@x, 4]; indices go from 0 to 7",
    ),
    (
        "%y: f32[0, 4] = slice(%x, axis=0, start=9, step=1)",
        "text:2: slice: 0 elements from index 9 by step 1 exceed dim 0 of f32[8@x, 4]; indices go from 0 to 7",
    ),
    ("%y: f32[3, 4] = slice(%x, axis=0, start=2, step=0)", "text:2: slice: step=0 is not at least 1"),
    (
        "%y: f32[3] = slice(%x, axis=0, start=2, step=1)",
        "text:2: slice: f32[3] does not have the 2 dims of f32[8@x, 4]; use select to drop one",
    ),
    ("%y: i64[8, 5] = argsort(%x, axis=1, first=5)", "text:2: argsort: first=5 is not from 0 to 4; write first=0 to order all elements"),
    (
        "%y: i64[M, 2049] = argsort(%z, axis=1, first=2049)",
        "text:2: argsort: first=2049 is not from 0 to 2048; write first=0 to order all elements",
    ),
    ("%y: f32[3] = concat(axis=0)", "text:2: concat: takes one or more operands, not 0"),
    (
        "%y: f32[9, 4] = pad(%x, low=(1,), high=(0,), value=0.0)",
        "text:2: pad: 1 and 1 widths for the 2 dims of f32[8@x, 4]; give one per dim",
    ),
    ("%y: f32[8, 5] = negative(%x)", "text:2: negative: %y is f32[8, 5], but its operands give f32[8, 4]; correct its type"),
    ("%y: f16[8, 4] = negative(%x)", "text:2: negative: %y is f16[8, 4], but its operands give f32[8, 4]; correct its type"),
    ("%y: f32[8, 4] = negative(%x)\n%y: f32[8, 4] = exp(%x)", "text:3: %y is defined twice; give one of them another name"),
    ("%y: f32[8@z, 4] = negative(%x)", "text:2: f32[8@z, 4]: there is no axis z in mesh(x=4); its axes: x"),
    ("%y: f32[8, 4] stream(0, 0) = negative(%x)", "text:2: stream of %y: chunks=0 is not at least 1"),
]


@pytest.mark.parametrize(("ops", "message"), AS_GIVEN)
def test_invalid_ops(ops: str, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        Fusion.parse(text(ops))
    assert str(caught.value) == message


OUTPUTS = [
    ("%x", "fusion @f: %x is returned, but no op makes it; return a copy of it"),
    ("%y, %y", "fusion @f returns one tensor twice; return a copy of it"),
]


@pytest.mark.parametrize(("result", "message"), OUTPUTS)
def test_outputs(result: str, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        Fusion.parse(text("%y: f32[8, 4] = negative(%x)", result))
    assert str(caught.value) == message


def test_a_fusion_returns_something() -> None:
    fusion = Fusion.parse(text("%y: f32[8, 4] = negative(%x)"))
    with pytest.raises(ProgramError, match=r"fusion @f returns nothing; return at least one tensor$"):
        verify_fusion(replace(fusion, outputs=()))


def test_inputs_cannot_be_partial() -> None:
    with pytest.raises(ProgramError, match=r"fusion @f: input %x is partial; pass its terms along a sharded dim, and sum over this dim$"):
        Fusion.parse(text("%y: f32[4] = negative(%x)", inputs="%x: f32[4] partial(sum, x)"))


def test_a_size_that_no_input_has() -> None:
    why = r"text:2: broadcast_to: no input has a dim N, which %y has, so its size is unknown; add it to an input, or write an int$"
    with pytest.raises(ProgramError, match=why):
        Fusion.parse(text("%y: f32[N, 4] = broadcast_to(%x)", inputs="%x: f32[4]"))


def test_use_before_definition_and_unknown_ops_without_text() -> None:
    fusion = Fusion.parse(text("%h: f32[8, 4] = negative(%x)\n%y: f32[8, 4] = exp(%h)"))
    with pytest.raises(ProgramError, match=r"text:3: exp: %h is used before it is defined; define it above$"):
        verify_fusion(replace(fusion, body=fusion.ops[::-1]))
    with pytest.raises(ProgramError, match=r"text:2: unknown op 'frob'; use one of add, subtract, "):
        verify_fusion(replace(fusion, body=(replace(fusion.ops[0], kind="frob"), *fusion.ops[1:])))


AFTER = [
    (
        "insert_reshards",
        "%y: f32[8, 4] = negative(%x)",
        "text:2: negative: %y is f32[8, 4], but its operands give f32[8@x, 4]; reshard them",
    ),
    (
        "insert_reshards",
        "%v: f32[8, 4] = reshard(%x)\n%y: f32[8@x, 4] = add(%x, %v)",
        "text:3: add: %v is f32[8, 4], but f32[8@x, 4] is needed; reshard it",
    ),
    (
        "insert_reshards",
        "%s: f32[4] partial(sum, x) = sum(%x, axis=(0,))\n%y: f32[4] = negative(%s)",
        "text:3: negative: %y is f32[4], but its operands give f32[4] partial(sum, x); reshard them",
    ),
    (
        "insert_reshards",
        "%s: f32[4] partial(sum, x) = sum(%x, axis=(0,))\n%y: f32[4] = relu(%s)",
        "text:3: relu: it needs the reduced values of f32[4] partial(sum, x); reshard the partial operand first",
    ),
    (
        "insert_reshards",
        "%s: f32[4] partial(sum, x) = sum(%x, axis=(0,))\n%y: f32[4] = add(%s, 1.0)",
        "text:3: add: it needs the reduced values of f32[4] partial(sum, x); reshard the partial operand first",
    ),
    (
        "insert_reshards",
        "%y: f32[4] = sum(%x, axis=(0,))",
        "text:2: sum: %y is f32[4], but its operands give f32[4] partial(sum, x); reshard them",
    ),
    (
        "decompose_reshards",
        "%y: f32[8, 4] = reshard(%x)",
        "text:2: reshard: its steps are missing; write all_gather instead",
    ),
    ("decompose_reshards", "%y: f32[8@x, 4] = reshard(%x)", "text:2: reshard: its steps are missing; write copy instead"),
    (
        "choose_overlap",
        "%y: f32[8@x, 4] stream(0) = negative(%x)",
        "text:2: stream of %y: it is in no loop; put its op into a loop",
    ),
]


STEP_INPUTS = "%x: f32[8@a,b, 6], %u: f32[4@a, 6@b], %v: f32[9, 6], %t: f32[8@c, 6] on mesh(c=2 of ranks 2, 3)"
STEP_INPUTS += ", %w: f32[9@d, 6] on mesh(d=2 of ranks 0, 3)"
SUM = "%s: f32[6] partial(sum, a, b) = sum(%x, axis=(0,))\n"
STEPS = [
    "%y: f32[8, 6] = all_gather(%x, dim=0, axes=(a, b))",
    "%y: f32[8@a, 6] = all_gather(%x, dim=0, axes=(b))",
    "%y: f32[8@a, 6@b] = all_to_all(%x, dim=0, to=1, axes=(b))",
    "%y: f32[8@b,a, 6] = permute_shards(%x, axes=(a, b), sources=(0, 2, 1, 3))",
    "%y: f32[4@b, 6@a] = permute_shards(%u, axes=(a, b), sources=(0, 2, 1, 3))",
    "%y: f32[9, 6@b] = shard(%v, dim=1, axes=(b))",
    "%y: f32[9@b, 6] = shard(%v, dim=0, axes=(b))",  # 9 is not a multiple of 2, the number of ranks along b
    SUM + "%y: f32[6] = all_reduce(%s, axes=(a, b), reduction=sum)",
    SUM
    + "%y: f32[6@b] partial(sum, a) = reduce_scatter(%s, dim=0, axes=(b), reduction=sum)\n"
    + "%z: f32[6@b] = all_reduce(%y, axes=(a), reduction=sum)",
    SUM + "%y: f32[6] on mesh(of ranks 3) = reduce(%s, axes=(a, b), reduction=sum, root=3)",
    "%y: f32[8, 6@b] on mesh(b=2 of ranks 0, 1) = transfer(%t, blocks="
    "[(1, 2) to (2, 1): 2[0] -> 0[0], 3[0] -> 0[1], 2[1] -> 1[0], 3[1] -> 1[1]])",
    "%y: f32[9@b, 6] on mesh(b=3 of ranks 0..3) = transfer(%w, blocks="
    "[(3, 1) to (2, 1): 0[0] -> 0[0], 3[0] -> 0[1], 0[1] -> 1[0], 3[1] -> 1[1], 0[2] -> 2[0], 3[2] -> 2[1]])",
]
# Reshard steps that do not match their types: index into STEPS, part of the step's text, wrong text for this part, and message.
WRONG = [
    (0, "axes=(a, b)", "axes=(b, a)", "(b, a) are not the innermost axes that split dim 0 of f32[8@a,b, 6] evenly"),
    (0, "axes=(a, b)", "axes=(b)", "%y is f32[8, 6], but the all_gather of f32[8@a,b, 6] is f32[8@a, 6]; correct the type of %y"),
    (0, "axes=(a, b)", "axes=(a, c)", "(a, c) are not axes of mesh(a=2, b=2), each named once"),
    (0, ", axes=(a, b)", "", "attribute axes is missing; write axes=(x)"),
    (0, "axes=(a, b)", "axes=(0, 1)", "there is no attribute axes=(0, 1); its attributes: dim (int), axes (MeshAxes)"),
    (0, "dim=0", "dim=2", "dim=2 is out of range; f32[8@a,b, 6] has dims 0 to 1"),
    (1, "axes=(b)", "axes=(a)", "(a) are not the innermost axes that split dim 0 of f32[8@a,b, 6] evenly"),
    (2, "to=1", "to=0", "%y is f32[8@a, 6@b], but the all_to_all of f32[8@a,b, 6] is f32[8@a,b,b, 6]; correct the type of %y"),
    (3, "(0, 2, 1, 3)", "(0, 1, 2, 3)", "it does not lead from f32[8@a,b, 6] to f32[8@b,a, 6]"),
    (3, "(0, 2, 1, 3)", "(0, 2, 1, 4)", "it does not lead from f32[8@a,b, 6] to f32[8@b,a, 6]"),
    (3, "(0, 2, 1, 3)", "()", "it does not lead from f32[8@a,b, 6] to f32[8@b,a, 6]"),
    (4, "axes=(a, b)", "axes=(b, a)", "it does not lead from f32[4@a, 6@b] to f32[4@b, 6@a]"),
    (5, "dim=1", "dim=0", "%y is f32[9, 6@b], but the shard of f32[9, 6] is f32[9@b, 6]; correct the type of %y"),
    (
        7,
        "axes=(a, b)",
        "axes=(a)",
        "%y is f32[6], but the all_reduce of f32[6] partial(sum, a, b) is f32[6] partial(sum, b); correct the type of %y",
    ),
    (
        7,
        "reduction=sum",
        "reduction=max",
        "f32[6] partial(sum, a, b) is not partial(max, a, b); write the reduction and axes of a partial operand",
    ),
    (7, "axes=(a, b)", "axes=(a, a)", "(a, a) are not axes of mesh(a=2, b=2), each named once"),
    (9, "root=3", "root=2", "it does not lead from f32[6] partial(sum, a, b) to f32[6] on mesh(of ranks 3)"),
    (9, "root=3", "root=4", "it does not lead from f32[6] partial(sum, a, b) to f32[6] on mesh(of ranks 3)"),
    (
        10,
        " on mesh(b=2 of ranks 0, 1) = transfer(%t,",
        " = transfer(%v,",
        "%y is f32[8, 6@b], but its operands give f32[9, 6]; correct its type",
    ),
    (
        10,
        ", blocks=[(1, 2) to (2, 1): 2[0] -> 0[0], 3[0] -> 0[1], 2[1] -> 1[0], 3[1] -> 1[1]]",
        "",
        "attribute blocks is missing; write blocks=[(1,) to (1,): 0[0] -> 1[0]]",
    ),
    *(
        (10, right, wrong, "it does not lead from f32[8@c, 6] on mesh(c=2 of ranks 2, 3) to f32[8, 6@b] on mesh(b=2 of ranks 0, 1)")
        for right, wrong in (
            ("3[0] -> 0[1]", "2[0] -> 0[1]"),  # Rank 0 needs the block 2[0] at index 0.
            ("3[0] -> 0[1]", "1[0] -> 0[1]"),  # Rank 1 has no block.
            ("3[0] -> 0[1]", "3[2] -> 0[1]"),
            ("3[0] -> 0[1], ", ""),  # One block is missing.
            ("3[0] -> 0[1]", "2[0] -> 0[0]"),  # One block is sent twice.
            ("(1, 2) to (2, 1)", "(1, 1) to (2, 1)"),
            ("(1, 2) to (2, 1)", "(2,) to (2, 1)"),
        )
    ),
    *(
        (11, right, wrong, "it does not lead from f32[9@d, 6] on mesh(d=2 of ranks 0, 3) to f32[9@b, 6] on mesh(b=3 of ranks 0..3)")
        for right, wrong in (
            ("3[0] -> 0[1], 0[1] -> 1[0]", "0[1] -> 0[1], 3[0] -> 1[0]"),  # Rank 0 needs a block of each source rank.
            ("(3, 1) to (2, 1)", "(6, 1) to (4, 1)"),
        )
    ),
]


def steps_text(ops: str) -> str:
    last = ops.rpartition("\n")[2].partition(":")[0]
    return text(ops, last, STEP_INPUTS, "mesh(a=2, b=2)")


@pytest.mark.parametrize("ops", STEPS)
def test_steps_of_reshards(ops: str) -> None:
    fusion = Fusion.parse(steps_text(ops))
    verify_fusion(fusion, after="decompose_reshards")
    assert Fusion.parse(str(fusion)) == fusion


@pytest.mark.parametrize(("step", "right", "wrong", "message"), WRONG)
def test_steps_that_do_not_match_their_types(step: int, right: str, wrong: str, message: str) -> None:
    assert right in STEPS[step]
    with pytest.raises(ProgramError) as caught:
        verify_fusion(Fusion.parse(steps_text(STEPS[step].replace(right, wrong))), after="decompose_reshards")
    assert str(caught.value).split(": ", 2)[2] == message


@pytest.mark.parametrize(("after", "ops", "message"), AFTER)
def test_after_a_pass(after: str, ops: str, message: str) -> None:
    fusion = Fusion.parse(text(ops))
    with pytest.raises(ProgramError) as caught:
        verify_fusion(fusion, after=after)
    assert str(caught.value) == message


def test_partial_results_are_not_returned() -> None:
    with pytest.raises(
        ProgramError, match=r"fusion @f: %y is f32\[4\] partial\(sum, x\); a partial tensor cannot be returned; reshard it first$"
    ):
        Fusion.parse(text("%y: f32[4] partial(sum, x) = sum(%x, axis=(0,))"))


def test_an_invalid_stream_without_text() -> None:
    fusion = Fusion.parse(text("%y: f32[8, 4] stream(0) = negative(%x)"))
    (op,) = fusion.ops
    assert op.result.stream is not None
    for change, message in (
        ({"dim": 2}, r"f32\[8, 4\] has no dim 2"),
        ({"chunking": "fast"}, "'fast' is not one of by_shard, across_shards"),
    ):
        stream = replace(op.result.stream, **change)
        with pytest.raises(ProgramError, match=f"text:2: stream of %y: {message}$"):
            verify_fusion(replace(fusion, body=(replace(op, result=replace(op.result, stream=stream)),)))


def test_wrong_names_of_functions_and_streamed_inputs_without_text() -> None:
    fusion = Fusion.parse(text("%y: f32[8, 4] = negative(%x)"))
    (op,) = fusion.ops
    for change, message in (
        ({"callee": fusion}, "negative: only calls, repeats and their outputs name a function; remove @f"),
        ({"kind": "call"}, "call: no function is named; name one"),
        ({"kind": "kernel"}, "kernel: no user kernel is named; name one"),
    ):
        with pytest.raises(ProgramError, match=f"text:2: {message}$"):
            verify_fusion(replace(fusion, body=(replace(op, **change),)))
    with pytest.raises(ProgramError, match=r"fusion @f: input %x is streamed; stream a copy of it$"):
        verify_fusion(replace(fusion, inputs=(replace(fusion.inputs[0], stream=Stream(0)), *fusion.inputs[1:])))


def test_bodies_of_kernels() -> None:
    fusion = Fusion.parse(text("%h: f32[R/8, 4] = negative(%x)\n%y: f32[4] = sum(%h, axis=(0,))", inputs="%x: f32[R/8, 4]"))
    inputs = [(value.name, value.type) for value in fusion.inputs]
    verify_ops(inputs, fusion.ops)
    with pytest.raises(ProgramError, match=r"sum: %h is used before it is defined; define it above$"):
        verify_ops(inputs, fusion.ops[1:])


def test_an_op_that_passed_is_verified_again_with_other_operands_and_on_another_mesh() -> None:
    fusion = Fusion.parse(text("%y: f32[8@x, 4] = negative(%x)", inputs="%x: f32[8@x, 4]"))
    for change, message in (
        ({"inputs": Fusion.parse(text("%y: f32[8, 5] = negative(%x)", inputs="%x: f32[8, 5]")).inputs}, "its operands give f32[8, 5]"),
        ({"inputs": (), "mesh": hw.Mesh(x=4)}, "%x is used before it is defined"),
        ({"inputs": Fusion.parse(text("%y: f32[8, 4] = negative(%x)", inputs="%x: f32[8, 4]")).inputs, "mesh": hw.Mesh(z=4)}, "no axis x"),
    ):
        with pytest.raises(ProgramError, match=re.escape(message)):
            verify_fusion(replace(fusion, **change))


def test_an_error_names_the_users_line() -> None:
    with pytest.raises(ProgramError, match=r"^test_fusion_verify.py:\d+: negative: not defined for bool; "):
        hw.fusion(x=hw.bool_[4])(lambda x: -x)


ALONE = "stream of %y: the loop states the chunks, and the op only its dim and its algorithm; write stream(0)"
LOOPS = [
    ("4 chunks across_shards", "", ALONE),
    ("4 chunks across_shards", "stream(0, 4)", ALONE),
    (
        "4 chunks across_shards",
        "stream(0, p2p)",
        "stream of %y: it has the algorithm p2p, but a negative does not communicate; stream the reshard",
    ),
    ("0 chunks across_shards", "stream(0)", "loop of %y: it has 0 iterations; use 1 to 4096"),
    ("M chunks across_shards", "stream(0)", "loop of %y: its number of chunks, M, is not an int; write an int"),
    ("3 indices by_shard", "stream(0)", "loop of %y: it has 3 iterations for 8 indices; write 8 indices"),
    ("4 chunks by_shard of %x", "stream(0)", "loop of %y: %x is not an async all_gather whose shards a matmul reads"),
]


@pytest.mark.parametrize(("words", "stream", "message"), LOOPS)
def test_chunk_loops(words: str, stream: str, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        Fusion.parse(text(f"loop {words} {{\n    %y: f32[8, 4] {stream} = negative(%x)\n  }}"))
    assert str(caught.value) == f"text:3: {message}"


def test_a_loop_over_the_shards_of_a_gather() -> None:
    ops = """%g: f32[4, 8] async = all_gather(%w, dim=1, axes=(x))
  loop 3 chunks by_shard local_first of %g {
    %y: f32[8, 8] stream(1) = matmul(%x, %g)
  }"""
    program = text(ops, inputs="%x: f32[8, 4], %w: f32[4, 8@x]")
    with pytest.raises(ProgramError, match=r"^text:4: loop of %y: it has 3 iterations; write one per shard, 4$"):
        Fusion.parse(program)
    assert Fusion.parse(program.replace("loop 3", "loop 4")).loop_of["y"].gathered == "g"
