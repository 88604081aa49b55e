import pytest
import torch

from moe_kernels import reference
from moe_kernels.gemm.kernels.hopper.grouped import band_height
from moe_kernels.gemm.tile_table import MAX_GROUPS, empty_tile_table, make_tile_table, tile_table_bytes, tile_table_in

from ...tiers import default_tier


def assert_same_table(actual, expected):
    for name in ("bounds", "tiles", "num_tiles", "order"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert actual.block_rows == expected.block_rows


@pytest.mark.parametrize(
    ("offsets", "num_rows"),
    [
        ([3, 3, 10, 40], 40),
        ([0, 0, 0], 0),
        ([5], 9),
        ([0, 0, 33, 33], 64),
        # Invalid offsets: clamped to a non-decreasing sequence within the rows.
        ([7, 3, 12, -4, 9], 10),
        ([100, 2, 300], 50),
    ],
)
@pytest.mark.parametrize("block_rows", [1, 16, 64])
def test_matches_reference(offsets, num_rows, block_rows, device):
    offsets = torch.tensor(offsets, dtype=torch.int32, device=device)
    arguments = offsets, num_rows, block_rows
    assert_same_table(make_tile_table(*arguments), reference.tile_table(*arguments))


@pytest.mark.parametrize("num_groups", default_tier([300, 1030], [300]))
def test_many_groups(num_groups, device):
    sizes = torch.randint(0, 3, (num_groups,), generator=torch.Generator().manual_seed(0))
    offsets = sizes.cumsum(0).int().to(device)
    arguments = offsets, int(offsets[-1]) + 5, 256
    assert_same_table(make_tile_table(*arguments), reference.tile_table(*arguments))


@pytest.mark.parametrize("num_rows", [1, 3, 5, 20, 67])
@pytest.mark.parametrize("sizes", [[1, 1, 1], [17, 1, 17, 1], [0, 16, 0], [40]])
def test_the_capacity_suffices_and_is_reached(sizes, num_rows, device):
    """Most tiles have one row: every group and the tail begin one. Groups without rows have none."""
    offsets = torch.tensor(sizes, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    table = make_tile_table(offsets, num_rows, 16)
    assert table.num_tiles[1] <= len(table.tiles) <= min(len(sizes) + 1, num_rows) + num_rows // 16
    worst = torch.arange(1, len(sizes) + 1, dtype=torch.int32, device=device)
    assert make_tile_table(worst, num_rows, 16).num_tiles[1] == len(table.tiles)


@pytest.mark.parametrize("given", [False, True])
def test_a_table_in_one_memory(given, device):
    """The tensors start at multiples of 16 bytes, as if allocated separately, and do not overlap."""
    like = torch.zeros(1, dtype=torch.int32, device=device)
    for num_groups in (1, 2, 3, 4, 5, 8, 60, 127):
        for num_rows in (0, 1, 16, 33, 1000):
            num_bytes = tile_table_bytes(num_rows, num_groups, 16)
            memory = torch.zeros(num_bytes + 16, dtype=torch.uint8, device=device) if given else None
            table = tile_table_in(memory, like, num_rows, num_groups, 16)
            apart = empty_tile_table(like, num_rows, num_groups, 16)
            for number, (part, alone) in enumerate(zip(table[:4], apart[:4], strict=True)):
                assert (part.shape, part.stride(), part.dtype) == (alone.shape, alone.stride(), alone.dtype)
                assert part.data_ptr() % 16 == 0 and part.untyped_storage().nbytes() == num_bytes + 16 * given
                part.fill_(number)
            assert all((part == number).all() for number, part in enumerate(table[:4]))
            assert memory is None or (memory[num_bytes:] == 0).all()


def test_strided_offsets(device):
    offsets = torch.tensor([3, 99, 8, 99, 20, 99], dtype=torch.int32, device=device)[::2]
    assert make_tile_table(offsets, 20, 16).bounds.tolist() == [0, 3, 8, 20, 20]


def test_too_many_groups(device):
    with pytest.raises(NotImplementedError, match="groups"):
        make_tile_table(torch.zeros(MAX_GROUPS + 1, dtype=torch.int32, device=device), 10, 16)


def farthest_ahead(num_row_tiles, num_column_tiles, height, num_programs):
    """Return how many tiles a program is ahead of another one, at most, if the last column tile takes half the time."""
    done, most = [0.0] * num_programs, 0.0
    for tile in range(num_row_tiles * num_column_tiles):
        place, band = tile % (height * num_column_tiles), tile // (height * num_column_tiles)
        column = place // min(height, num_row_tiles - band * height)
        done[tile % num_programs] += 0.5 if column == num_column_tiles - 1 else 1.0
        if tile % num_programs == num_programs - 1:
            most = max(most, max(done) - min(done))
    return most


@pytest.mark.parametrize("num_programs", [132, 130, 114])
@pytest.mark.parametrize("num_column_tiles", [3, 6, 9, 11, 12, 13, 24])
def test_half_width_tiles_go_to_all_programs(num_column_tiles, num_programs):
    """With 132 programs and 12 column tiles a kernel was 4 to 8 % faster in bands of 12 than of 8."""
    height = band_height(8, num_column_tiles, num_programs)
    assert farthest_ahead(512, num_column_tiles, height, num_programs) <= 2
