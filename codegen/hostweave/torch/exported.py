"""Exports a module as a graph of ATen ops on global tensors, with torch.export."""

import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch._decomp import decomposition_table
from torch._export.passes import lift_constants_pass
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, unset_fake_temporarily
from torch.autograd.function import _SingleLevelFunction
from torch.distributed.tensor import DTensor
from torch.export import ExportedProgram, default_decompositions, export, exported_program
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from hostweave.base.errors import LIBRARIES, Location, ProgramError, is_of_package
from hostweave.torch import linalg, special
from hostweave.torch.complex import of_pairs
from hostweave.torch.composed import COMPOSED, associative_scan, rwkv_attention
from hostweave.torch.distributed import cast_parameters, on_global_tensors
from hostweave.torch.nodes import OF_TORCH, is_view, location, written_by
from hostweave.torch.numbers import keeps_numbers, symbolic
from hostweave.torch.ops import call_function, ops
from hostweave.torch.randomness import OTHER_GENERATOR
from hostweave.torch.repeats import Repeats, watched, write_out
from hostweave.torch.replaced import Replacement, replaced
from hostweave.torch.scaled import quantized_linears
from hostweave.torch.strides import of_storages
from hostweave.torch.transforms import inference_tensor

tracing = threading.RLock()  # held while torch traces, because concurrent traces would change each other's symbolic sizes
TORCH = str(Path(torch.__file__).parent)

# Not decomposed: ops of a fusion, and composite ops that the compiler recognises.
_KEPT = """
linear scaled_dot_product_attention layer_norm rms_norm gelu silu softmax log_softmax matmul embedding cross_entropy_loss dropout
split chunk stack cumsum one_hot
"""
# Decomposed by torch's rules: ops that torch.export would keep.
_NOT_KEPT = """
elu leaky_relu native_group_norm _native_batch_norm_legit _native_batch_norm_legit_functional
upsample_bilinear2d upsample_bicubic2d upsample_nearest2d
max_pool2d_with_indices_backward
"""


class Exported(NamedTuple):
    program: ExportedProgram
    how: dict[str, str]  # path of a repeated layer -> how the layer was traced
    reads: dict[str, set[str]]  # path of a module -> attributes that the module read
    grad_mode: bool | None  # grad mode of the trace if forward called torch.is_grad_enabled(), otherwise None

    @property
    def arguments(self) -> list[str]:
        """Names of the tensors and numbers among the arguments."""
        return [spec.arg.name for spec in self.program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]


