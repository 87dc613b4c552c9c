"""The sharding plan of a module, which maps names of tensors and modules to mesh axes, or names of modules to styles of torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import filter as fnmatching
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.placement_types import _StridedShard

from hostweave.base.errors import ProgramError, closest_word
from hostweave.torch.distributed import has_rows
from hostweave.types.mesh import Mesh

AxesOfDims = tuple[tuple[str, ...], ...]


@dataclass
class Layouts:
    """Stated shardings by name, also of buffers (in `parameters`) and of results of modules (in `outputs`)."""

    parameters: dict[str, AxesOfDims] = field(default_factory=dict)
    inputs: dict[str, AxesOfDims] = field(default_factory=dict)
    outputs: dict[str, AxesOfDims] = field(default_factory=dict)
    data: set[str] = field(default_factory=set)  # axes except tp that shard batches; parameters on these axes are gathered before use
    rows: int = 0  # with fully_shard: number of rows of all ranks
    axes_of_rows: tuple[str, ...] = ()

    def of_rows(self, value: Any) -> AxesOfDims:
        """Sharding of an argument or result by rows. () without `axes_of_rows`, or if the first dim is not of size `rows`."""
        return (self.axes_of_rows, *(() for _ in value.shape[1:])) if self.axes_of_rows and has_rows(value, self.rows) else ()


def mesh_of(mesh: Any) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        raise ProgramError(f"mesh={mesh!r} is neither an hw.Mesh nor a DeviceMesh with mesh_dim_names; write hw.Mesh(tp=2)")
    return Mesh(**{name: mesh.size(i) for i, name in enumerate(names)})


def layouts(plan: Mapping[str, Any], module: nn.Module, dims: Mapping[str, int], mesh: Mesh, found: Layouts | None = None) -> Layouts:
    """Adds the shardings of the plan and of DTensors to `found`. `dims` maps inputs to numbers of dims."""
    found = found or Layouts()
    tensors = dict(tensors_of(module))
    for name, parameter in tensors.items():
        if isinstance(parameter, DTensor):
            found.parameters[name] = parameter_axes(parameter, mesh, name)
    names_of: dict[int, list[str]] = {}  # by id; a tied tensor has several names
    for name, tensor in tensors.items():
        names_of.setdefault(id(tensor), []).append(name)
    stated: dict[str, str] = {}  # name -> entry of the plan
    modules = {name: submodule for name, submodule in module.named_modules() if name}

    def state(kind: str, name: str, layout: AxesOfDims, pattern: str) -> None:
        names = names_of[id(tensors[name])] if kind == "parameters" else [name]
        count = tensors[name].ndim if kind == "parameters" else dims.get(name)
        if count is not None and len(layout) != count:
            words = " or ".join(f'"{word}"' for word in (*dict(mesh.axes), "-"))
            dims_text = f"{len(layout)} dim{'s' * (len(layout) != 1)}"
            raise ProgramError(f'plan: "{pattern}" states {dims_text}, but {name} has {count}; write {words} for each dim')
        known = getattr(found, kind)
        if (before := known.get(name, layout)) != layout:
            by = f'"{stated[name]}"' if name in stated else "its DTensor"
            ways = f'"{text_of(before)}" by {by} and as "{text_of(layout)}" by "{pattern}"'
            raise ProgramError(f"plan: {' = '.join(names)} is sharded as {ways}; keep one entry")
        known.update(dict.fromkeys(names, layout))
        stated.update(dict.fromkeys(names, pattern))

    for pattern, value in plan.items():
        if isinstance(value, ParallelStyle):
            for name in matching(pattern, modules, "modules"):
                for kind, of, layout in _of_style(value, name, modules[name], _axis(pattern, mesh)):
                    state(kind, of, layout, pattern)
            continue
        if not isinstance(value, str):
            raise ProgramError(f'plan: "{pattern}": {value!r} is neither a str such as "tp, -" nor a ParallelStyle of torch')
        for name in matching(pattern, (*tensors, *dims, *modules), "parameters, inputs or modules"):
            kind = "parameters" if name in tensors else "inputs" if name in dims else "outputs"
            state(kind, name, _of_text(value, pattern, mesh), pattern)
    found.data = {axis for axes in found.inputs.values() for of in axes[:1] for axis in of if axis != "tp"}
    return found


def without_inputs(plan: Mapping[str, Any], module: nn.Module, dims: Mapping[str, int]) -> dict[str, Any]:
    """The plan without entries that are only for inputs."""
    names = [*dict(tensors_of(module)), *dict(module.named_modules())]
    words = {name.rpartition(".")[2] for name in names}
    return {
        pattern: value for pattern, value in plan.items() if "." in pattern or not fnmatching(dims, pattern) or fnmatching(words, pattern)
    }


def states_inputs(plan: Mapping[str, Any], module: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    names = {*kwargs, *signature(module.forward).parameters}
    return len(without_inputs(plan, module, dict.fromkeys(names, 0))) < len(plan)


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters and buffers of a module. A tied tensor occurs once for each name."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def matching(pattern: str, names: Iterable[str], what: str, argument: str = "plan") -> list[str]:
    """Names that match a pattern. The last component of a pattern matches only one component, so `layers.*` matches the layers, but not
    modules inside of them."""
    names, (path, _, word) = list(names), pattern.rpartition(".")
    split = ((name, *name.rpartition(".")[::2]) for name in names)
    matching = [
        name
        for name, before, last in split
        if fnmatchcase(last, word) and (not path or fnmatchcase(before, path) or fnmatchcase(before, f"*.{path}"))
    ]
    if not matching:
        remedy = closest_word(pattern.replace("*", "0"), names, 0.3) or f"there are {', '.join(names[:5])}, ..."
        raise ProgramError(f'{argument}: "{pattern}" matches none of the {what}; {remedy}')
    return matching


def text_of(layout: AxesOfDims) -> str:
    """A sharding as text of a plan."""
    return ", ".join("+".join(axes) or "-" for axes in layout)


def axes_of(text: str) -> AxesOfDims:
    """Parses text such as `tp, -` or `dp+tp, -`. Of several axes of a dim, the first is the outermost."""
    return tuple(() if word.strip() in ("-", "") else tuple(axis.strip() for axis in word.split("+")) for word in text.split(","))


def _of_text(text: str, pattern: str, mesh: Mesh) -> AxesOfDims:
    layout = axes_of(text)
    used = [axis for axes in layout for axis in axes]
    known = [name for name, _ in mesh.axes]
    for axis in used:
        if axis not in known:
            raise ProgramError(f'plan: "{pattern}": "{text}": {mesh} has no axis {axis!r}; its axes: {", ".join(known) or "none"}')
        if used.count(axis) > 1:
            raise ProgramError(f'plan: "{pattern}": "{text}": the axis {axis} is named twice; name it once')
    return layout


def _axis(pattern: str, mesh: Mesh) -> str:
    """Mesh axis of torch's parallel styles: `tp`, or the only axis of the mesh."""
    names = [name for name, _ in mesh.axes]
    if len(names) == 1 or "tp" in names:
        return "tp" if "tp" in names else names[0]
    raise ProgramError(f'plan: "{pattern}": a ParallelStyle needs one mesh axis, but {mesh} has {len(names)}; name one of them tp')


