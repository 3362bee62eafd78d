"""Stored row formats: what a round trip keeps, what it rounds, and where each byte lies."""

from __future__ import annotations

import pytest
import torch

from kvstore.errors import ProfileError
from kvstore.profile.formats import RowFormat, row_bytes
from kvstore_workers.model.codec import codec_for

WRITTEN = [(RowFormat.F32, 512, 64), (RowFormat.FP8_ROPE_BF16, 512, 64), (RowFormat.FP4_UE8M0, 128, 64)]


def _rows(count: int, dim: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-12, 12, (count, 1), generator=generator).float())
    return torch.randn(count, dim, generator=generator) * sizes


@pytest.mark.parametrize(("row_format", "dim", "rope_dim"), WRITTEN)
@pytest.mark.parametrize("seed", range(3))
def test_the_bytes_of_a_row_have_the_profiles_length_and_depend_on_that_row_alone(
    row_format: RowFormat, dim: int, rope_dim: int, seed: int
) -> None:
    codec = codec_for(row_format, dim, rope_dim)
    rows = _rows(9, dim, seed)
    packed = codec.encode(rows)
    assert packed.dtype is torch.uint8
    assert packed.shape == (9, row_bytes(row_format, dim, rope_dim).total)
    assert codec.row_bytes == packed.shape[1]
    for index in range(9):
        assert torch.equal(codec.encode(rows[index : index + 1])[0], packed[index])
    decoded = codec.decode(packed)
    assert decoded.shape == rows.shape
    assert decoded.dtype is torch.float32
    assert torch.equal(codec.decode(codec.encode(decoded)), decoded), "values that a format holds are kept"


@pytest.mark.parametrize(("row_format", "dim", "rope_dim"), WRITTEN)
def test_no_rows_and_rows_of_zeros(row_format: RowFormat, dim: int, rope_dim: int) -> None:
    codec = codec_for(row_format, dim, rope_dim)
    assert codec.decode(codec.encode(torch.zeros(0, dim))).shape == (0, dim)
    assert not codec.decode(codec.encode(torch.zeros(2, dim))).any()


def test_f32_keeps_every_bit() -> None:
    rows = torch.tensor([[0.0, -0.0, float("inf"), float("nan"), 1e-45, 3.4e38]])
    codec = codec_for(RowFormat.F32, 6, 0)
    assert torch.equal(codec.decode(codec.encode(rows)).view(torch.int32), rows.view(torch.int32))
    assert codec.encode(torch.tensor([[1.0] * 6])).tolist() == [[0, 0, 128, 63] * 6]


def test_fp8_rounds_to_three_bits_of_mantissa_and_rope_to_bfloat16() -> None:
    codec = codec_for(RowFormat.FP8_ROPE_BF16, 512, 64)
    rows = _rows(64, 512, 5)
    back = codec.decode(codec.encode(rows))
    largest = (
        rows[:, :448].reshape(64, 7, 64).abs().amax(-1, keepdim=True).expand(-1, -1, 64).reshape(64, 448)
    )
    error = (back[:, :448] - rows[:, :448]).abs()
    # half a step of the number itself, or of the smallest subnormal under its group's scale (at most largest / 224)
    assert bool((error <= torch.maximum(rows[:, :448].abs() / 16, largest / 224 / 1024)).all())
    assert torch.equal(back[:, 448:], rows[:, 448:].to(torch.bfloat16).float())


def test_fp8_scales_are_powers_of_two_after_the_data_and_the_padding_is_zero() -> None:
    codec = codec_for(RowFormat.FP8_ROPE_BF16, 512, 64)
    row = torch.zeros(1, 512)
    for group, size in enumerate((448.0, 449.0, 896.0, 1.0, 1.75, 0.875, 0.0)):
        row[0, group * 64] = size
    packed = codec.encode(row)[0]
    # 448 / 2^e must not exceed e4m3's 448: 448 -> 2^0, 449 and 896 -> 2^1, 1 -> 2^-8 (1 * 256), 1.75 -> 2^-8, 0.875 -> 2^-9
    assert packed[576:583].tolist()[:6] == [127, 128, 128, 119, 119, 118]
    assert packed[583] == 0
    assert codec.decode(codec.encode(row))[0, 0] == 448.0


def test_fp4_rounds_to_the_nearest_value_ties_to_even_and_packs_the_even_element_low() -> None:
    codec = codec_for(RowFormat.FP4_UE8M0, 32, 0)
    given = [6.0, 0.24, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, -0.5, -0.2, -2.6, -6.0, 0.0] + [
        0.0
    ] * 16
    wanted = [6.0, 0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.5, 0.0, -3.0, -6.0, 0.0] + [0.0] * 16
    packed = codec.encode(torch.tensor([given]))
    assert codec.decode(packed)[0].tolist() == wanted
    assert packed[0, 16] == 127
    assert packed[0, 0] == 7
    assert packed[0, 1] == (1 << 4)


@pytest.mark.parametrize("row_format", [RowFormat.FP8_ALL, RowFormat.FP4_E4M3])
def test_formats_that_this_worker_cannot_write_are_refused_by_name(row_format: RowFormat) -> None:
    with pytest.raises(ProfileError, match=f"{row_format.value}.*{RowFormat.F32.value}"):
        codec_for(row_format, 512, 64)
