"""The tiles of DeepGEMM: what its source chooses, by hand."""

from foretoken.domain.frameworks.deep_gemm import Tile, choose_tile

_NUM_SMS = 132


def test_the_fewest_waves_win_and_then_the_fullest_last_one() -> None:
    """Of 128 rows by 2,112 columns 132 blocks are one wave: 16 columns each, all processors."""
    tile = choose_tile(128, 2112, 7168, _NUM_SMS)
    assert (128, 16) == (tile.rows, tile.columns)
    assert choose_tile(256, 2112, 7168, _NUM_SMS).columns == 32


def test_few_rows_are_the_columns_of_the_weights() -> None:
    few = choose_tile(31, 4096, 7168, _NUM_SMS)
    assert few.has_weights_first
    assert (128, 16) == (few.rows, few.columns)
    assert not choose_tile(32, 4096, 7168, _NUM_SMS).has_weights_first


def test_stages_fill_the_shared_memory() -> None:
    """A stage of 128 rows and 128 columns takes 33,296 bytes, the result 32,768, scales 224."""
    expected = Tile(False, 128, 128, 5, 2)
    assert expected == choose_tile(8192, 4096, 7168, _NUM_SMS)
    # 32 columns divide a block of weights: eight stages, not six.
    assert choose_tile(256, 2112, 7168, _NUM_SMS).num_stages == 8
    assert choose_tile(256, 3072, 7168, _NUM_SMS).num_stages == 6


def test_pairs_of_blocks_share_what_they_read_from_1024_rows_on() -> None:
    assert choose_tile(1023, 4096, 7168, _NUM_SMS).num_multicast == 1
    assert choose_tile(1024, 4096, 7168, _NUM_SMS).num_multicast == 2
    assert choose_tile(1024, 4096, 7168, _NUM_SMS, num_groups=32).num_multicast == 1
    assert choose_tile(1024, 4096, 7168, 131).num_multicast == 1


def test_rows_of_as_many_blocks_have_one_tile() -> None:
    for blocks in range(9, 40):
        tiles = {choose_tile(128 * blocks - less, 7168, 2048, _NUM_SMS) for less in (0, 1, 127)}
        assert len(tiles) == 1
