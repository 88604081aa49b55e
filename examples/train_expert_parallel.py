"""Train the language model of `train_language_model.py` on several ranks, which share the experts of every layer.

Every rank takes its part of each batch, so the losses equal those of a single rank, up to rounding. The experts are
sharded over `--expert-processes` ranks. FSDP2 shards each expert over the ranks that hold a copy of it, and everything
else over all ranks.

    torchrun --nproc-per-node 2 examples/train_expert_parallel.py --steps 100     # two CPU processes, or two GPUs
    torchrun --nproc-per-node 8 examples/train_expert_parallel.py                 # eight GPUs
    python examples/train_expert_parallel.py --steps 100                          # one process, the same losses

With `--resume` it continues from the checkpoint in --output, whatever the number of ranks that wrote it.

Letters: B windows in a batch, S bytes in a window, P ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sysconfig
from datetime import timedelta
from pathlib import Path

import torch
from _language_model import LanguageModel, Settings, Text, draw_batch, held_out_windows, load_text, use_one_cpu_thread
from torch import Tensor, distributed
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from train_language_model import PRESETS, learning_rate, loss_of, make_optimizer, predict

from moe_layers import BalanceLosses, ExpertParallel, clip_grad_norm_


@dataclasses.dataclass
class Run:
    settings: Settings
    text: Text
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    losses: list[float] = dataclasses.field(default_factory=list)  # of finished steps, over the whole batch


def start_processes() -> torch.device:
    """Join the processes that torchrun started, or run as a single process."""
    if "LOCAL_RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    # Some machines report NVLink multicast although it does not work.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    distributed.init_process_group(backend, timeout=timedelta(minutes=5), device_id=device_id)
    return device


def start_run(
    settings: Settings,
    text: Text,
    expert_processes: int,
    *,
    dispatcher: str = "auto",
    implementation: str | None = None,
) -> Run:
    num_processes, device = distributed.get_world_size(), text.training.device
    if settings.batch % num_processes or settings.held_out_windows % num_processes:
        raise ValueError(
            f"start_run: the number of processes must divide batch={settings.batch} and "
            f"held_out_windows={settings.held_out_windows}, got {num_processes}"
        )
    torch.manual_seed(settings.seed)
    # Drawn on the CPU by every rank, so that any number of ranks starts from the same weights.
    model = LanguageModel(settings, implementation).to(device)
    experts_mesh = init_device_mesh(
        device.type, (num_processes // expert_processes, expert_processes), mesh_dim_names=("efsdp", "ep")
    )
    everyone = init_device_mesh(device.type, (num_processes,), mesh_dim_names=("all",))
    # The balance loss uses the shares of the whole batch.
    losses = BalanceLosses(global_batch=0.01, z=1e-3, group=everyone.get_group())
    for block in model.blocks:
        block.feed_forward.balance_losses = losses
    plan = {"blocks.*.feed_forward": ExpertParallel(dispatcher)}
    parallelize_module(model, experts_mesh["ep"], plan, src_data_rank=None)
    for block in model.blocks:
        fully_shard(block.feed_forward.experts, mesh=experts_mesh["efsdp"])
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    return Run(settings, text, model, make_optimizer(model))


def own_part(windows: Tensor) -> Tensor:  # [B, ...] -> [B / P, ...]
    """Return the windows of this rank."""
    return windows.chunk(distributed.get_world_size())[distributed.get_rank()]


def train_step(run: Run) -> Tensor:  # scalar
    """Return the loss of the whole batch. Waits for other ranks and the GPU only where the model does."""
    windows = own_part(draw_batch(run.text, run.settings, len(run.losses)))  # [B / P, S + 1]
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.settings, len(run.losses))
    logits, _ = predict(run.model, windows[:, :-1])
    loss = loss_of(logits, windows[:, 1:])
    run.optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    return mean_over_processes(loss.detach())


def mean_over_processes(value: Tensor) -> Tensor:
    distributed.all_reduce(value)
    return value / distributed.get_world_size()


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Return the mean loss over the held-out windows, in nats per byte."""
    own = own_part(held_out_windows(run.text, run.settings))
    batches = own.split(run.settings.batch // distributed.get_world_size())
    losses = [loss_of(predict(run.model, batch[:, :-1])[0], batch[:, 1:]) * len(batch) for batch in batches]
    return mean_over_processes(torch.stack(losses).sum() / len(own)).item()


def train(run: Run, *, stop_after: int | None = None) -> None:
    """Train up to the last step or to step `stop_after`; the first rank prints."""
    for step in range(len(run.losses), run.settings.steps if stop_after is None else stop_after):
        run.losses.append(train_step(run).item())
        if distributed.get_rank() == 0 and (step + 1) % run.settings.log_every == 0:
            print(f"step {step + 1}: loss {run.losses[-1]:.3f}", flush=True)


def save_checkpoint(run: Run, folder: Path) -> None:
    """Write the checkpoint; every rank writes what it holds."""
    model, optimizer = get_state_dict(run.model, run.optimizer)
    distributed_checkpoint.save(
        {"model": model, "optimizer": optimizer, "losses": torch.tensor(run.losses)}, checkpoint_id=folder
    )


def load_checkpoint(run: Run, folder: Path) -> None:
    """Continue a run, possibly of another number of ranks: each rank reads what it will hold."""
    model, optimizer = get_state_dict(run.model, run.optimizer)
    metadata = distributed_checkpoint.FileSystemReader(folder).read_metadata()
    losses = torch.empty(metadata.state_dict_metadata["losses"].size)
    states = {"model": model, "optimizer": optimizer, "losses": losses}
    distributed_checkpoint.load(states, checkpoint_id=folder)
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    run.losses = losses.tolist()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default_preset = "gpu" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--preset", choices=PRESETS, default=default_preset, help="default here: %(default)s")
    parser.add_argument("--steps", type=int, help="train for this many steps instead of the preset's")
    parser.add_argument("--expert-processes", type=int, help="processes that share the experts; default: all")
    parser.add_argument("--dispatcher", choices=("auto", "allgather", "alltoall", "overlapped"), default="auto")
    parser.add_argument("--output", type=Path, default=Path("runs/expert_parallel"), help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="continue the run in --output")
    parser.add_argument("--implementation", choices=("triton", "reference"), help="default: by device")
    options = parser.parse_args(arguments)
    preset = PRESETS[options.preset]
    settings = dataclasses.replace(preset, steps=options.steps or preset.steps)
    num_processes = int(os.environ["WORLD_SIZE"]) if "LOCAL_RANK" in os.environ else 1
    expert_processes = num_processes if options.expert_processes is None else options.expert_processes
    if expert_processes < 1 or num_processes % expert_processes:
        parser.error(f"--expert-processes must divide the number of processes, {num_processes}, got {expert_processes}")
    use_one_cpu_thread()
    device = start_processes()
    text = load_text(Path(sysconfig.get_paths()["stdlib"]), device)
    run = start_run(
        settings, text, expert_processes, dispatcher=options.dispatcher, implementation=options.implementation
    )
    if options.resume:
        load_checkpoint(run, options.output / "checkpoint")
    train(run)
    held_out_loss = evaluate(run)
    save_checkpoint(run, options.output / "checkpoint")
    if distributed.get_rank() == 0:
        metrics = {
            "processes": distributed.get_world_size(),
            "held_out_nats_per_byte": held_out_loss,
            "training_nats_per_byte": run.losses,
        }
        (options.output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        print(f"held-out loss: {held_out_loss:.3f} nats per byte; wrote {options.output}")
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
