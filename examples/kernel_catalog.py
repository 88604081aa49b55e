"""The catalog of GEMM kernels: discover, filter, query and compile kernels, and run one on your own stream and memory.

    python examples/kernel_catalog.py

Listing and querying need no GPU. Without a GPU the kernels run in Triton's interpreter, on smaller matrices.
"""

import os

import torch

if not torch.cuda.is_available():
    # Triton reads this when kernels are defined, so it is set before they are imported.
    os.environ["TRITON_INTERPRET"] = "1"

from moe_kernels import GroupedGemmArguments, PointerDesign, get_kernels
from moe_kernels.gemm.kernel import is_device_cc_supported

ON_GPU = torch.cuda.is_available()


def discover() -> None:
    print(f"{len(get_kernels())} kernels, {len(get_kernels(cc=80))} of them for compute capability 8.0")
    persistent = get_kernels(metadata_filter=lambda m: m.design.persistent and m.operands.A.dtype == torch.bfloat16)
    print(f"{len(persistent)} are persistent and take bfloat16")
    tall = get_kernels(metadata_filter=lambda m: m.design.tile_shape[0] == 128 and isinstance(m.design, PointerDesign))
    print(f"{len(tall)} load through TMA in tiles of 128 rows, such as {tall[0].metadata.kernel_name}")


def make_arguments() -> GroupedGemmArguments:
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    num_rows, num_groups, size_k, size_n = (8192, 12, 1024, 2048) if ON_GPU else (24, 3, 32, 64)
    a = torch.randn(num_rows, size_k, device=device, dtype=dtype)
    b = torch.randn(num_groups, size_k, size_n, device=device, dtype=dtype)
    offsets = (torch.arange(1, num_groups + 1, device=device) * num_rows // num_groups).int()
    return GroupedGemmArguments(a, b, torch.empty(num_rows, size_n, device=device, dtype=dtype), offsets=offsets)


def main() -> None:
    torch.manual_seed(0)
    discover()
    print("Hopper or later:", is_device_cc_supported({90, 100}).error or "yes")

    args = make_arguments()
    kernel, *others = get_kernels(args)  # best first
    print(f"{1 + len(others)} kernels support the arguments, the best is {kernel.metadata.kernel_name}")
    wrong = get_kernels(metadata_filter=lambda m: m.operands.A.dtype == torch.float16)[0]
    print(f"{wrong.metadata.kernel_name} does not: {wrong.supports(args).error}")

    artifact = kernel.compile(args)  # for every call with the same static properties
    stream = torch.cuda.Stream() if ON_GPU else None
    num_bytes = kernel.get_workspace_size(args)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=args.A.device)
    print(f"compiled; it needs a workspace of {num_bytes} bytes")
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())  # the current stream makes the operands
    kernel.run(args, artifact, stream=stream, workspace=workspace, assume_supported_args=True)
    if stream is not None:
        stream.synchronize()

    expected = torch.nn.functional.grouped_mm(args.A, args.B, offs=args.offsets)
    # The tolerance is relative to the largest value, because the order of sums differs.
    largest = expected.abs().max().item()
    torch.testing.assert_close(args.out, expected, rtol=2 * torch.finfo(expected.dtype).eps, atol=1e-3 * largest)
    print("the result agrees with torch.nn.functional.grouped_mm")


if __name__ == "__main__":
    main()
