"""Buckets of weights for a broadcast."""

import zlib

import pytest
import torch
from torch import distributed

from moe_layers.serving import Bucket, checksum, pack

from ..markdown import blocks_of
from ..processes import ROOT, make_test


def weights():
    yield "a", torch.arange(6.0).view(2, 3).T  # not contiguous
    yield "b", torch.tensor(3.0, dtype=torch.bfloat16)
    yield "c", torch.arange(40, dtype=torch.uint8)
    yield "d", torch.zeros(0, 4)
    yield "e", torch.randn(3, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)


def assert_are_weights(found, device="cpu"):
    for (name, tensor), (expected_name, expected) in zip(found, weights(), strict=True):
        assert name == expected_name and tensor.device.type == device and tensor.dtype == expected.dtype
        assert torch.equal(tensor.float().cpu(), expected.float())


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize(("max_bytes", "sizes"), [(1, [1] * 5), (48, [2, 2, 1]), (1 << 20, [5])])
def test_tensors_survive_in_order(max_bytes, sizes, checksums):
    buckets = list(pack(weights(), max_bytes, checksums=checksums))
    assert [len(bucket.entries) for bucket in buckets] == sizes or max_bytes == 1
    assert all(bucket.buffer.nbytes <= max_bytes or len(bucket.entries) == 1 for bucket in buckets)
    received = (Bucket(bucket.entries, bucket.buffer.clone()) for bucket in buckets)
    assert_are_weights([pair for bucket in received for pair in bucket.unpack()])


def test_checksum_is_that_of_the_bytes():
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert checksum(tensor) == zlib.crc32(tensor.numpy().tobytes()) != checksum(tensor.T)


def test_a_changed_byte_is_found():
    (bucket,) = pack(weights(), 1 << 20, checksums=True)
    bucket.buffer[bucket.entries[2].start + 7] ^= 1
    with pytest.raises(ValueError, match=r"unpack: c must have the checksum \d+, got \d+"):
        list(bucket.unpack())


def broadcast(device):
    """Send weights to the other rank by the lines of the guide."""
    names, blocks = {}, blocks_of(ROOT / "docs" / "guides" / "serve.md")
    exec(next(block.text for block in blocks if "Bucket" in block.text), names)
    if distributed.get_rank() == 0:
        names["send"](((name, tensor.to(device)) for name, tensor in weights()), 48)
        return
    assert_are_weights(list(names["receive"](device)), device.type)


test_two_processes = make_test([broadcast], 2)


def test_bad_input():
    with pytest.raises(ValueError, match="pack: max_bytes must be a positive integer, got 0"):
        pack(weights(), 0)
