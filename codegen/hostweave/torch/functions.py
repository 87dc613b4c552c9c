"""Functions of torch on tensors of a fusion, such as `torch.relu(x)`. A call is recorded as ATen ops on fake tensors, in which symbolic
ints of torch stand for unknown sizes. `aten.TABLE` translates these ops."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

import hostweave as hw
from hostweave.base.errors import Location, ProgramError, stated_location
from hostweave.fusion_ir.frontend.remedies import instead_of
from hostweave.torch.aten import computed
from hostweave.torch.aten.table import TORCH_DTYPES
from hostweave.torch.exported import TORCH, decompositions, tracing
from hostweave.torch.graph import is_known, recorded
from hostweave.torch.nodes import is_size, op_of, size_of
from hostweave.torch.numbers import as_tensors
from hostweave.torch.replaced import replaced

_HINT = 48_000  # torch compares unknown sizes as if their values were this number and larger multiples of 48
_BY_SIZE = "computes with a size that is known only at a call; state it as an int, or use functions of hostweave"


def call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = _name(function)
    with stated_location(Location.of_caller(TORCH)):
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                raise _refused(name, f"a torch.Tensor of shape {tuple(leaf.shape)} is not a tensor of the fusion; make it an input")
        traced = [leaf for leaf in leaves if isinstance(leaf, hw.Tensor)]
        sizes = _Sizes(name, traced)
        made, returned = _recorded(function, name, leaves, spec, sizes)
        as_tensors(made.graph)
        values: dict[Node, Any] = dict(zip(made.graph.find_nodes(op="placeholder"), traced, strict=True))
        ops = [node for node in made.graph.nodes if node.op == "call_function" and not is_size(node)]
        for node in ops:
            if not is_known(node):
                raise _refused(name, f"aten.{op_of(node)} has no equivalent in a fusion; {instead_of(name.rpartition('.')[2])}")
        for node in ops:
            values[node] = _computed(node, values, sizes, traced[0])
        output: Any = made.graph.output_node()
        results = iter(output.args[0])
        return pytree.tree_map_only(torch.Tensor, lambda _: values[next(results)], returned)


class _Sizes:
    """Symbolic ints of torch for the unknown sizes of a call."""

    def __init__(self, name: str, tensors: Sequence[hw.Tensor]):
        self._name, self._env = name, ShapeEnv()
        self._mode, self.numbers = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True), dict[str, Any]()
        for symbol in sorted({symbol for x in tensors for dim in x.type.dims for symbol in dim.size.symbols}):
            line = torch.empty(_HINT + 48 * len(self.numbers), device="meta")
            self.numbers[symbol] = self._mode.from_tensor(line).shape[0]
        self._words = {number.node.expr: symbol for symbol, number in self.numbers.items()}

    def fake(self, x: hw.Tensor) -> torch.Tensor:
        with self._mode:
            return torch.empty([dim.size.bind(self.numbers) for dim in x.type.dims], dtype=TORCH_DTYPES[x.dtype], device="meta")

    @property
    def are_decisive(self) -> bool:
        """True if other values, in another order, would change the result of a comparison."""
        others = {symbol: 2 * _HINT - 48 * number for number, symbol in enumerate(self._words)}
        return not all(guard.expr.subs(others) for guard in self._env.guards)

    def shape(self, value: Any) -> tuple[int | str, ...]:
        return tuple(map(self.text, value.shape))

    def text(self, size: Any) -> int | str:
        try:
            text = size_of(size)
        except ProgramError:
            raise _refused(self._name, _BY_SIZE) from None
        return self.in_words(text) if isinstance(text, str) else text

    def in_words(self, text: str) -> str:
        """Text with the names of sizes in place of torch's symbols."""
        words = {str(symbol): word for symbol, word in self._words.items()}
        return re.sub(r"\bs\d+\b", lambda symbol: words.get(symbol[0], symbol[0]), text)


def _recorded(function: Any, name: str, leaves: list[Any], spec: Any, sizes: _Sizes) -> tuple[GraphModule, Any]:
    """Records the ATen ops of a call. Also returns the call's results."""
    returned: list[Any] = []
    fakes = [sizes.fake(leaf) for leaf in leaves if isinstance(leaf, hw.Tensor)]

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(leaf, hw.Tensor) else leaf for leaf in leaves], spec)
        returned[:] = [function(*args, **kwargs)]
        return [leaf for leaf in pytree.tree_leaves(returned[0]) if isinstance(leaf, torch.Tensor)]

    def number(own: Callable[..., int], size: SymNode, *where: Any) -> int:
        if size.expr.free_symbols:
            is_split = function in (torch.unbind, torch.split)
            why = f"the number of results depends on a size that is known only at a call; {instead_of(function.__name__)}"
            raise _refused(name, why if is_split else _BY_SIZE)
        return own(size, *where)

    try:
        with (
            tracing,
            replaced((SymNode, "guard_int", partial(number, SymNode.guard_int))),
            torch.backends.opt_einsum.flags(enabled=torch.backends.opt_einsum.enabled and not sizes.numbers),
            torch.no_grad(),
        ):
            made = recorded(flat, fakes, decompositions())
    except ProgramError:
        raise
    except Exception as error:  # torch raises errors of many kinds
        raise _refused(name, f"{sizes.in_words(str(error).strip().rstrip('.'))}; {instead_of(name.rpartition('.')[2])}") from error
    if sizes.are_decisive or any(isinstance(leaf, torch.SymInt | torch.SymFloat) for leaf in pytree.tree_leaves(returned)):
        raise _refused(name, _BY_SIZE)
    return made, returned[0]


def _computed(node: Any, values: Mapping[Node, Any], sizes: _Sizes, anything: hw.Tensor) -> Any:
    def operand(of: Node) -> Any:
        return sizes.text(of.meta["val"]) if is_size(of) else values[of]

    args, kwargs = pytree.tree_map_only(Node, operand, (node.args, node.kwargs))
    if node.target is operator.getitem:
        return args[0][args[1]]
    return computed(op_of(node), node, args, kwargs, sizes.shape, anything)


def _refused(name: str, why: str) -> ProgramError:
    return ProgramError(f"{name}: {why}", Location.of_caller())


def _name(function: Any) -> str:
    """Name of the function for the user, such as torch.relu or torch.nn.functional.silu."""
    name = getattr(function, "__name__", str(function))
    functional = getattr(torch.nn.functional, name, None)
    module = "torch.nn.functional" if functional is function and not hasattr(torch, name) else "torch"
    return f"{module}.{re.sub('^__(get)?|__$', '', name) or name}"
