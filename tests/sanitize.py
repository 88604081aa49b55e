"""A small layer forward and backward, to run under `compute-sanitizer --tool memcheck python -m tests.sanitize`.

Sizes that leave partial tiles everywhere, empty experts, and both ways of gathering.
"""

import torch

from moe_layers import MoEFeedForward


def main() -> None:
    for d_model, d_ff in ((136, 200), (256, 512)):
        torch.manual_seed(0)
        layer = MoEFeedForward(d_model, d_ff, 12, 2, shared_d_ff=64, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(150, d_model, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
        torch.cuda.synchronize()
        assert all(parameter.grad.isfinite().all() for parameter in (x, *layer.parameters()))
        print(f"d_model {d_model}, d_ff {d_ff}: finite")


if __name__ == "__main__":
    main()