def exported(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any = None, training: bool = False
) -> Exported:
    """Exports the functional graph of a module, decomposed by `decompositions` or, in training, `before_derivatives`. With `training`, an
    op marks each use of a value that has no gradient because of detach() or torch.no_grad()."""
    tensors = [*_named_leaves(args, kwargs), *module.named_parameters(), *module.named_buffers()]
    for name, given in tensors:
        if given.layout is not torch.strided:
            why = f"{name} is a tensor of {given.layout}, but only torch.strided is supported"
            raise ProgramError(f"{type(module).__name__}: {why}; pass its to_dense()")
    if training and torch.is_inference_mode_enabled():
        why = "torch.inference_mode() is on, which computes no gradients"
        raise ProgramError(f"{type(module).__name__}: {why}; compile with training=True outside of it")
    differentiated = [one for one in tensors if training or (one[1].requires_grad and not torch.is_inference_mode_enabled())]
    if why := inference_tensor(differentiated):
        raise ProgramError(f"{type(module).__name__}: {why}")
    repeats, fixed, assigned, asked = Repeats(module), [], dict[str, Location](), list[bool]()
    try:
        with (
            tracing,
            _without_traced_tensors(module, assigned),
            on_global_tensors(module),
            replaced((torch, "is_grad_enabled", partial(_grad_mode, torch.is_grad_enabled, asked))),
            replaced(*_replacements(module), (lift_constants_pass, "_get_attr", partial(_constant, training, _get_attr))),
            _of_known_derivatives(module) if training else nullcontext() as functions,
            torch.set_grad_enabled(training),
            warnings.catch_warnings(),
            without_code(),
            symbolic() as fixed,
        ):
            warnings.simplefilter("ignore", FutureWarning)  # torch.export warns about its own code
            warnings.filterwarnings("error", ".* assigned during export")
            warnings.filterwarnings("ignore", "A model attribute .* requires gradient")  # refused in training
            warnings.filterwarnings("ignore", ".*_flat_weights")  # torch.export replaces weights of recurrent layers
            given = _apart(module, (tuple(args), dict(kwargs)))
            call: Any = partial(export, module, *given, dynamic_shapes=dynamic_shapes, strict=False)
            try:
                with repeats.standing_in(), watched(module) as (reads, _):
                    program = call()
                why = repeats.why_apart(program.graph)
            except Exception:
                if not repeats.has_indices:
                    raise
                why = "an index in a cache is used where only an int is accepted"  # the next `call()` raises any other error again
                repeats.how = dict.fromkeys(repeats.layers, "")
            if why:
                repeats.how = dict.fromkeys(repeats.how, f"traced: {why}")
                with watched(module) as (reads, _):
                    program = call()
            if training:
                _mark_detached(program.graph)
            of_storages(program.graph)
            program.example_inputs = None  # torch generates guards from the inputs, with wrong names if there are more than ten
            table = dict(before_derivatives() if training else decompositions())
            _rename(program, lambda name: f"module.{name}")  # a name could equal that of an attribute of GraphModule
            program = program.run_decompositions(table)
            write_out(program.graph)
            program = of_pairs(program, table)
            _rename(program, lambda name: name.removeprefix("module."))
            _name_outputs(program)
            program, names = _without_empty_operands(program), repeats.names_read(reads)
        cast_parameters(program, module)
        program.graph_module.meta["functions"] = functions  # alive while the graph is
        return Exported(program, repeats.how, names, training if asked else None)
    except ProgramError:
        raise
    except Exception as error:
        if fixed and "specialized it to be a constant" in str(error):
            why = "a dynamic size is fixed by a comparison, by int() or float(), or by a function of Python numbers"
            remedy = "compute with tensors, such as torch.full((), n), or leave the dim out of dynamic_shapes"
            raise ProgramError(f"{type(module).__name__}: {why}; {remedy}", fixed[0]) from error
        if found := re.match(r"The tensor attributes? (self\S*?(\w+)(?:\[.*?\])?),? .*assigned during export", str(error)):
            why = f"forward stores a tensor in {found[1]}, but a program would not"
            remedy = "return the tensor, make it a buffer that forward writes to in place, or pass fullgraph=False"
            raise ProgramError(f"{type(module).__name__}: {why}; {remedy}", assigned.get(found[2])) from error
        raise error_of_torch(type(module).__name__, error) from error


@contextmanager
def _without_traced_tensors(module: nn.Module, assigned: dict[str, Location]) -> Iterator[None]:
    """Refuses `.data` of traced tensors in user code. Records in `assigned` the line at which a module's attribute was last set to a
    tensor. At the end, removes new attributes that contain traced tensors."""
    thread, own = threading.get_ident(), nn.Module.__setattr__
    before = [(state, set(state)) for state in map(vars, module.modules())]

    def put(submodule: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value is vars(submodule).get("_buffers", {}).get(name):
                return  # torch.export would copy the buffer to itself, and fail
            assigned[name] = Location.of_caller(TORCH)
        own(submodule, name, value)

    def of_data(access: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: torch.Tensor, *value: torch.Tensor) -> Any:
            is_traced = threading.get_ident() == thread and type(x) not in (torch.Tensor, nn.Parameter)
            if is_traced and not sys._getframe(1).f_code.co_filename.startswith((*OF_TORCH, "<eval", "<frozen")):
                why = "forward uses .data of a tensor, which torch.export does not trace"
                raise ProgramError(f"{why}; use detach(), or write in place in torch.no_grad()", Location.of_caller(TORCH))
            return access(x, *value)

        return call

    data: Any = torch.Tensor.data
    try:
        with (
            replaced((nn.Module, "__setattr__", put)),
            patch.object(torch.Tensor, "data", property(of_data(data.__get__), of_data(data.__set__)), create=True),
        ):
            yield
    finally:
        for held, names in before:
            new = {name: held[name] for name in held.keys() - names}
            for name in [name for name, value in new.items() if any(isinstance(one, FakeTensor) for one in pytree.tree_leaves(value))]:
                del held[name]


def without_code() -> AbstractContextManager[None]:
    """Makes torch generate Python code for a graph only if the graph is run."""
    return _use_lazy_graph_module(True)


def _rename(program: ExportedProgram, name: Callable[[str], str]) -> None:
    """Renames the parameters, buffers and constants of a program."""
    inputs, outputs = program.graph_signature.input_specs, program.graph_signature.output_specs
    kept = {spec.target for spec in inputs if spec.kind is InputKind.CUSTOM_OBJ}
    for spec in (*inputs, *(one for one in outputs if one.kind is OutputKind.BUFFER_MUTATION)):
        spec.target = name(spec.target) if spec.target and spec.target not in kept else spec.target
    for tensors in (program.state_dict, program.constants):
        renamed = {key if key in kept else name(key): tensor for key, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)


def _grad_mode(get: Callable[[], bool], asked: list[bool]) -> bool:
    """Returns the grad mode, and records calls by code outside of torch and of this package."""
    if not sys._getframe(2).f_code.co_filename.startswith(OF_TORCH):
        asked.append(True)
    return get()


def _constant(training: bool, get: Callable[..., Any], root: nn.Module, path: str) -> Any:
    """Constant of an exported graph. For a parameter that is not registered, torch.export would drop the version counter and
    requires_grad."""
    value = get(root, path)
    if not isinstance(value, nn.Parameter):
        return value
    with unset_fake_temporarily():
        return value.detach().requires_grad_(training and value.requires_grad)


def _refused(why: str, *_: Any, **__: Any) -> Any:
    raise ProgramError(why, Location.of_caller(TORCH))


_GRADIENTS = "forward computes gradients, which is not compiled; compute them outside of the module, or use torch.func.jvp"
_HOOK = "a hook is not compiled, so gradients would be wrong; express it with tensors and detach()"
_INFERENCE = "forward uses torch.inference_mode(), whose tensors autograd cannot use; use torch.no_grad()"
_SEED = """forward calls torch.manual_seed, which a program cannot repeat in each call; call it before the module: programs get their \
seeds from torch's generator"""


def _randomize(x: torch.Tensor, *bounds: int, to: int | None = None, generator: Any = None) -> torch.Tensor:
    """Computes torch.Tensor.random_ by randint_like, because torch generates no Python code for the op random.from."""
    if generator is not None:
        raise ProgramError(OTHER_GENERATOR)
    largest = 2 / torch.finfo(x.dtype).eps if x.is_floating_point() else 1 if x.dtype == torch.bool else torch.iinfo(x.dtype).max
    given = [one for one in (*bounds, to) if one is not None] or [int(largest) + 1]
    return x.copy_(torch.randint_like(x, *given))


def _replacements(module: nn.Module) -> Iterator[Replacement]:
    """Functions that are replaced while a module is traced.

    - Unsupported functions raise ProgramError, or call supported functions.
    - Modules of transformers use scans, triangular solvers and scaled matmuls instead of loops over elements and Triton kernels.
    - Two loggers of torch are silent, and torch does not print the graph of a module that fails.
    - Fast versions of slow private functions of torch (`_SLOW`) halve the time of an export.
    """
    yield from ((torch, "manual_seed", partial(_refused, _SEED)), (torch.Tensor, "random_", _randomize))
    yield from ((torch.autograd, name, partial(_refused, _GRADIENTS)) for name in ("grad", "backward"))
    yield from quantized_linears(module)
    yield import_module("torch._higher_order_ops.associative_scan"), "associative_scan", associative_scan
    for name in {type(submodule).__module__ for submodule in module.modules()}:
        if name.startswith("transformers.models.") and hasattr(sys.modules[name], "is_torchdynamo_exporting"):
            yield sys.modules[name], "is_torchdynamo_exporting", lambda: False
        if name == "transformers.models.rwkv.modeling_rwkv":
            yield sys.modules[name], "rwkv_linear_attention", partial(rwkv_attention, sys.modules[name].rwkv_linear_attention_cpu)
    for name in ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor"):
        yield logging.getLogger(name), "isEnabledFor", lambda _: False
    yield import_module("torch.export._trace"), "print", lambda *_, **__: None
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    faster: list[Callable[..., Any]] = [partial(_collect_once, *registered), _override_few, _lines_of_user]
    yield from ((owner, name, new) for (owner, name), old, new in zip(_SLOW, _slow, faster, strict=True) if old)


def _named_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    found = [one for given in (list(args), dict(kwargs)) for one in pytree.tree_flatten_with_path(given)[0]]
    return [(f"example_inputs{pytree.keystr(path)}", leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]


def _apart(module: nn.Module, given: Any) -> Any:
    """Replaces arguments by empty tensors: those that are no leaves of autograd, and those that share memory with another argument or with
    the module. torch.export would take one tensor for one input, and fails if forward writes to shared memory."""
    tensors = (one for one in (*module.parameters(), *module.buffers()) if not isinstance(one, DTensor))
    seen = {one.untyped_storage()._cdata for one in tensors}

    def once(leaf: torch.Tensor) -> torch.Tensor:
        storage = leaf.untyped_storage()._cdata
        is_kept = leaf.is_leaf and storage not in seen
        seen.add(storage)
        made = leaf if is_kept else torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        return made if is_kept else made.requires_grad_(leaf.requires_grad)

    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf if isinstance(leaf, DTensor) else once(leaf), given)


def error_of_torch(name: str, error: Exception) -> ProgramError:
    if isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException) or "not tracked with proxy" in str(error):
        why = "a branch depends on the values of a tensor, which are not known at compile time"
        kinds = "int(t), range(t.item()), and a dim or a count that t.item() gives are branches, too"
        return ProgramError(f"{name}: {why}; {kinds}; write tensor ops instead, such as torch.where", _line_of(error))
    if "expected compiled_fn to be GraphModule" in str(error):
        why = "forward writes to an argument or buffer that shares memory with another one"
        return ProgramError(f"{name}: {why}; pass a clone(), or take the other one from it in forward")
    why = " ".join(str(error).strip().partition("\n\n")[0].split())
    *_, (raising, _) = traceback.walk_tb(error.__traceback__)
    if _is_users(raising):
        return ProgramError(
            f"{name}: forward raises {type(error).__name__}: {why}; correct forward, or the example inputs", _line_of(error)
        )
    remedy = "write other tensor ops, or pass example_inputs that the module takes"
    if found := re.search(r"(?:Found|input type) <class '(?:.*\.)?(\w+)'>", why):
        remedy = f"use tensors, or call torch.export.register_dataclass({found[1]}) for a dataclass"
    why = f"torch.export: {why.partition('. ')[0] if found else why}; {remedy}"
    return ProgramError(f"{name}: {why}", _line_of(error))


