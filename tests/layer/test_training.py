"""A two-layer model trains the same with Triton and with the reference, across a checkpoint in the middle."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from moe_layers import BalanceLosses

from ..layers import moe_layer
from ..tiers import slow

# 90 steps take a minute. In the default tier the examples train models, and single steps are held to the reference.
pytestmark = slow
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
NUM_STEPS = 30
LOSSES = BalanceLosses(switch=0.01)


class TwoLayers(nn.Module):
    def __init__(self, implementation, device, dtype):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.embed = nn.Embedding(32, 32, **factory)
        self.layers = nn.ModuleList(
            moe_layer(32, 24, 5, 2, init_std=0.1, balance_losses=LOSSES, implementation=implementation, **factory)
            for _ in range(2)
        )
        self.head = nn.Linear(32, 32, bias=False, **factory)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def train(implementation, device, dtype, directory):
    torch.manual_seed(0)
    model = TwoLayers(implementation, "cpu", torch.float32).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(NUM_STEPS):
        if step == NUM_STEPS // 2:
            for i, layer in enumerate(model.layers):
                path = directory / f"{implementation}_{dtype}_{i}.safetensors"
                layer.save_safetensors(path)
                layer.reset_parameters(5.0)  # loading must undo this
                layer.load_safetensors(path)
        ids = torch.randint(0, 32, (48,), generator=generator)
        targets = (5 * ids + 3) % 32
        logits = model(ids.to(device))
        loss = functional.cross_entropy(logits.float(), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    directory = tmp_path_factory.mktemp("training")
    exact_dtype = torch.float64 if device == "cpu" else torch.float32
    return {
        "triton": train("triton", device, DTYPE, directory),
        "reference": train("reference", device, DTYPE, directory),
        "exact": train("reference", device, exact_dtype, directory),
    }


def test_losses_fall(losses):
    for name, values in losses.items():
        assert values[-3:].mean() < 0.7 * values[:3].mean(), name


def test_triton_is_as_close_to_the_exact_run_as_the_reference(losses):
    """Errors of single steps grow differently along each run, so whole runs are compared."""
    error = (losses["triton"] - losses["exact"]).square().mean().sqrt()
    baseline = (losses["reference"] - losses["exact"]).square().mean().sqrt()
    ulp = torch.finfo(DTYPE).eps * losses["exact"].max()
    assert error <= 2 * baseline + ulp, f"error {error:.3e}, plain PyTorch {baseline:.3e}"
