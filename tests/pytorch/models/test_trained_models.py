"""Training of several kinds of models: losses, gradients, and parameters after two steps, compared with torch."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

from trained_models import MODELS, trained  # noqa: E402

import hostweave.torch  # noqa: E402

FAST = [("dlrm", 2), ("bloom", 1), ("rwkv", 2)]
RUNS = [pytest.param(name, ranks, marks=() if (name, ranks) in FAST else pytest.mark.slow) for name in MODELS for ranks in (1, 2, 4)]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("name", "ranks"), RUNS)
def test_losses_gradients_and_parameters(name: str, ranks: int) -> None:
    module, inputs, plan, mesh = trained(name, ranks)
    want = copy.deepcopy(module)
    compiled = hostweave.torch.compile(module, mesh, plan, inputs, training=True)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, want)]
    for _ in range(2):
        found = [call(**inputs) for call in (compiled, want)]
        losses = [one if isinstance(one, torch.Tensor) else one.loss for one in found]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
        for loss in losses:
            loss.backward()
        most = max(float(one.grad.abs().max()) for one in want.parameters() if one.grad is not None)
        for (path, one), other in zip(module.named_parameters(), want.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), path
            if other.grad is not None:  # Some gradients, such as gradients of key biases, are only roundoff.
                atol = 1e-4 * max(float(other.grad.abs().max()), 1e-2 * most)
                torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=atol, msg=lambda why, at=path: f"{at}: {why}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (path, one), other in zip(module.state_dict().items(), want.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=lambda why, at=path: f"{at}: {why}")
