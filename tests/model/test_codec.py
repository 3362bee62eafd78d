"""Stored row formats: what a round trip keeps, what it rounds, and where each byte lies."""

from __future__ import annotations

import pytest
import torch

from kvstore.errors import ProfileError
from kvstore.profile.formats import RowFormat, row_bytes
from kvstore_workers.model.codec import codec_for

WRITTEN = [
    (RowFormat.F32, 512, 64),
    (RowFormat.FP8_ROPE_BF16, 512, 64),
    (RowFormat.FP8_ROPE_BF16, 72, 8),
    (RowFormat.FP8_ROPE_BF16, 192, 0),
    (RowFormat.FP8_ALL, 512, 64),
    (RowFormat.FP8_ALL, 96, 8),
    (RowFormat.FP4_UE8M0, 128, 64),
    (RowFormat.FP4_UE8M0, 32, 8),
    (RowFormat.FP4_E4M3, 512, 64),
    (RowFormat.FP4_E4M3, 48, 8),
]


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
    if row_format is RowFormat.FP4_E4M3:
        # Below this its scales are subnormal and too far apart to find the same one again.
        large = rows.view(9, -1, 16).abs().amax(-1, keepdim=True) >= 6 * 2.0**-6
        kept = large.expand(-1, -1, 16).reshape(rows.shape)
    else:
        kept = torch.ones(rows.shape, dtype=torch.bool)
    again = codec.decode(codec.encode(decoded))
    assert torch.equal(again[kept], decoded[kept]), "values that a format holds are kept"


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


E4M3 = [code for code in range(256) if code & 127 != 127]  # all but the two NaN
E2M1 = list(range(16))
# What encoding can write: the floor of a group's largest number below, the last whole binade of float32 above.
SCALES_OF_FP8, SCALES_OF_FP4 = range(127 - 22, 127 + 120), range(127 - 15, 127 + 126)


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def _e2m1(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def _groups(codes: list[int], size: int, largest: int) -> list[list[int]]:
    """`codes` in groups of `size`, each beginning with the code of the largest number, which fixes the scale."""
    rest = size - 1
    padded = codes + [codes[0]] * (-len(codes) % rest)
    return [[largest, *padded[first : first + rest]] for first in range(0, len(padded), rest)]


def _nibbles(codes: list[int]) -> list[int]:
    return [low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True)]


def _check_both_ways(
    row_format: RowFormat, dim: int, rows: list[list[int]], numbers: list[list[float]]
) -> None:
    """`rows` are the bytes of `numbers`, in either direction and bit for bit."""
    codec = codec_for(row_format, dim, 0)
    packed, expected = (
        torch.tensor(rows, dtype=torch.uint8),
        torch.tensor(numbers, dtype=torch.float64).float(),
    )
    decoded = codec.decode(packed)
    assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32)), "signs of zeros included"
    assert torch.equal(codec.encode(decoded), packed)


@pytest.mark.parametrize(("row_format", "group"), [(RowFormat.FP8_ROPE_BF16, 64), (RowFormat.FP8_ALL, 32)])
def test_every_e4m3_code_under_every_scale_is_the_same_after_a_round_trip(
    row_format: RowFormat, group: int
) -> None:
    groups = _groups(E4M3, group, largest=0x7E)
    dim = group * len(groups)
    codes = [code for codes in groups for code in codes]
    padding = row_bytes(row_format, dim, 0).total - dim - len(groups)
    _check_both_ways(
        row_format,
        dim,
        [[*codes, *[scale] * len(groups), *[0] * padding] for scale in SCALES_OF_FP8],
        [[_e4m3(code) * 2.0 ** (scale - 127) for code in codes] for scale in SCALES_OF_FP8],
    )


def test_every_e2m1_code_under_every_scale_is_the_same_after_a_round_trip() -> None:
    codes = _groups(E2M1, 32, largest=7)[0]
    _check_both_ways(
        RowFormat.FP4_UE8M0,
        32,
        [[*_nibbles(codes), scale] for scale in SCALES_OF_FP4],
        [[_e2m1(code) * 2.0 ** (scale - 127) for code in codes] for scale in SCALES_OF_FP4],
    )


