"""Stands in for torch's block-scaled grouped product on a CPU: decodes the operands and multiplies them in f32.

It is written from torch's documentation of the layouts, independently of Moxie's swizzle. It checks the shapes and strides that
torch checks, and writes NaN where torch's kernel writes nothing: rows past the last group, and results of empty groups.
"""

import torch


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def unswizzled(codes: torch.Tensor, base: int, rows: int, cols: int) -> torch.Tensor:
    """Decodes the e8m0 scales [rows, cols] that start at byte `base` of `codes` and lie in tiles of 128 x 4 (Blackwell's layout).
    Returns them as f32."""
    r, c = torch.arange(rows)[:, None], torch.arange(cols)[None, :]
    at = (r // 128 * -(-cols // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    picked = codes.flatten()[base + at]
    return torch.where(picked == 255, torch.nan, torch.exp2(picked.float() - 127))


def decoded(qdata: torch.Tensor, codes: torch.Tensor, base: int) -> torch.Tensor:
    """Decodes qdata [rows, k] to f32: multiplies each element by the scale of its 1x32 block. k must be a multiple of 32."""
    rows, k = qdata.shape
    return qdata.float() * unswizzled(codes, base, rows, k // 32).repeat_interleave(32, 1)


def stand_in(calls, a, b, scale_a, scale_b, offs=None, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    calls.append(b.dim())
    assert a.dtype == b.dtype == torch.float8_e4m3fn and scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu
    assert a.is_contiguous() and b.mT.is_contiguous() and scale_a.is_contiguous() and scale_b.is_contiguous()
    assert offs.dtype == torch.int32 and bias is None and scale_result is None and out_dtype == torch.bfloat16
    assert a.dim() == 2 and a.shape[1] == b.shape[-2]
    product = rows_times_weights if b.dim() == 3 else rows_contracted
    ends = offs.tolist()
    return product(a, b.mT, scale_a.view(torch.uint8), scale_b.view(torch.uint8), list(zip([0, *ends], ends)))


def rows_times_weights(a, b, codes_a, codes_b, groups):
    (rows, k), n = a.shape, b.shape[1]
    assert k % 32 == 0 and len(groups) == b.shape[0] and codes_a.dim() == 2 and codes_a.shape[0] >= rows
    cols = round_up(k // 32, 4)
    assert codes_b.shape == (b.shape[0], cols * round_up(n, 128))
    out, start = torch.full((rows, n), torch.nan, dtype=torch.bfloat16), 0
    for g, (begin, end) in enumerate(groups):
        left = decoded(a[begin:end], codes_a, start * cols)
        out[begin:end] = (left @ decoded(b[g], codes_b[g], 0).T).bfloat16()
        start += round_up(end - begin, 128)  # each group's scales begin at a new tile of 128 rows
    return out


def rows_contracted(a, b, codes_a, codes_b, groups):
    (n, total), k = a.shape, b.shape[0]
    assert codes_a.dim() == codes_b.dim() == 2 and codes_a.shape[0] >= n and codes_b.shape[0] >= k
    out, start = torch.full((len(groups), n, k), torch.nan, dtype=torch.bfloat16), 0
    for g, (begin, end) in enumerate(groups):
        assert (end - begin) % 32 == 0 and end <= total
        if begin == end:
            continue
        left = decoded(a[:, begin:end], codes_a, start * round_up(n, 128))
        right = decoded(b[:, begin:end], codes_b, start * round_up(k, 128))
        out[g] = (left @ right.T).bfloat16()
        start += round_up((end - begin) // 32, 4)
    return out
