"""Arguments of grouped products that differ in one property each."""

import dataclasses

import torch

from moe_kernels import GroupedGemmArguments, WgradArguments, reference


def table_of(offsets, num_rows, shift):
    """A tile table whose tensors start `shift` numbers behind an aligned address."""
    tensors = [
        torch.cat([t.new_zeros(shift), t.flatten()])[shift:].view(t.shape)
        for t in reference.tile_table(offsets, num_rows, 64)[:4]
    ]
    return reference.TileTable(*tensors, 64)


def shifted(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def grouped_variants():
    """Arguments of one shape and, by what differs, others that want another kernel or are compiled for otherwise."""
    a, b, out = torch.randn(40, 64).half(), torch.randn(3, 64, 48).half(), torch.empty(40, 48).half()
    offsets = torch.tensor([10, 20, 38], dtype=torch.int32)
    plain = GroupedGemmArguments(a, b, out, offsets=offsets)
    index = torch.arange(40, dtype=torch.int32)
    changes = {
        "dtype": {"A": a.float(), "B": b.float(), "out": out.float()},
        "dtype of the result": {"out": out.float()},
        "alignment of A": {"A": shifted(a)},
        "alignment of B": {"B": shifted(b)},
        "alignment of out": {"out": shifted(out)},
        "layout of B": {"B": b.mT.contiguous().mT},
        "strides of A": {"A": torch.zeros(40, 65).half()[:, :64]},
        "strides of out": {"out": torch.zeros(40, 49).half()[:, :48]},
        "size K": {"A": a[:, :60], "B": b[:, :60]},
        "size N": {"B": b[..., :47], "out": out[:, :47]},
        "bias": {"bias": torch.zeros(3, 48)},
        "dtype of the bias": {"bias": torch.zeros(3, 48).half()},
        "alignment of the bias": {"bias": shifted(torch.zeros(3, 48))},
        "strides of the bias": {"bias": torch.zeros(1, 48).expand(3, 48)},
        "row scale": {"row_scale": torch.ones(40)},
        "alignment of the row scale": {"row_scale": shifted(torch.ones(40))},
        "gather": {"row_to_token": index},
        "alignment of the index": {"row_to_token": shifted(index)},
        "no zeros behind": {"zero_tail": False},
        "a table": {"tile_table": table_of(offsets, 40, 0)},
        "alignment of a table": {"tile_table": table_of(offsets, 40, 1)},
    }
    return plain, {what: dataclasses.replace(plain, **change) for what, change in changes.items()}


def wgrad_variants():
    a, dout, out = torch.randn(40, 64).half(), torch.randn(40, 48).half(), torch.empty(3, 64, 48).half()
    offsets = torch.tensor([10, 20, 38], dtype=torch.int32)
    plain = WgradArguments(a, dout, out, offsets=offsets)
    index = torch.arange(40, dtype=torch.int32)
    changes = {
        "dtype": {"A": a.float(), "dout": dout.float(), "out": out.float()},
        "dtype of the result": {"out": out.float()},
        "alignment of A": {"A": shifted(a)},
        "alignment of dout": {"dout": shifted(dout)},
        "layout of out": {"out": out.mT.contiguous().mT},
        "strides of dout": {"dout": torch.zeros(40, 49).half()[:, :48]},
        "size K": {"A": a[:, :60], "out": out[:, :60]},
        "gather of A": {"a_row_to_token": index},
        "gather of dout": {"dout_row_to_token": index},
        "accumulation": {"accumulate": True},
        "alignment of a table": {"tile_table": table_of(offsets, 40, 1)},
    }
    return plain, {what: dataclasses.replace(plain, **change) for what, change in changes.items()}
