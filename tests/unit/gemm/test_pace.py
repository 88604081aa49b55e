"""Persistent kernels whose programs wait for each other (`hopper.pace`), also when the programs cannot run together."""

import dataclasses
from functools import partial

import pytest
import torch

from moe_kernels import GroupedGemmArguments, WgradArguments, get_kernels
from moe_kernels.gemm.tile_table import make_tile_table
from moe_kernels.runtime.gluon import KNOWS_GLUON

from .kernel_arguments import shuffled

pytestmark = pytest.mark.gpu

ROWS, SIZE_K, SIZE_N = 12288, 1024, 2048
OFFSETS = [0, 1500, 4650, 4650, 6000, 8250, 10500, 12150]


def paced_kernels():
    def is_paced(metadata):
        name, taken = metadata.kernel_name, metadata.kernel_class.arguments_class
        return "_ws_bfloat16" in name and taken in (GroupedGemmArguments, WgradArguments) and metadata.epilogue is None

    if torch.cuda.get_device_capability()[0] != 9 or not KNOWS_GLUON:
        pytest.skip("no warp-specialised kernels here")
    return get_kernels(metadata_filter=is_paced)


def draw(kernel, device, shorter=1):
    """Return arguments with a tile table, and with several tiles for each program. Divide the length of reductions by
    `shorter`."""
    operands, design = kernel.metadata.operands, kernel.metadata.design
    is_wgrad = kernel.arguments_class is WgradArguments
    rows, size_k = (ROWS // shorter, SIZE_K) if is_wgrad else (ROWS, SIZE_K // shorter)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=device) * rows // ROWS
    a = torch.randn(rows, size_k, device=device).bfloat16()
    options = {"tile_table": make_tile_table(offsets, rows, 128)}
    if is_wgrad:
        dout = torch.randn(rows, SIZE_N, device=device).bfloat16()
        out = torch.empty(len(OFFSETS), size_k, SIZE_N, device=device, dtype=torch.bfloat16)
        if design.gather and design.tile_shape[0] < design.tile_shape[1]:
            a, options["a_row_to_token"] = shuffled(a)
        elif design.gather:
            dout, options["dout_row_to_token"] = shuffled(dout)
        return WgradArguments(a, dout, out, **options)
    if design.gather:
        a, options["row_to_token"] = shuffled(a)
    b = torch.randn(len(OFFSETS), SIZE_N, size_k, device=device).bfloat16().transpose(1, 2)
    if operands.B.layout == "row":
        b = b.contiguous()
    return GroupedGemmArguments(a, b, torch.empty(rows, SIZE_N, device=device, dtype=torch.bfloat16), **options)


def milliseconds(run):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def test_a_producer_waits_and_gives_up(device):
    """If a million marks are missing, all waits last to their end. Each producer takes back what it has counted."""
    for kernel in paced_kernels():
        args = draw(kernel, device)
        kernel.run(args)
        expected = args.out.clone()
        args.tile_table.num_tiles[2] = -(10**6)
        args.out.fill_(torch.nan)
        assert milliseconds(partial(kernel.run, args)) > 5
        assert torch.equal(args.out, expected), kernel.metadata.kernel_name
        assert args.tile_table.num_tiles[2:].tolist() == [-(10**6), 0]


def test_short_reductions_do_not_wait(device):
    for kernel in paced_kernels():
        args = draw(kernel, device, shorter=4)
        kernel.run(args)
        args.tile_table.num_tiles[2] = -(10**6)
        assert milliseconds(partial(kernel.run, args)) < 5
        assert args.tile_table.num_tiles[2:].tolist() == [-(10**6), 0]


def test_programs_that_cannot_run_together(device):
    """Only one of three programs per SM runs at a time. Programs do not wait for programs that have not started."""
    for kernel in paced_kernels():
        args = draw(kernel, device)
        kernel.run(args)
        expected = args.out.clone()
        three = dataclasses.replace(args, reserved_sms=-2 * torch.cuda.get_device_properties(0).multi_processor_count)
        kernel.run(three)
        args.out.fill_(torch.nan)
        elapsed = milliseconds(partial(kernel.run, three))
        assert torch.equal(args.out, expected), kernel.metadata.kernel_name
        assert elapsed < 5, "a single wait to its end takes longer"
        assert args.tile_table.num_tiles[2:].tolist() == [0, 0], "counters of the pace"


def test_one_table_on_two_streams(device):
    """Two kernels that count in one table at the same time compute the same as one after the other."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    for kernel in paced_kernels():
        args = draw(kernel, device)
        few = [dataclasses.replace(args, out=torch.empty_like(args.out), reserved_sms=66) for _ in streams]
        kernel.run(args)
        kernel.run(few[0])
        torch.cuda.synchronize()

        def on_both(kernel=kernel, few=few):
            for stream, one in zip(streams, few, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(10):
                        kernel.run(one)
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)

        assert milliseconds(on_both) < 10
        assert all(torch.equal(one.out, args.out) for one in few), kernel.metadata.kernel_name
        assert args.tile_table.num_tiles[2:].tolist() == [0, 0]
