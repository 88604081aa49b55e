"""Do with a checkpoint's tensors what `load_weights` of vLLM 0.33.0 and SGLang 0.5.23 does.

vLLM and SGLang keep the experts of a layer as `w13_weight` [E, 2F, D] and `w2_weight` [E, D, F]. Per expert, the
projections gate_proj or w1 and up_proj or w3 go to the halves of `w13_weight`. Packed tensors are transposed where the
checkpoint of the architecture is [in, out]; gpt-oss stays interleaved. Granite's experts are packed under other names.
DBRX stacks the experts along rows, in three tensors.
"""

import re

import torch

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight(_scale_inv)?$")
_SHARD = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
_PACKED = {
    "gate_up_proj": "w13_weight",
    "down_proj": "w2_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj_bias": "w2_bias",
}
_LINEAR = {"block_sparse_moe.input_linear.weight": "w13_weight", "block_sparse_moe.output_linear.weight": "w2_weight"}
_FLAT = re.compile(r"(.*\.experts)\.mlp\.(w1|v1|w2)$")
TRANSPOSED = ("gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe_text")


def load(weights, model_type, num_experts, plain=False):
    """Return the engine's parameters of the experts by name, and all other tensors.

    Args:
        plain: whether the experts have no gate.
    """
    parameters, others, shards = {}, {}, {}
    for name, tensor in weights:
        leaf = name.rpartition(".")[2]
        if match := _EXPERT.match(name):
            prefix, expert, projection, scales = match.groups()
            target = f"{prefix}.{'w2' if projection in ('down_proj', 'w2') else 'w13'}_weight{scales or ''}"
            shards.setdefault(target, {})[int(expert), _SHARD.get(projection, 0)] = tensor.clone()
        elif linear := next((old for old in _LINEAR if name.endswith(f".{old}")), None):
            parameters[name.replace(linear, f"block_sparse_moe.experts.{_LINEAR[linear]}")] = tensor.clone()
        elif match := _FLAT.match(name):
            flat = tensor.unflatten(0, (num_experts, -1))
            if match[2] == "w2":
                parameters[f"{match[1]}.w2_weight"] = flat.transpose(1, 2).clone()
            else:
                half = ("w1", "v1").index(match[2])
                for expert, matrix in enumerate(flat):
                    shards.setdefault(f"{match[1]}.w13_weight", {})[expert, half] = matrix.clone()
        elif ".experts." in name and leaf in _PACKED:
            whole = tensor if leaf.endswith("_bias") or model_type not in TRANSPOSED else tensor.transpose(1, 2)
            parameters[name.replace(leaf, _PACKED[leaf])] = whole.clone()
        else:
            assert name not in others
            others[name] = tensor.clone()
    for target, held in shards.items():
        halves = (0,) if ".w2_" in target else (1,) if plain else (0, 1)
        assert held.keys() == {(e, half) for e in range(num_experts) for half in halves}
        parameters[target] = torch.stack([torch.cat([held[e, half] for half in halves]) for e in range(num_experts)])
    return parameters, others