def test_every_e2m1_code_under_every_e4m3_scale_is_the_same_after_a_round_trip() -> None:
    groups = _groups(E2M1, 16, largest=7)
    codes = [code for codes in groups for code in codes]
    scales = range(1, 0x7F)  # every number above 0, subnormal ones too
    _check_both_ways(
        RowFormat.FP4_E4M3,
        16 * len(groups),
        [[*_nibbles(codes), *[scale] * len(groups)] for scale in scales],
        [[_e2m1(code) * _e4m3(scale) for code in codes] for scale in scales],
    )


@pytest.mark.parametrize(
    ("row_format", "dim", "scale_at", "codes"),
    [(RowFormat.FP8_ALL, 32, 32, E4M3), (RowFormat.FP4_UE8M0, 32, 16, E2M1)],
)
def test_every_scale_that_a_byte_can_hold_is_read_as_its_power_of_two(
    row_format: RowFormat, dim: int, scale_at: int, codes: list[int]
) -> None:
    codec = codec_for(row_format, dim, 0)
    for scale in range(255):
        for first in range(0, len(codes), dim):
            row = (codes[first : first + dim] + codes + codes)[:dim]
            data = row if row_format is RowFormat.FP8_ALL else _nibbles(row)
            assert len(data) == scale_at
            decoded = codec.decode(torch.tensor([[*data, scale]], dtype=torch.uint8))[0]
            number = _e4m3 if row_format is RowFormat.FP8_ALL else _e2m1
            exact = torch.tensor([number(code) * 2.0 ** (scale - 127) for code in row], dtype=torch.float64)
            assert torch.equal(decoded, exact.float()), f"scale {scale}"


def test_every_bfloat16_of_the_rope_part_is_kept() -> None:
    codec = codec_for(RowFormat.FP8_ROPE_BF16, 128, 64)
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(-1, 64)
    packed = torch.zeros(codes.shape[0], codec.row_bytes, dtype=torch.uint8)
    packed[:, 64:192] = codes.view(torch.uint8)
    packed[:, 192] = 105  # a group of zeros
    decoded = codec.decode(packed)
    numbers = decoded[:, 64:].isnan().logical_not()
    again = codec.encode(decoded)
    assert torch.equal(again[:, 64:192].contiguous().view(torch.uint16).int()[numbers], codes.int()[numbers])
    assert torch.equal(again[:, :64], packed[:, :64])
    assert torch.equal(again[:, 192:], packed[:, 192:])


def test_fp4_with_e4m3_scales_takes_the_scale_next_to_a_sixth_of_the_largest_number_and_saturates() -> None:
    codec = codec_for(RowFormat.FP4_E4M3, 48, 0)
    row = torch.zeros(1, 48)
    row[0, 0], row[0, 1], row[0, 16], row[0, 17] = 6.3, -3.0, 1e6, 2688.0
    packed = codec.encode(row)[0]
    # 1.05 rounds to 1, so 6.3 becomes 6; a scale ends at 448; zeros take the smallest scale
    assert packed[24:].tolist() == [0x38, 0x7E, 0x01]
    assert packed[0] == 7 | (13 << 4)
    assert codec.decode(packed[None])[0, [0, 1, 16, 17]].tolist() == [6.0, -3.0, 2688.0, 2688.0]


@pytest.mark.parametrize(
    ("row_format", "dim", "rope_dim"),
    [
        (RowFormat.FP8_ROPE_BF16, 100, 8),
        (RowFormat.FP8_ALL, 48, 8),
        (RowFormat.FP4_UE8M0, 48, 8),
        (RowFormat.FP4_E4M3, 40, 8),
    ],
)
def test_rows_that_do_not_fill_their_scale_groups_are_refused(
    row_format: RowFormat, dim: int, rope_dim: int
) -> None:
    with pytest.raises(ProfileError, match=row_format.value):
        codec_for(row_format, dim, rope_dim)
