"""Multiplies activations that arrive quantized, as after an all-to-all in FP8, with experts: no bf16 copy is made."""

import torch

import moxie

EXPERTS, ROWS, N, K = 4, 512, 128, 256


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, K, dtype=torch.bfloat16)
    w = torch.randn(EXPERTS, N, K, dtype=torch.bfloat16, requires_grad=True)
    offs = torch.tensor([100, 100, 333, ROWS], dtype=torch.int32)

    qdata, scale = moxie.quantize_rowwise(x, block="1x128")  # stands for what another rank sent
    mx = moxie.MXTensor.from_qdata_and_scales(qdata, scale, torch.bfloat16, block="1x128")

    y = moxie.grouped_mm(mx, w, offs)
    y.sum().backward()
    assert torch.equal(y, moxie.grouped_mm(x, w, offs))
    kept = mx.qdata.nbytes + mx.scale.nbytes
    print(f"y is that of x quantized in the call; kept for wgrad: {kept} bytes, {x.nbytes} in bf16")


if __name__ == "__main__":
    main()
