"""8-bit floats in modules: torch._scaled_mm, and linear layers in 8-bit floats, forward and backward."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
from torch import nn  # noqa: E402
from transformers.integrations.fbgemm_fp8 import FbgemmFp8Linear  # noqa: E402
from transformers.integrations.finegrained_fp8 import FP8Linear  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ProgramError  # noqa: E402

TP = {"up.weight": "tp, -", "down.weight": "-, tp"}
SCALINGS = ("row", "tensor", "block")


class Scaled(nn.Module):
    """A linear layer with quantised weights, written with functions of torch."""

    def __init__(self, kind: str):
        super().__init__()
        weight = torch.randn(64, 128)
        scale = (weight.abs().amax(1, keepdim=True) if kind == "row" else weight.abs().amax().reshape(1, 1)) / 448
        self.register_buffer("weight", (weight / scale).to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(torch.randn(64).to(torch.bfloat16))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top = x.abs().amax(-1, keepdim=True).float() if self.kind == "row" else x.abs().amax().float().reshape(1, 1)
        scale = top.clamp(min=1e-12) / 448
        values = (x.float() / scale).to(torch.float8_e4m3fn)
        return torch._scaled_mm(values, self.weight.t(), scale, self.scale.t(), bias=self.bias, out_dtype=torch.bfloat16)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(256, 128, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("kind", ["row", "tensor"])
def test_scaled_mm(kind: str, ranks: int) -> None:
    torch.manual_seed(0)
    module, x = Scaled(kind).eval(), torch.randn(32, 128, dtype=torch.bfloat16)
    plan = {"weight": "tp, -", "bias": "tp", **({"scale": "tp, -"} if kind == "row" else {})}
    model = hostweave.torch.compile(module, hw.Mesh(tp=ranks), plan, (x,))
    with torch.no_grad():
        want, got = module(x).float(), model(x).float()
    assert (got - want).abs().max() <= 2**-7 * want.abs().max()


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        *(pytest.param(hw.Mesh(tp=ranks), TP, marks=pytest.mark.slow) for ranks in (1, 2)),  # The next two cases have the same features.
        (hw.Mesh(dp=2, tp=2), TP | {"x": "dp, -, -"}),
        (hw.Mesh(tp=4), TP | {"x": "-, tp, -", "down": "-, tp, -"}),
    ],
    ids=["1", "tp", "dp_tp", "sequence"],
)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_linears_and_their_gradients(scaling: str, mesh: hw.Mesh, plan: dict[str, str]) -> None:
    """Rounding to f8e4m3, with 4 significant bits, has a root mean square error of 2.6%. Rounding to f8e5m2, for gradients with "tensor",
    has 3 bits and an error of 5.2%."""
    torch.manual_seed(0)
    module, x = MLP(), torch.randn(4, 64, 128, dtype=torch.bfloat16)
    model = hostweave.torch.compile(module, mesh, plan, (x,), fp8=scaling, training=True)
    wanted, found = [], []
    for call, results in ((module, wanted), (model, found)):
        module.zero_grad()
        y = call(x)
        y.square().mean().backward()
        results += [y.detach(), *(parameter.grad for parameter in module.parameters())]
    errors = [distance(got, want) for got, want in zip(found, wanted, strict=True)]
    assert all(0.005 < error < 0.1 for error in errors[:3]), errors
    assert errors[3] < 0.1  # The gradient of the bias is a sum of gradients in bf16, whose errors come only from y.


def test_only_named_layers_use_8_bit_floats() -> None:
    module, x = MLP().eval(), torch.randn(64, 128, dtype=torch.bfloat16)
    model = hostweave.torch.compile(module, hw.Mesh(tp=2), TP, (x,), fp8={"up": "row"})
    assert str(model.program.host).count(" scales ") == 1
    with torch.no_grad():
        assert 0.005 < distance(model(x), module(x)) < 0.06


def test_mistakes() -> None:
    module, x = MLP().eval(), torch.randn(64, 128, dtype=torch.bfloat16)

    def fails(message: str, fp8: Any, plan: Any = TP) -> None:
        with pytest.raises(ProgramError, match=message):
            hostweave.torch.compile(module, hw.Mesh(tp=2), plan, (x,), fp8=fp8)

    fails("the plan states no weight of a linear", "row", {})
    fails("there is no scaling 'rows'; did you mean row", "rows")
    fails('fp8: "gate" matches none of the linears', {"gate": "row"})
    fails("fp8=3 is neither one of row, tensor, block nor a dict of names", 3)
    module.double()
    x = x.double()
    fails("the weight of up is of torch.float64; use bfloat16", "row")


class Quantised(nn.Module):
    """Linear layers that two loaders of transformers make for FP8 checkpoints. The weights are quantised as in such checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.up = FP8Linear(256, 512, block_size=(128, 128), has_bias=False)
        self.down = FbgemmFp8Linear(512, 128, bias=True)
        blocks = torch.randn(4, 128, 2, 128) * torch.rand(4, 1, 2, 1)
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        self.up.weight = nn.Parameter((blocks / scales).reshape(512, 256).to(torch.float8_e4m3fn), requires_grad=False)
        self.up.weight_scale_inv = nn.Parameter(scales[:, 0, :, 0].contiguous())
        rows = torch.randn(128, 512)
        self.down.weight_scale = nn.Parameter(rows.abs().amax(1, keepdim=True) / 448)
        self.down.weight = nn.Parameter((rows / self.down.weight_scale.detach()).to(torch.float8_e4m3fn), requires_grad=False)
        self.down.bias = nn.Parameter(torch.randn(128))
        self.down.input_scale_ub.fill_(2.0)  # The bound is smaller than the largest activations, so some are clamped.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)) / 16)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Products of dequantised 8-bit floats in float32, rounded to 16 bits."""
        hidden = self.of(x, self.up.weight.float().view(4, 128, 2, 128) * self.up.weight_scale_inv[:, None, :, None], 128)
        hidden = torch.relu(hidden) / 16
        return self.of(hidden, self.down.weight.float() * self.down.weight_scale, 512, 2.0) + self.down.bias.to(x.dtype)

    @staticmethod
    def of(x: torch.Tensor, weight: torch.Tensor, block: int, bound: float = torch.inf) -> torch.Tensor:
        groups = x.float().unflatten(-1, (-1, block))
        scales = groups.abs().amax(-1, keepdim=True).clamp(1e-12, bound) / 448
        values = (groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
        return (values.flatten(-2) @ weight.reshape(-1, x.shape[-1]).T).to(x.dtype)


QUANTISED_PLAN = {
    "up.weight": "tp, -",
    "up.weight_scale_inv": "tp, -",
    "down.weight": "tp, -",
    "down.weight_scale": "tp, -",
    "down.bias": "tp",
}


@pytest.mark.extra
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_weights_of_checkpoints(ranks: int) -> None:
    """Modules of transformers' finegrained_fp8 and fbgemm_fp8 compile unchanged. Scaled matmuls replace the kernels of these modules."""
    torch.manual_seed(0)
    module, x = Quantised().eval(), torch.randn(3, 16, 256, dtype=torch.bfloat16)
    model = hostweave.torch.compile(module, hw.Mesh(tp=ranks), QUANTISED_PLAN if ranks > 1 else {}, (x,))
    with torch.no_grad():
        torch.testing.assert_close(model(x).float(), module.reference(x).float(), rtol=2e-2, atol=2e-2)
    text = model.program.fusion_ir
    assert text.count(" = scaled_matmul(") == 2
    assert "up_weight: f8e4m3[512" in text


def test_another_thread_calls_the_linear_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread traces a module with 8-bit weights. Meanwhile, another thread calls the `forward` of transformers."""
    monkeypatch.setattr(FP8Linear, "forward", lambda linear, x: f"{x} of transformers")
    apart, found = FP8Linear(128, 128, block_size=(128, 128)), list[Any]()

    class Beside(Quantised):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(1) as other:
                found.append(other.submit(apart, "result").result())
            return super().forward(x)

    hostweave.torch.compile(Beside().eval(), hw.Mesh(tp=1), {}, (torch.randn(16, 256, dtype=torch.bfloat16),))
    assert set(found) == {"result of transformers"}


def test_weights_of_checkpoints_that_are_refused() -> None:
    module, x = Quantised().eval(), torch.randn(16, 256, dtype=torch.bfloat16)
    module.up.block_size = (64, 128)
    with pytest.raises(ProgramError, match=r"FP8Linear\(in.*: its scales are for blocks of \(64, 128\); use blocks of 128 x 128"):
        hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x,))
    module.up.activation_scale = nn.Parameter(torch.ones(()))
    with pytest.raises(
        ProgramError, match="the checkpoint stores scales of activations; use a checkpoint whose activation_scheme is dynamic"
    ):
        hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x,))


class Squares(MLP):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) - y).float().square().mean()


def test_steps_stay_near_those_of_bf16() -> None:
    """Trains two linear layers for 10 steps from each of 3 seeds. Every loss is within 2% of the loss in bf16."""
    losses = []
    for fp8 in (None, "row"):
        module = Squares()
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
        x, y = torch.zeros(2, 64, 128, dtype=torch.bfloat16).unbind()
        step = hostweave.torch.compile(module, hw.Mesh(tp=2), TP, (x, y), optimizer=optimizer, fp8=fp8)
        for seed in range(3):
            torch.manual_seed(seed)
            x, y = torch.randn(2, 64, 128, dtype=torch.bfloat16).unbind()
            module.load_state_dict(Squares().state_dict())
            optimizer.state.clear()
            losses.append([float(step(x, y)) for _ in range(10)])
    for plain, scaled in zip(losses[:3], losses[3:], strict=True):
        assert scaled != plain
        assert scaled[-1] < 0.9 * scaled[0]
        assert all(abs(mine - theirs) < 0.02 * theirs for mine, theirs in zip(scaled, plain, strict=True)), losses


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_training_stays_near_that_of_bf16(scaling: str) -> None:
    """Trains a Llama of 4 layers for 50 steps from each of 3 seeds. Every loss is within 1% of the loss in bf16."""
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    losses = []
    for fp8 in (None, {"*_proj": scaling}):
        model = WithLoss(transformers.LlamaForCausalLM(config).to(torch.bfloat16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        step = hostweave.torch.compile(model, hw.Mesh(tp=2), {}, (tokens, tokens), optimizer=optimizer, fp8=fp8)
        for seed in range(3):
            torch.manual_seed(seed)
            tokens = torch.randint(0, 128, (2, 64))
            model.load_state_dict(WithLoss(transformers.LlamaForCausalLM(config)).state_dict())
            optimizer.state.clear()
            losses.append([float(step(tokens, tokens)) for _ in range(50)])
    for plain, scaled in zip(losses[:3], losses[3:], strict=True):
        assert scaled != plain
        assert scaled[-1] < 0.9 * scaled[0]
        worst = max(abs(mine / theirs - 1) for mine, theirs in zip(scaled, plain, strict=True))
        assert worst < 0.01, (worst, scaled, plain)


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss
