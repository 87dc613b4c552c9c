"""Verifier of host programs, with one rule per kind of instruction."""

from hostweave.host_ir import ir
from hostweave.host_ir.calls import bodies
from hostweave.host_ir.rules import communication, computing, control
from hostweave.host_ir.rules.checker import Checker, Scope

RULES = {**computing.RULES, **communication.RULES, **control.RULES}


def verify_host(program: ir.HostProgram) -> None:
    """Raises ProgramError for the first fault of a host program."""
    checker = Checker(program, RULES)
    checker.header()
    for kernel in program.kernels:
        checker.kernel(kernel)
    for user_kernel in program.user_kernels:
        checker.user_kernel(user_kernel)
    for body in bodies(program):
        of_body = Checker(body, RULES, checker.kernels)
        of_body.parameters()
        of_body.body(body.body, Scope())
    checker.expect_separate_events(bodies(program))