def _placed(placement: Any, dims: int, axis: str) -> AxesOfDims | None:
    """Sharding for a Shard or Replicate along one mesh axis, otherwise None."""
    if isinstance(placement, Shard):
        return tuple((axis,) if i == placement.dim % dims else () for i in range(dims))
    return tuple(() for _ in range(dims)) if isinstance(placement, Replicate) else None


def _of_style(style: ParallelStyle, name: str, module: nn.Module, axis: str) -> Iterable[tuple[str, str, AxesOfDims]]:
    """Shardings that a parallel style of torch states for a module. Omits default `output_layouts`, which are inferred."""
    dims = 3  # [batch, sequence, features]
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        sharded = 1 if isinstance(style, RowwiseParallel) != isinstance(module, nn.Embedding) else 0
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise ProgramError(f"plan: {name} is a {type(module).__name__}, but {type(style).__name__} supports only Linear and Embedding")
        yield "parameters", f"{name}.weight", tuple((axis,) if i == sharded else () for i in range(2))
        if getattr(module, "bias", None) is not None:
            yield "parameters", f"{name}.bias", ((axis,) if isinstance(style, ColwiseParallel) else (),)
        natural = Shard(-1) if isinstance(style, ColwiseParallel) else Replicate()
        (layout,) = style.output_layouts
        if layout != natural and (placed := _placed(layout, dims, axis)):
            yield "outputs", name, placed
    elif isinstance(style, SequenceParallel):
        if placed := _placed(style.sequence_sharding[0], dims, axis):
            yield "outputs", name, placed
    elif not isinstance(style, PrepareModuleInput):  # reshards of PrepareModuleInput are inferred
        raise ProgramError(
            f"plan: {name}: {type(style).__name__} is not supported; use ColwiseParallel, RowwiseParallel, SequenceParallel, "
            'PrepareModuleInput, or text such as "tp, -"'
        )


def parameter_axes(parameter: DTensor, mesh: Mesh, name: str) -> AxesOfDims:
    names = parameter.device_mesh.mesh_dim_names
    if not names or {*names} - {axis for axis, _ in mesh.axes}:
        raise ProgramError(f"{name} is a DTensor on a mesh of dims {names}; name them like the axes of {mesh}")
    if any(placement.is_partial() for placement in parameter.placements):
        raise ProgramError(f"{name} is a partial sum; redistribute it to Shard or Replicate")
    return dtensor_axes(parameter, parameter.ndim, name)


def dtensor_axes(tensor: Any, dims: int, name: str = "a tensor") -> AxesOfDims:
    """Mesh axes that shard each dim of a DTensor. A partial sum counts as replicated."""
    result, inner = list[tuple[str, ...]](() for _ in range(dims)), list[tuple[str, int]]()
    for axis, placement in zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True):
        if isinstance(placement, Shard):
            result[placement.dim] += (axis,)
        elif isinstance(placement, _StridedShard):  # later mesh axes are outer, as with `fully_shard` after `parallelize_module`
            inner.append((axis, placement.dim))
        elif not isinstance(placement, Replicate | Partial):
            raise ProgramError(f"{name} is a DTensor with the placement {placement} along {axis}; redistribute it to Shard or Replicate")
    for axis, dim in reversed(inner):
        result[dim] += (axis,)
    return tuple(result)
