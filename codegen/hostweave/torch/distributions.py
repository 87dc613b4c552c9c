"""ATen's random numbers of distributions, in terms of uniform and normal random numbers."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from hostweave.base.errors import ProgramError
from hostweave.torch.randomness import OTHER_GENERATOR

aten = torch.ops.aten


def _filled(
    numbers: Callable[..., torch.Tensor], value: Callable[..., torch.Tensor], x: torch.Tensor, *parameters: Any, generator: Any = None
) -> torch.Tensor:
    """Rule of an op that fills a tensor with random values, which `value` computes from random numbers and parameters."""
    if generator is not None:
        raise ProgramError(OTHER_GENERATOR)
    wide = torch.promote_types(x.dtype, torch.float32) if x.dtype.is_floating_point else torch.float32
    return value(numbers(torch.empty_like(x, dtype=wide)), *parameters).to(x.dtype)


_uniform = partial(_filled, torch.rand_like, lambda u, low=0.0, high=1.0: u * (high - low) + low)
_exponential = partial(_filled, torch.rand_like, lambda u, rate=1.0: -torch.log1p(-u) / rate)


def multinomial(weights: torch.Tensor, count: int, replacement: bool = False, *, generator: Any = None) -> torch.Tensor:
    """Draws indices with probabilities proportional to the weights: the largest quotients of weights and exponential random numbers win."""
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    if apart := replacement or count == 1:
        weights = weights.unsqueeze(-2).expand(*weights.shape[:-1], count, -1)
    ratios = weights / _exponential(weights, generator=generator).clamp(min=torch.finfo(weights.dtype).tiny)
    return ratios.argmax(-1) if apart else ratios.topk(count).indices


def randperm(n: Any, *, dtype: Any = torch.int64, device: Any = None, **_: Any) -> torch.Tensor:
    return torch.rand(n, device=device).argsort().to(dtype)


def rrelu(
    x: torch.Tensor, noise: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    """Multiplies elements that are not positive by random slopes or, without training, by the mean of `lower` and `upper`."""
    if not training:
        return F.leaky_relu(x, (lower + upper) / 2), noise
    slopes = torch.where(x <= 0, _uniform(x, lower, upper, generator=generator), 1.0)
    return x * slopes, slopes


def _normal(like: torch.Tensor, mean: Any, std: Any, generator: Any) -> torch.Tensor:
    return _filled(torch.randn_like, lambda z: z * std + mean, like, generator=generator)


def _normal_of_size(mean: float, std: float, size: Sequence[int], *, generator: Any = None, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _normal(torch.empty(size, dtype=dtype), mean, std, generator)


DISTRIBUTIONS: dict[Any, Callable[..., Any]] = {
    aten.rrelu_with_noise_functional.default: rrelu,
    aten.uniform.default: _uniform,
    aten.bernoulli.default: lambda x, generator=None: _filled(torch.rand_like, torch.lt, x, x, generator=generator),
    **dict.fromkeys((aten.bernoulli.p, aten.bernoulli.Tensor), partial(_filled, torch.rand_like, torch.lt)),
    aten.normal.float_float: _normal_of_size,
    aten.normal.Tensor_Tensor: lambda mean, std, generator=None: _normal(mean + 0 * std, mean, std, generator),
    aten.normal.Tensor_float: lambda mean, std=1.0, generator=None: _normal(mean, mean, std, generator),
    aten.normal.float_Tensor: lambda mean, std, generator=None: _normal(std, mean, std, generator),
    aten.normal_functional.default: partial(_filled, torch.randn_like, lambda z, mean=0.0, std=1.0: z * std + mean),
    aten.log_normal.default: partial(_filled, torch.randn_like, lambda z, mean=1.0, std=2.0: torch.exp(z * std + mean)),
    aten.exponential.default: _exponential,
    aten.multinomial.default: multinomial,
    aten.randperm.default: randperm,
    aten.cauchy.default: partial(
        _filled, torch.rand_like, lambda u, median=0.0, sigma=1.0: median + sigma * torch.tan(math.pi * (u - 0.5))
    ),
    aten.geometric.default: partial(_filled, torch.rand_like, lambda u, p: torch.ceil(torch.log1p(-u) / math.log1p(-p)).clamp(min=1)),
}
