"""A small layer forward and backward, to run under `compute-sanitizer --tool memcheck python -m tests.sanitize`.

Sizes that leave partial tiles everywhere, empty experts, and both ways of gathering.
"""

import torch

from moe_kernels import RouterSpec
from moe_layers import MoEFeedForward


def main() -> None:
    plain = {"shared_d_ff": 64}
    biased = {"bias": True, "activation": "gpt_oss", "router": RouterSpec.sigmoid_groups(4, 2), "num_zero_experts": 4}
    on_input = {"bias": True, "activation": "relu_squared", "router": RouterSpec.sigmoid_on_input()}
    for d_model, d_ff, options in ((136, 200, plain), (256, 512, plain), (136, 200, biased), (136, 200, on_input)):
        torch.manual_seed(0)
        layer = MoEFeedForward(d_model, d_ff, 12, 2, **options, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(150, d_model, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
        torch.cuda.synchronize()
        assert all(parameter.grad.isfinite().all() for parameter in (x, *layer.parameters()))
        print(f"d_model {d_model}, d_ff {d_ff}, {options}: finite")


if __name__ == "__main__":
    main()
