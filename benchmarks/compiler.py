"""Time of compilation: import, lowering, growth with the number of ops, checks, compilation without the cache, load from the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from peers.report import print_tools

import hostweave as hw
from hostweave.base.errors import BuildError
from hostweave.base.paths import EXAMPLES
from hostweave.check.check import check
from hostweave.cli.programs import load_file, programs_in
from hostweave.host_ir import ir, tree
from hostweave.pipeline import lower
from hostweave.targets.target import find_target

# two programs without generated kernels, and two programs with such kernels
PROGRAMS = ("matmul_n", "ag_matmul_p2p", "matmul_rs_flat", "allreduce_rows")
SIZES = dict.fromkeys(("S", "B", "L"), 4096)
OPTIONS = {"": hw.Options(), "with chosen loops": hw.Options(sizes=SIZES), "one-sided": hw.Options(sizes=SIZES, transport="one_sided")}


def main() -> None:
    print_tools()
    print(f"import hostweave          {import_seconds():.3f} s (limit 0.15)")
    print(f"and the first compile     {import_seconds(FIRST_COMPILE):.3f} s (limit 0.25)")
    seeds = programs_in(load_file(EXAMPLES / "seeds.py"))
    slowest = max(seeds, key=lambda name: seconds(lambda: hw.compile(seeds[name])))
    print(f"lower, verify, check      {seconds(lambda: hw.compile(seeds[slowest]), 20) * 1e3:.1f} ms, {slowest}, the slowest (limit 25)")
    print(f"1000 ops over 100 ops     {chain_seconds(1000) / chain_seconds(100):.1f} times (limit 12)")
    llama = load_file(EXAMPLES / "llama.py").llama
    for how, options in OPTIONS.items():
        print(f"32 layers of Llama 3 8B   lower in {seconds(lambda o=options: lower(llama, o), 3):.2f} s {how} (limit 1)")
    host = lower(llama, hw.Options())
    counts = f"{len(host.functions)} function for {count_calls(host)} calls"
    print(f"32 layers of Llama 3 8B   checked in {once(lambda: check(host)):.2f} s, {counts}")
    for decode in (False, True):
        order, both = check_seconds(small_llama(layers=32, decode=decode))
        print(
            f"32 layers of small Llama  order {order:.2f} s, order and results {both:.2f} s (limit 4), {'decode' if decode else 'prefill'}"
        )
    for file in ("seeds.py", "transformer.py"):
        times = [check_seconds(fusion, 3) for fusion in programs_in(load_file(EXAMPLES / file)).values()]
        order, both = map(sum, zip(*times, strict=True))
        print(f"examples/{file:16} order {order:.2f} s, results {both - order:.2f} s, {(both - order) / order:.1f} times (limit 1)")
    for target in ("cpu", "cuda"):
        try:
            find_target(target).toolchain()
        except BuildError as error:
            print(f"cold compile, {target}: not here: {error}")
            continue
        for name in PROGRAMS:
            cold, cached, has_kernels = build_seconds(name, target)
            limit = 3.0 if has_kernels and target == "cuda" else 1.5
            kernels = "with kernels" if has_kernels else "no kernels"
            print(f"cold compile, {target:4} {name:18} {cold:.2f} s, {kernels} (limit {limit}); cached {cached * 1e3:.1f} ms (limit 30)")
        cold, changed = cold_seconds(llama, target)
        print(f"cold compile, {target:4} 32 layers of Llama {cold:.2f} s, with kernels (limit 10); with another constant {changed:.2f} s")


def check_seconds(fusion: hw.Fusion, repetitions: int = 1) -> tuple[float, float]:
    """Seconds to prove the order of a program's accesses, without and with the comparison of results."""
    host = lower(fusion, hw.Options())
    return seconds(lambda: check(host), repetitions), seconds(lambda: check(host, fusion=fusion), repetitions)


def small_llama(layers: int, decode: bool) -> hw.Fusion:
    """A Llama on 8 ranks, so small that the check compares the results by default."""
    example = load_file(EXAMPLES / "llama.py")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 4,
        "vocab_size": 32,
    }
    fusion: hw.Fusion = example.program(example.Config(**sizes, num_hidden_layers=layers), 8, decode)
    return fusion


def count_calls(host: hw.HostProgram) -> int:
    return sum(isinstance(i, ir.Call) for i in tree.walk(host.body))


FIRST_COMPILE = """import hostweave as hw
hw.compile(hw.fusion(mesh=hw.Mesh(x=8), x=hw.bf16["M@x", "K"], w=hw.bf16["K", "N"])(lambda x, w: hw.matmul(x, w)))
"""


def import_seconds(code: str = "import hostweave") -> float:
    """CPU seconds of code in a new interpreter, with cached bytecode."""
    timed = f"import time\nstarted = time.process_time()\n{code}\nprint(time.process_time() - started)"
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        command = [sys.executable, "-c", timed]
        return min(float(subprocess.check_output(command, env=environment, text=True)) for _ in range(6))


def chain_seconds(length: int) -> float:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "N"])
    def chain(x: hw.Tensor) -> hw.Tensor:
        for i in range(length):
            x = hw.exp(x) if i % 2 else x * 2
        return x

    return seconds(lambda: lower(chain, hw.Options()))


def build_seconds(name: str, target: str) -> tuple[float, float, bool]:
    """Seconds of a compilation if the cache has the runtime, and seconds of a load of the compiled program from the cache. The third value
    is True if the program has kernels."""
    programs = {**programs_in(load_file(EXAMPLES / "seeds.py")), **programs_in(load_file(EXAMPLES / "single_device.py"))}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HOSTWEAVE_CACHE"] = cache
        first = hw.compile(programs_in(load_file(EXAMPLES / "single_device.py"))["set"], target=target)
        _ = first.folder  # The build of the module also builds the runtime library.
        cold_program = hw.compile(programs[name], target=target)
        cold = once(lambda: cold_program.folder)
        code = f"""
import time, hostweave as hw
from hostweave.base.paths import EXAMPLES
from hostweave.cli.programs import load_file, programs_in
program = {{**programs_in(load_file(EXAMPLES / "seeds.py")), **programs_in(load_file(EXAMPLES / "single_device.py"))}}[{name!r}]
program = hw.compile(program, target={target!r})
started = time.perf_counter()
program.{"build()" if target == "cpu" else "folder"}
print(time.perf_counter() - started)
"""
        runs = [float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout) for _ in range(3)]
        return cold, min(runs), "kernels.cu" in cold_program.sources
    raise AssertionError


def cold_seconds(fusion: hw.Fusion, target: str) -> tuple[float, float]:
    """Seconds to lower, check and compile if the cache has the runtime. The second number is for the same program with another constant."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HOSTWEAVE_CACHE"] = cache
        _ = hw.compile(programs_in(load_file(EXAMPLES / "single_device.py"))["set"], target=target).folder
        changed = hw.Fusion.parse(str(fusion).replace("1e-05", "2e-05"))
        assert changed != fusion
        return once(lambda: hw.compile(fusion, target=target).folder), once(lambda: hw.compile(changed, target=target).folder)
    raise AssertionError


def seconds(work: Callable[[], Any], repetitions: int = 5) -> float:
    return min(once(work, time.process_time) for _ in range(repetitions))


def once(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    work()
    return clock() - started


if __name__ == "__main__":
    main()
