"""Loss scaling for 16-bit gradients, with the scale of a `torch.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.amp import GradScaler

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.torch.updates import widened

SCALE = "loss_scale"  # input: the scale, which is the gradient of the loss


class LossScale:
    def __init__(self, scaler: GradScaler, device: torch.device):
        self._scaler, self._device = scaler, device
        self._flag = nn.Parameter(torch.zeros((), device=device))  # the gradient of the flag is inf if a gradient of the step is not finite
        self._of_flag = torch.optim.SGD([self._flag])

    @classmethod
    def of(cls, scaler: GradScaler | None, device: torch.device) -> LossScale | None:
        """Wraps a GradScaler. Returns None without a GradScaler, or if the GradScaler is disabled."""
        if not isinstance(scaler, GradScaler | None):
            raise ProgramError(f"scaler: {scaler!r} is not a torch.amp.GradScaler; pass one, or omit scaler=")
        return cls(scaler, device) if scaler is not None and scaler.is_enabled() else None

    def now(self) -> torch.Tensor:
        scale: torch.Tensor = self._scaler.scale(torch.ones((), device=self._device))
        return scale

    def update(self, found: torch.Tensor) -> bool:
        """Updates the scale after a step with `found` gradient elements that are not finite. Returns True if the step was skipped."""
        is_skipped = bool(found > 0)
        self._flag.grad = torch.full((), float("inf") if is_skipped else 0.0, device=self._device)
        self._scaler.unscale_(self._of_flag)
        self._scaler.update()
        return is_skipped


def unscaled(gradients: Sequence[hw.Tensor], scale: hw.Tensor) -> tuple[list[hw.Tensor], hw.Tensor]:
    """Divides gradients by the scale. Also returns the number of gradient elements that are not finite."""
    wide = list(map(widened, gradients))
    counts = [hw.sum(hw.astype(one - one != 0, hw.f32)) for one in wide]
    inverse = 1 / scale
    made = [hw.astype(one * hw.astype(inverse, one.dtype), of.dtype) for one, of in zip(wide, gradients, strict=True)]
    return made, sum(counts[1:], counts[0])
