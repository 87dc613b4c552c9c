"""Functions of torch on tensors of a fusion, such as `torch.relu(x)`. A call is recorded as ATen ops on "meta" tensors. `aten.TABLE`
translates these ops. In the recording, multiples of large primes represent unknown sizes."""

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

import hostweave as hw
from hostweave.base.errors import Location, ProgramError, stated_location
from hostweave.fusion_ir.frontend.remedies import instead_of
from hostweave.torch.aten import computed
from hostweave.torch.aten.table import torch_dtype
from hostweave.torch.exported import TORCH, decompositions
from hostweave.torch.graph import is_known, recorded
from hostweave.torch.nodes import op_of

_SMOOTH = 48  # factor of the numbers for unknown sizes, so that these numbers are divisible by 2, 3, 4, 6, 8, ...
_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069)
_TAKE_SIZES = (
    "slice",
    "select",
    "arange",
    "split",
    "view",
    "expand",
    "_unsafe_view",
    "reshape",
)  # unknown sizes may be arguments of these ops; most of their entries in aten.TABLE read the shape of the result instead


def call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = _name(function)
    with stated_location(Location.of_caller(TORCH)):
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                raise _refused(name, f"a torch.Tensor of shape {tuple(leaf.shape)} is not a tensor of the fusion; make it an input")
        traced = [leaf for leaf in leaves if isinstance(leaf, hw.Tensor)]
        sizes = _Sizes(name, traced)
        graph, returned = _recorded(function, name, leaves, spec, sizes)
        values: dict[Node, Any] = dict(zip(_nodes(graph, "placeholder"), traced, strict=True))
        _expect_table(name, graph, sizes)
        for node in _nodes(graph, "call_function"):
            values[node] = _computed(node, values, sizes, traced[0])
        (output,) = _nodes(graph, "output")
        results = iter(output.args[0])
        return pytree.tree_map_only(torch.Tensor, lambda _: values[next(results)], returned)


class _Sizes:
    """Numbers that represent unknown sizes."""

    def __init__(self, name: str, tensors: Sequence[hw.Tensor]):
        symbols = sorted({symbol for x in tensors for dim in x.type.dims for symbol in dim.size.symbols})
        if len(symbols) > len(_PRIMES):
            raise _refused(name, f"more than {len(_PRIMES)} sizes that are known only at a call; use functions of hostweave")
        self._name, self._primes = name, dict(zip(symbols, _PRIMES, strict=False))
        self._numbers = {symbol: _SMOOTH * prime for symbol, prime in self._primes.items()}
        self._fixed = prod(int(dim.size) for x in tensors for dim in x.type.dims if dim.size.is_int)
        self._known = {dim.size.bind(self._numbers): str(dim.size) for x in tensors for dim in x.type.dims if not dim.size.is_int}

    def of(self, x: hw.Tensor) -> list[int]:
        return [dim.size.bind(self._numbers) for dim in x.type.dims]

    def shape(self, value: Any) -> tuple[int | str, ...]:
        """Shape of a recorded value, with symbolic sizes in place of the numbers that represent them."""
        return tuple(map(self._text, value.shape))

    def in_words(self, text: str) -> str:
        return re.sub(r"\d+", lambda number: str(self._known.get(int(number[0]), number[0])), text)

    def is_number_of(self, value: Any) -> bool:
        """True if a Python number may have been computed from an unknown size: it, or its inverse, is a multiple of a prime."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not value or value != value or abs(value) == float("inf"):
            return False
        return any(abs(one) >= _PRIMES[0] and round(one) % prime == 0 for one in (value, 1 / value) for prime in self._primes.values())

    def _text(self, number: int) -> int | str:
        if number in self._known:
            return self._known[number]
        inside = [symbol for symbol, prime in self._primes.items() if number % prime == 0]
        if not inside or not number:
            if number < _PRIMES[0] or self._fixed % number == 0:
                return number
            raise _refused(self._name, f"gives a size that is not a product of {', '.join(self._primes)}; use functions of hostweave")
        factor = Fraction(number)
        for symbol in inside:
            factor /= self._numbers[symbol]
        factors = [str(factor.numerator), *inside] if factor.numerator > 1 else inside
        return "*".join(factors) + (f"/{factor.denominator}" if factor.denominator > 1 else "")


def _recorded(function: Any, name: str, leaves: list[Any], spec: Any, sizes: _Sizes) -> tuple[GraphModule, Any]:
    """Records the ATen ops of a call. Also returns the call's results."""
    returned: list[Any] = []
    blank = [torch.empty(sizes.of(leaf), dtype=torch_dtype(leaf), device="meta") for leaf in leaves if isinstance(leaf, hw.Tensor)]

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(leaf, hw.Tensor) else leaf for leaf in leaves], spec)
        returned[:] = [function(*args, **kwargs)]
        return [leaf for leaf in pytree.tree_leaves(returned[0]) if isinstance(leaf, torch.Tensor)]

    try:
        with torch.no_grad():
            return recorded(flat, blank, decompositions()), returned[0]
    except Exception as error:  # torch raises errors of many kinds
        raise _refused(name, f"{sizes.in_words(str(error).strip().rstrip('.'))}; {instead_of(name.rpartition('.')[2])}") from error


def _expect_table(name: str, graph: GraphModule, sizes: _Sizes) -> None:
    for node in _nodes(graph, "call_function"):
        if not is_known(node):
            raise _refused(name, f"aten.{op_of(node)} has no equivalent in a fusion; {instead_of(name.rpartition('.')[2])}")
        if any(map(sizes.is_number_of, (*node.args, *node.kwargs.values()))) and op_of(node).split(".")[0] not in _TAKE_SIZES:
            raise _refused(name, "computes with a size that is known only at a call; state it as an int, or use functions of hostweave")


def _computed(node: Any, values: Mapping[Node, Any], sizes: _Sizes, anything: hw.Tensor) -> Any:
    args, kwargs = pytree.tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))
    if node.target is operator.getitem:
        return args[0][args[1]]
    return computed(op_of(node), node, args, kwargs, sizes.shape, anything)


def _nodes(made: GraphModule, op: str) -> Iterator[Any]:
    return (node for node in made.graph.nodes if node.op == op)


def _refused(name: str, why: str) -> ProgramError:
    return ProgramError(f"{name}: {why}", Location.of_caller())


def _name(function: Any) -> str:
    """Name for the user, such as torch.relu or torch.nn.functional.silu."""
    name = getattr(function, "__name__", str(function))
    functional = getattr(torch.nn.functional, name, None)
    module = "torch.nn.functional" if functional is function and not hasattr(torch, name) else "torch"
    return f"{module}.{re.sub('^__(get)?|__$', '', name) or name}"
