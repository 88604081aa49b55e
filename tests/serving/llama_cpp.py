"""Do with a checkpoint's tensors what llama.cpp's converter does, for Qwen3-MoE and gpt-oss.

Names come from the `gguf` package, by `get_tensor_name_map`. The converter itself is a script of llama.cpp's repository
(https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py). `converted` repeats its steps on experts: it
stacks the matrices of experts by number, and takes packed tensors of gpt-oss apart.
"""

import re

import numpy as np
import torch

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def write_gguf(gguf, path, tensors, architecture, num_layers, num_experts):
    """Write a GGUF file of a checkpoint's tensors.

    Raises:
        ValueError: a name is unknown to llama.cpp, as its converter does.
    """
    names = gguf.get_tensor_name_map(architecture, num_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    for name, tensor in converted(tensors, num_experts):
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise ValueError(f"Can not map tensor {name!r}")
        writer.add_tensor(new, np.ascontiguousarray(tensor.detach().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(gguf, path):
    return {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in gguf.GGUFReader(path).tensors}


def converted(tensors, num_experts):
    held = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            layer, expert, projection = match.groups()
            experts = held.setdefault((layer, projection), {})
            experts[int(expert)] = tensor
            if len(experts) == num_experts:
                stacked = torch.stack([experts[number] for number in range(num_experts)])
                yield f"model.layers.{layer}.mlp.experts.{projection}_proj.weight", stacked
        elif name.endswith("sinks"):
            yield f"{name}.weight", tensor
        elif name.endswith("gate_up_proj_bias"):
            for number, part in enumerate(("gate", "up")):
                yield name.replace("gate_up_proj_bias", f"{part}_proj.bias"), tensor[:, number::2]
        elif name.endswith("experts.gate_up_proj"):
            for number, part in enumerate(("gate", "up")):
                yield f"{name.replace('gate_up_proj', f'{part}_proj')}.weight", tensor.mT[:, number::2]
        elif name.endswith("down_proj_bias"):
            yield name.replace("down_proj_bias", "down_proj.bias"), tensor
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor.mT
        else:
            yield name, tensor
    assert all(len(experts) == num_experts for experts in held.values())
