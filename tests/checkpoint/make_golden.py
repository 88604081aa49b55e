"""Make a golden case from a small config.json: `python -m tests.checkpoint.make_golden CONFIG FOLDER BLOCK [PREFIX]`.

BLOCK is the path of the MoE block in the model, such as `model.layers.1.mlp`. PREFIX is its path in the files that
`save_pretrained` writes, where it differs.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from .golden import replace_by_grads

SEED, BATCH, LENGTH = 0, 2, 12


def make(config: Path, folder: Path, path: str, prefix: str | None = None) -> None:
    torch.manual_seed(SEED)
    settings = transformers.AutoConfig.for_model(**json.loads(config.read_text()))
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.set_experts_implementation("eager")
    for parameter in model.parameters():  # outputs of about 1, and no near ties
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5)
    model.save_pretrained(folder)
    block, chosen = model.get_submodule(path), {}

    def keep(_, inputs, named):
        _, experts, weights = [*inputs, *named.values()]
        chosen.update(topk_idx=experts.long(), topk_weight=weights.detach().float())

    block.experts.register_forward_pre_hook(keep, with_kwargs=True)
    x, dy = torch.randn(2, BATCH, LENGTH, settings.hidden_size)
    x.requires_grad_()
    y = block(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(dy)
    tensors = {"x": x.detach(), "y": y.detach(), "dy": dy, "grad_x": x.grad, **chosen}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "golden.safetensors")
    meta = {"arch": folder.name, "disk_prefix": f"{prefix or path}.", "seed": SEED}
    meta |= {"transformers": transformers.__version__, "torch": torch.__version__}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    save_file(gradients_on_disk(model, f"{prefix or path}."), folder / "grads.safetensors")


def gradients_on_disk(model, prefix: str) -> dict[str, torch.Tensor]:
    """Return the block's gradients as transformers would write the parameters."""
    replace_by_grads(model)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        written = load_file(Path(directory) / "model.safetensors")
    found = {name: tensor for name, tensor in written.items() if name.startswith(prefix)}
    assert found, f"no tensor of the files begins with {prefix}, but with {sorted(written)[:3]}"
    return found


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
