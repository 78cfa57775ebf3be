"""Converts parameters by name, each with its own recipe; saves a checkpoint, whose tensors are plain; converts the model back."""

import io

import torch
import torch.nn.functional as F
from torch import nn

import moxie


class Experts(nn.Module):
    """Experts whose 3D parameters are [experts, in, out] and are multiplied without a transpose."""

    def __init__(self, dim: int = 64, hidden: int = 96, experts: int = 4):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, dim, 2 * hidden) * dim**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, dim) * hidden**-0.5)

    def forward(self, x, offs):
        gate, up = F.grouped_mm(x, self.gate_up_proj, offs=offs).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down_proj, offs=offs)


def main() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(64, 64), "experts": Experts(), "lm_head": nn.Linear(64, 32)}).bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    report = moxie.quantize_(
        model,
        moxie.FqnToConfig(
            {
                "experts.down_proj": moxie.MXFP8GroupedMMConfig.from_recipe("mxfp8_rceil_wgrad_with_hp"),
                "re:experts\\..*": moxie.MXFP8GroupedMMConfig(weight_cache="kn"),
                "up": moxie.MXLinearConfig.from_recipe_name(moxie.MXLinearRecipeName.MXFP8_CUBLAS_RCEIL),
                "lm_head": None,
            }
        ),
    )
    print(report)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    moxie.refresh_after(model, optimizer)  # quantizes cached weights again after each step
    x, offs = torch.randn(50, 64, dtype=torch.bfloat16), torch.tensor([7, 7, 30, 50], dtype=torch.int32)
    for _ in range(5):
        loss = model["lm_head"](model["experts"](model["up"](x), offs)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state.keys() == before.keys() and all(type(tensor) is torch.Tensor for tensor in state.values())
    moxie.unquantize_(model)
    assert type(model["up"]) is nn.Linear
    print(f"loss {loss.item():.4f}; the checkpoint has {len(state)} plain tensors")


if __name__ == "__main__":
    main()
