"""Functions of torch on tensors of a fusion, such as `torch.relu(x)`. A call is recorded as ATen ops on "meta" tensors. `aten.TABLE`
translates these ops. In the recording, multiples of large primes represent unknown sizes. A second recording with other primes shows which
numbers depend on the unknown sizes."""

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
_OTHER_PRIMES = (1163, 1153, 1151, 1129, 1123, 1117, 1109, 1103, 1097, 1093, 1091, 1087)  # in reverse, so that min(M, N) differs
_SHAPES = {  # arguments that may depend on unknown sizes, because entries in aten.TABLE read the shape of the result instead
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "expand", "split", "split_with_sizes"), (0, 1, 2)),
    **dict.fromkeys(("zeros", "ones", "full", "empty", "empty_permuted", "empty_strided"), (0,)),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty_strided"), (1,)),
    "arange.default": (0,),
    "arange.start": (1,),
    "arange.start_step": (1,),
}
_POSITIONS = {"slice": (2, 3), "select": (2,)}  # arguments that are positions along a dim
_BY_SIZE = "computes with a size that is known only at a call; state it as an int, or use functions of hostweave"


def call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = _name(function)
    with stated_location(Location.of_caller(TORCH)):
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                raise _refused(name, f"a torch.Tensor of shape {tuple(leaf.shape)} is not a tensor of the fusion; make it an input")
        traced = [leaf for leaf in leaves if isinstance(leaf, hw.Tensor)]
        sizes = _Sizes(name, traced, _PRIMES)
        graph, returned = _recorded(function, name, leaves, spec, sizes)
        values: dict[Node, Any] = dict(zip(_nodes(graph, "placeholder"), traced, strict=True))
        for node in _nodes(graph, "call_function"):
            if not is_known(node):
                raise _refused(name, f"aten.{op_of(node)} has no equivalent in a fusion; {instead_of(name.rpartition('.')[2])}")
        if sizes.symbols:
            others = _Sizes(name, traced, _OTHER_PRIMES)
            again, returned_again = _recorded(function, name, leaves, spec, others)
            _expect_numbers(name, (graph, returned, sizes), (again, returned_again, others))
        for node in _nodes(graph, "call_function"):
            values[node] = _computed(node, values, sizes, traced[0])
        (output,) = _nodes(graph, "output")
        results = iter(output.args[0])
        return pytree.tree_map_only(torch.Tensor, lambda _: values[next(results)], returned)


class _Sizes:
    """Numbers that represent unknown sizes."""

    def __init__(self, name: str, tensors: Sequence[hw.Tensor], primes: Sequence[int]):
        self.symbols = symbols = sorted({symbol for x in tensors for dim in x.type.dims for symbol in dim.size.symbols})
        if len(symbols) > len(_PRIMES):
            raise _refused(name, f"more than {len(_PRIMES)} sizes that are known only at a call; use functions of hostweave")
        self._name, self._primes = name, dict(zip(symbols, primes, strict=False))
        self._numbers = {symbol: _SMOOTH * prime for symbol, prime in self._primes.items()}
        self._fixed = prod(int(dim.size) for x in tensors for dim in x.type.dims if dim.size.is_int)
        self._known = {dim.size.bind(self._numbers): str(dim.size) for x in tensors for dim in x.type.dims if not dim.size.is_int}

    def of(self, x: hw.Tensor) -> list[int]:
        return [dim.size.bind(self._numbers) for dim in x.type.dims]

    def shape(self, value: Any) -> tuple[int | str, ...]:
        """Shape of a recorded value, with symbolic sizes in place of the numbers that represent the sizes."""
        return tuple(map(self.text, value.shape))

    def in_words(self, text: str) -> str:
        return re.sub(r"\d+", lambda number: str(self._known.get(int(number[0]), number[0])), text)

    def text(self, number: int) -> int | str:
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
        with torch.no_grad(), torch.backends.opt_einsum.flags(enabled=torch.backends.opt_einsum.enabled and not sizes.symbols):
            if function in (torch.unbind, torch.split) and len(flat(*blank)) > _PRIMES[0]:  # a recording would take minutes
                raise ValueError("the number of results depends on a size that is known only at a call")
            return recorded(flat, blank, decompositions()), returned[0]
    except Exception as error:  # torch raises errors of many kinds
        raise _refused(name, f"{sizes.in_words(str(error).strip().rstrip('.'))}; {instead_of(name.rpartition('.')[2])}") from error


def _expect_numbers(name: str, *recordings: tuple[GraphModule, Any, _Sizes]) -> None:
    """Raises ProgramError if numbers, ops or shapes differ between two recordings. Rewrites positions that depend on an unknown size."""
    graphs, returned, both = zip(*recordings, strict=True)
    ops, results = ([[node.target for node in graph.graph.nodes] for graph in graphs], [_numbers(made) for made in returned])
    if ops[0] != ops[1] or results[0] != results[1]:
        raise _refused(name, _BY_SIZE)
    for pair in zip(*(_nodes(graph, "call_function") for graph in graphs), strict=True):
        node, twin = pair
        shapes = [list(map(sizes.shape, _tensors(of.meta["val"]))) for of, sizes in zip(pair, both, strict=True)]
        word, args = op_of(node).partition(".")[0], list(node.args)
        free = _SHAPES.get(op_of(node), _SHAPES.get(word, ()))
        differing = [
            at for at, (one, other) in enumerate(zip(node.args, twin.args, strict=True)) if at not in free and str(one) != str(other)
        ]
        if shapes[0] != shapes[1] or str(node.kwargs) != str(twin.kwargs) or not {*differing} <= {*_POSITIONS.get(word, ())}:
            raise _refused(name, _BY_SIZE)
        for at in differing:
            args[at] = _position(
                name, *((of.args[at], of.args[0].meta["val"].shape[of.args[1]], sizes) for of, sizes in zip(pair, both, strict=True))
            )
        node.args = tuple(args)


def _position(name: str, *recorded: tuple[int, int, _Sizes]) -> int | str | None:
    """Position along a dim as a number from the end, None for the end, or text. Takes the position and the size in both recordings."""
    from_end = {position - size for position, size, _ in recorded}
    if len(from_end) == 1 and max(from_end) <= 0:
        return max(from_end) or None
    texts = {sizes.text(position) for position, _, sizes in recorded}
    if len(texts) > 1:
        raise _refused(name, _BY_SIZE)
    return texts.pop()


def _tensors(made: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]


def _numbers(made: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, int | float | tuple)]


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
    """Name of the function for the user, such as torch.relu or torch.nn.functional.silu."""
    name = getattr(function, "__name__", str(function))
    functional = getattr(torch.nn.functional, name, None)
    module = "torch.nn.functional" if functional is function and not hasattr(torch, name) else "torch"
    return f"{module}.{re.sub('^__(get)?|__$', '', name) or name}"
