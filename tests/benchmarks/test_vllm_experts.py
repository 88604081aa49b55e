"""benchmarks/vllm_experts.py with a kernel that takes arguments as vLLM's does."""

import pytest
import torch

from benchmarks import vllm_experts
from moe_kernels import reference, sort_by_expert

from .commands import measure

SOURCE = """
import vllm


class NotLoaded(vllm.Base): ...


@triton.jit
def product(a_ptr, b_ptr, stride_bn, n, N, K, BLOCK_SIZE_K: tl.constexpr):
    k = tl.arange(0, BLOCK_SIZE_K)  # all of the reduction
    b_mask = (n < N)[:, None] & (k < K)[None, :]
    b = tl.load(b_ptr + n[:, None] * stride_bn + k[None, :], mask=b_mask, other=0.0).to(tl.float32)
    return tl.sum(b * tl.load(a_ptr + k, mask=k < K, other=0.0)[None, :], 1)


@triton.jit
def fused_moe_kernel(
    a_ptr, b_ptr, c_ptr, topk_weights_ptr, sorted_token_ids_ptr, expert_ids_ptr, num_tokens_post_padded_ptr,
    N, K, num_valid_tokens, stride_am, stride_be, stride_bn, stride_cm,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    MUL_ROUTED_WEIGHT: tl.constexpr, top_k: tl.constexpr,
):
    block = tl.program_id(0) // tl.cdiv(N, BLOCK_SIZE_N)
    n = tl.program_id(0) % tl.cdiv(N, BLOCK_SIZE_N) * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    if block * BLOCK_SIZE_M < tl.load(num_tokens_post_padded_ptr):
        b_ptr += tl.load(expert_ids_ptr + block) * stride_be
        for i in range(BLOCK_SIZE_M):
            slot = tl.load(sorted_token_ids_ptr + block * BLOCK_SIZE_M + i)
            if slot < num_valid_tokens:
                value = product(a_ptr + slot // top_k * stride_am, b_ptr, stride_bn, n, N, K, BLOCK_SIZE_K)
                if MUL_ROUTED_WEIGHT:
                    value *= tl.load(topk_weights_ptr + slot)
                tl.store(c_ptr + slot * stride_cm + n, value, mask=n < N)
"""


def test_small_run_writes_a_results_file(tmp_path, device, monkeypatch):
    monkeypatch.setattr(vllm_experts, "TILES", vllm_experts.TILES[:2])
    source = tmp_path / "fused_moe.py"
    source.write_text(SOURCE)
    small = ["--source", str(source), "--shapes", "tiny", "--tokens", "2", "--device", device]
    (row,) = measure(vllm_experts.main, tmp_path / "out.json", *small)
    assert row["times_as_fast"] == row["vllm_ms"] / row["ours_ms"] > 0
    assert 0 < row["vllm_error"] < (1e-6 if device == "cpu" else 0.01) and row["commit"] == "abc"


def test_blocks_hold_the_slots_of_one_expert(device):
    topk_experts = torch.tensor([[0, 3], [3, 1], [3, 0], [3, 1], [3, 0]], dtype=torch.int32, device=device)
    blocks = vllm_experts.assign_blocks(sort_by_expert(topk_experts, 5), topk_experts, 5, 4)
    assert blocks.num_padded.tolist() == [16]
    slots = blocks.slots[:16].view(4, 4)
    assert slots.tolist() == [[0, 5, 9, 10], [3, 7, 10, 10], [1, 2, 4, 6], [8, 10, 10, 10]]
    assert blocks.experts[:4].tolist() == [0, 1, 3, 3] and (blocks.slots[16:] == 10).all()


def test_refuses_other_kernels(tmp_path):
    source = tmp_path / "fused_moe.py"
    source.write_text("@triton.jit\ndef other():\n    pass\n")
    with pytest.raises(SystemExit, match="must define the Triton function fused_moe_kernel"):
        vllm_experts.load_kernel(source, tmp_path)
    source.write_text("@triton.jit\ndef fused_moe_kernel(a_ptr, new):\n    pass\n")
    topk_experts = torch.zeros(1, 1, dtype=torch.int32)
    blocks = vllm_experts.assign_blocks(reference.sort_by_expert(topk_experts, 1), topk_experts, 1, 16)
    operands = torch.zeros(1, 4), torch.zeros(1, 4, 4), torch.zeros(1, 4)
    with pytest.raises(SystemExit, match="parameters that are not known here: new"):
        vllm_experts.launch(
            vllm_experts.load_kernel(source, tmp_path), *operands, blocks, None, 1, vllm_experts.TILES[0]
        )
