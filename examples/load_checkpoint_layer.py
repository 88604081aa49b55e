"""Load the MoE layer of a published model from its sharded safetensors files, and prove that it was loaded completely.

    python examples/load_checkpoint_layer.py
    python examples/load_checkpoint_layer.py PATH/TO/Qwen3-30B-A3B --layer 12
    python examples/load_checkpoint_layer.py PATH --layer 12 --experts 0 16    # the share of the first of eight ranks

Without a path it writes a small sharded checkpoint and loads from it.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from moe_layers import MoEFeedForward


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, help="holds config.json and the safetensors files")
    parser.add_argument("--layer", type=int, default=0, help="the model's number of the layer")
    parser.add_argument("--experts", type=int, nargs=2, metavar=("FIRST", "END"), help="read only these experts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.directory is not None:
        load(options)
        return
    with tempfile.TemporaryDirectory() as directory:
        options.directory, options.layer = Path(directory) / "checkpoint", 0
        write_small_checkpoint(options.directory)
        load(options)


def write_small_checkpoint(directory: Path) -> None:
    """Write a layer of random weights, one tensor per projection and expert, in files of at most 2 MB."""
    torch.manual_seed(0)
    layer = MoEFeedForward(d_model=256, d_ff=128, num_experts=16, top_k=4, shared_d_ff=128)
    layer.save_checkpoint(directory, layout="per_expert", max_shard_bytes=2_000_000)
    print(f"wrote {len(list(directory.glob('*.safetensors')))} files to {directory}")


def load(options: argparse.Namespace) -> None:
    experts = None if options.experts is None else range(*options.experts)
    start = time.perf_counter()
    layer, report = MoEFeedForward.from_checkpoint(
        options.directory, options.layer, device=options.device, experts=experts, return_report=True
    )
    seconds = time.perf_counter() - start
    num_bytes = sum(parameter.nbytes for parameter in layer.parameters())
    print(f"loaded {num_bytes / 1e6:.1f} MB in {seconds:.3f} s ({num_bytes / seconds / 1e9:.2f} GB/s)")
    print(report)
    weight = layer.router.weight
    tokens = torch.randn(4, 16, layer.d_model, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        y, routing = layer(tokens, return_routing=True)
    print(f"output {list(y.shape)}, tokens per expert {routing.tokens_per_expert.tolist()}")


if __name__ == "__main__":
    main()