def _line_of(error: Exception) -> Location | None:
    """Innermost line of the user in a traceback."""
    own = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_users(frame)]
    return Location(Path(own[-1][0]).name, own[-1][1]) if own else None


def _is_users(frame: FrameType) -> bool:
    """True for frames outside of torch, of this package, and of libraries that these call."""
    return not is_of_package(frame) and not frame.f_code.co_filename.startswith((TORCH, "<", *LIBRARIES))


# private functions of torch, which other versions of torch may lack
_SLOW = (
    (exported_program, "_collect_all_valid_cia_ops"),
    (exported_program, "_override_composite_implicit_decomp"),
    (torch.utils._traceback, "_extract_symbolized_tb"),
)
_get_attr = vars(lift_constants_pass)["_get_attr"]
_slow: list[Any] = [getattr(owner, name, None) for owner, name in _SLOW]
_collect, _override, _lines = _slow
_collect_once = cache(lambda *registered: _collect())


def _override_few(rules: Mapping[Any, Any], **more: Any) -> Any:
    """Replaces only composite ops whose rules are not those of torch."""
    few = {op: rule for op, rule in rules.items() if not (isinstance(rule, partial) and rule.keywords.get("kernel") is op)}
    return _override(few, **more)


def _lines_of_user(lines: Sequence[Any], skip: int) -> Any:
    """Records only lines that torch looks for: outside of torch, or in functions named `forward`."""
    if lines and not isinstance(lines[0], dict):  # newer versions of torch; records all lines
        return _lines(lines, skip)
    return _lines([line for line in lines[skip:] if line["name"] == "forward" or not line["filename"].startswith(TORCH)], 0)


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Rules of torch.export for ops outside `_KEPT`, torch's rules for `_NOT_KEPT`, and the rules of this package."""
    table = default_decompositions()
    kept = {op: table[op] for op in list(table) if str(op).split(".")[1] not in _KEPT.split()}
    scatter = torch.ops.aten.select_scatter.default
    return {
        **kept,
        scatter: keeps_numbers(kept[scatter]),
        **{op: rule for op, rule in decomposition_table.items() if str(op).split(".")[1:2] in [[name] for name in _NOT_KEPT.split()]},
        **COMPOSED,
    }


