"""Host programs without views and memory that nothing uses."""

from __future__ import annotations

from hostweave.host import ir


def without_unused(body: ir.Body) -> ir.Body:
    while True:
        used = {name for i in ir.walk(body) for name in ir.names(i, "read", "write", "alias")}

        def is_unused(i: ir.Instruction, used: set[str] = used) -> bool:
            return isinstance(i, (ir.Allocate, *ir.VIEWS)) and i.out not in used

        if not any(map(is_unused, ir.walk(body))):
            return body
        body = ir.rewrite(body, lambda i: () if is_unused(i) else None)
