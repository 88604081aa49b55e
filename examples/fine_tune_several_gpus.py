"""Fine-tune a Hugging Face Qwen3-MoE on several ranks, which share its experts: all parameters, or LoRA adapters.

    torchrun --nproc-per-node 2 examples/fine_tune_several_gpus.py              # two CPU processes, or two GPUs
    torchrun --nproc-per-node 8 examples/fine_tune_several_gpus.py --lora 8     # adapters of attention and experts
    python examples/fine_tune_several_gpus.py                                   # one process, the same losses

Nothing is downloaded: the first rank writes a model with random weights. Each rank then reads its own experts and the
rest, as it would read a published model. FSDP2 shards everything but the experts over all ranks; with adapters,
DistributedDataParallel replicates it. The model, or the adapters, are saved and loaded again. Losses are in nats per
byte.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from _language_model import Settings, Text, draw_batch, held_out_windows, load_text, use_one_cpu_thread
from fine_tune_hugging_face import PRESETS, make_model
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from train_expert_parallel import mean_over_processes, own_part, start_processes

from moe_layers import BalanceLosses, clip_grad_norm_
from moe_layers.integrations.transformers import balance_routing, ignore_in_ddp, reading_shares, save_sharded

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def load(folder: Path, mesh: DeviceMesh, implementation: str | None) -> Any:
    """Load the base. Each rank reads its own experts alone."""
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    with reading_shares(mesh["ep"], implementation=implementation):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, device_map={"": device}, output_router_logits=False
        )
    # This loss uses the experts' shares in the batch of all ranks. transformers' own loss would use those of one rank.
    balance_routing(model, BalanceLosses(global_batch=0.01, group=distributed.group.WORLD))
    return model.train()


def adapt(model: Any, rank: int) -> tuple[Any, nn.Module]:
    """Return the adapted model, and the module to call."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)  # adapters are whole on every rank, and start equal
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ATTENTION, target_parameters=EXPERTS)
    adapted = get_peft_model(model, lora)
    ignore_in_ddp(adapted)
    return adapted, DistributedDataParallel(adapted)


def wrap(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Shard everything but the experts over all ranks, and each expert over the ranks that hold a copy of it."""
    everyone = init_device_mesh(mesh.device_type, (mesh.size(),))
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["efsdp"])
        fully_shard(layer, mesh=everyone)
    return fully_shard(model, mesh=everyone)


def loss_of(
    model: nn.Module,
    windows: Tensor,  # [B, S + 1]
) -> Tensor:  # scalar
    tokens = windows[:, :-1]
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        return model(input_ids=tokens, labels=tokens).loss


def train(model: nn.Module, parameters: list[nn.Parameter], text: Text, settings: Settings) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=settings.peak_learning_rate)
    for step in range(settings.steps):
        loss = loss_of(model, own_part(draw_batch(text, settings, step)))
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if (step + 1) % settings.log_every == 0:
            say(f"step {step + 1}: loss {mean_over_processes(loss.detach()).item():.4f}")


@torch.no_grad()
def evaluate(model: nn.Module, text: Text, settings: Settings, name: str) -> None:
    own = own_part(held_out_windows(text, settings))
    batches = own.split(settings.batch // distributed.get_world_size())
    losses = torch.stack([loss_of(model.eval(), batch) * len(batch) for batch in batches])
    say(f"{name}: held out {mean_over_processes(losses.sum() / len(own)).item():.4f} nats per byte")
    model.train()


def say(line: str) -> None:
    if distributed.get_rank() == 0:
        print(line, flush=True)


def fine_tune(text: Text, settings: Settings, mesh: DeviceMesh, folder: Path, options: argparse.Namespace) -> None:
    """Train all parameters. Every rank takes part in writing the model."""
    model = load(folder / "base", mesh, options.implementation)
    wrapped = wrap(model, mesh)
    evaluate(wrapped, text, settings, "before")
    train(wrapped, list(wrapped.parameters()), text, settings)
    evaluate(wrapped, text, settings, "after")
    save_sharded(model, folder / "model")
    distributed.barrier()
    evaluate(load(folder / "model", mesh, options.implementation), text, settings, "loaded")


def fine_tune_adapters(
    text: Text, settings: Settings, mesh: DeviceMesh, folder: Path, options: argparse.Namespace
) -> None:
    """Train adapters over frozen weights. They are equal on all ranks, so that one of them writes."""
    from peft import PeftModel

    adapted, wrapped = adapt(load(folder / "base", mesh, options.implementation), options.lora)
    evaluate(wrapped, text, settings, "before")
    train(wrapped, [p for p in adapted.parameters() if p.requires_grad], text, settings)
    evaluate(wrapped, text, settings, "after")
    if distributed.get_rank() == 0:
        adapted.save_pretrained(folder / "adapter")
    distributed.barrier()
    base = load(folder / "base", mesh, options.implementation)
    evaluate(PeftModel.from_pretrained(base, folder / "adapter"), text, settings, "loaded")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_preset = "gpu" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--preset", choices=PRESETS, default=default_preset, help="default: %(default)s")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank; default: all parameters")
    parser.add_argument("--expert-processes", type=int, help="processes that share the experts; default: all")
    parser.add_argument("--output", type=Path, help="folder of base and result; default: a temporary one")
    parser.add_argument("--implementation", choices=("triton", "reference"), help="default: by device")
    options = parser.parse_args(arguments)
    use_one_cpu_thread()
    device = start_processes()
    num_processes, settings = distributed.get_world_size(), PRESETS[options.preset]
    sharing = options.expert_processes or num_processes
    if num_processes % sharing or (options.lora and sharing < num_processes):
        parser.error(f"--expert-processes must divide {num_processes}, and equal it with --lora, got {sharing}")
    mesh = init_device_mesh(device.type, (num_processes // sharing, sharing), mesh_dim_names=("efsdp", "ep"))
    text = load_text(Path(sysconfig.get_paths()["stdlib"]), device)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [str(options.output or temporary)]
        distributed.broadcast_object_list(folders)
        folder = Path(folders[0])
        if distributed.get_rank() == 0:
            make_model("qwen3_moe", settings).save_pretrained(folder / "base")
        distributed.barrier()
        (fine_tune if options.lora is None else fine_tune_adapters)(text, settings, mesh, folder, options)
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