@cache
def before_derivatives() -> dict[Any, Callable[..., Any]]:
    """Rules for ops that are decomposed before differentiation, as in torch. Ops with a custom derivative are decomposed later, because the
    derivative of a decomposed op may be wrong. For example, that of softplus is NaN if exp(x) overflows."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    composed = COMPOSED.keys() - linalg.DERIVED - special.DERIVED
    return {op: rule for op, rule in decompositions().items() if op in composed or op.has_kernel_for_dispatch_key(composite)}


@contextmanager
def _of_known_derivatives(module: nn.Module) -> Iterator[dict[int, Any]]:
    """Refuses inference mode, and hooks, which change gradients outside of the graph. Records each torch.autograd.Function of the user as
    one op. Yields the recorded functions."""
    known: dict[int, Any] = {}
    for path, submodule in module.named_modules():
        if submodule._backward_hooks or submodule._backward_pre_hooks:
            raise ProgramError(f"{path or type(module).__name__}: backward hooks are not compiled; remove them, or use torch's backward")

    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or cls.__module__.startswith("torch._"):  # torch traces with its private classes
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)
        if cls is CheckpointFunction:  # ignored, because the min-cut partitioner chooses the values to save
            function, _, *given = args
            return function(*given)
        return call_function(known, cls, args, kwargs)

    begin = torch.inference_mode.__enter__

    def begin_inference(context: torch.inference_mode) -> None:
        begin(context) if not context.mode else _refused(_INFERENCE)

    # Function.apply calls _SingleLevelFunction.apply, so a stored reference to Function.apply does too.
    with (
        patch.object(_SingleLevelFunction, "apply", classmethod(apply), create=True),
        replaced((torch.Tensor, "register_hook", partial(_refused, _HOOK)), (torch.inference_mode, "__enter__", begin_inference)),
    ):
        yield known


def _mark_detached(graph: Graph) -> None:
    """Marks uses of values of detach() or torch.no_grad() by an op that decompositions keep. The op replaces detach_()."""
    for node in list(graph.nodes):
        name = str(node.target)
        if name == "aten.detach_.default":
            _expect_unwritten(node)
            node.target = ops.detach.default
        elif name == "aten.detach.default":
            _expect_unwritten(node)
            _mark_uses(graph, node)
        elif name == "wrap_with_set_grad_enabled" and node.args[0] is False:
            for made in list(node.users):
                _mark_uses(graph, made)


def _mark_uses(graph: Graph, node: Node) -> None:
    """Marks each use of a value and of its views. Does not mark the value itself, because a write to the operand of detach() may change
    the value before a use."""
    for user in list(node.users):
        if is_view(user):
            _mark_uses(graph, user)
            continue
        with graph.inserting_before(user):
            marked = graph.call_function(ops.detach.default, (node,))
        marked.meta = dict(node.meta)
        user.replace_input_with(node, marked)


def _expect_unwritten(node: Node) -> None:
    """Refuses writes to a node and to its views, because such writes would also change the operand of detach()."""
    for user in node.users:
        if node in written_by(user):
            why = f"{user.target} writes to the result of detach()"
            raise ProgramError(f"{why}, which is not supported in training; write to a clone() of it", location(user))
        if is_view(user):
            _expect_unwritten(user)


def _name_outputs(program: ExportedProgram) -> None:
    for spec, node in zip(program.graph_signature.output_specs, program.graph.output_node().args[0], strict=True):
        if isinstance(node, Node):
            spec.arg.name = node.name


def _without_empty_operands(program: ExportedProgram) -> ExportedProgram:
    """Removes empty operands of concatenations, such as x[..., n:] if a rotary embedding covers all n features of a head."""
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        tensors, *dim = node.args
        operands = [t for t in tensors if not any(isinstance(n, int) and n == 0 for n in t.meta["val"].shape)]
        node.args = (operands or tensors[:1], *dim)
    program.graph.eliminate_dead_code()
    return program
