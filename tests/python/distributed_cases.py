"""Cases that test_distributed.py runs on every rank: training with FSDP2 and with tensor parallelism."""

import copy
import warnings

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import moxie
import moxie.distributed
import moxie.nn
from ranks import World
from sharded_models import (
    MIXED,
    RECIPES,
    D,
    E,
    F,
    K,
    Model,
    accumulated,
    assert_close,
    count_gathers,
    decibels,
    gradients,
    loss_of_rank,
    mesh_of,
    shard,
    tokens,
    whole,
)

EXACT = float("inf")


class Experts(nn.Module):
    """A model of plain torch with 3D expert weights and torch's grouped product, which quantize_ converts."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(D, D, bias=False)
        self.w1 = nn.Parameter(torch.randn(E, F, D) * D**-0.5)
        self.w2 = nn.Parameter(torch.randn(E, D, F) * F**-0.5)

    def forward(self, x):
        offs = torch.tensor([5, 5, 14, x.shape[0]], dtype=torch.int32)
        h = torch.nn.functional.silu(torch._grouped_mm(self.up(x), self.w1.mT, offs=offs))
        return torch._grouped_mm(h, self.w2.mT, offs=offs) * 1


def fsdp_gradients_are_those_of_one_process(world: World) -> None:
    mesh = mesh_of(world.size, names=("dp",))
    for recipe in RECIPES:
        torch.manual_seed(1)
        master = Model(recipe=recipe)
        wanted = accumulated(master, world.size)
        for within in ((), (moxie.nn.GroupedExperts,)):
            model = shard(copy.deepcopy(master), mesh, within=within)
            loss_of_rank(model, world.rank).backward()
            assert_close(gradients(model), wanted, EXACT if world.size == 2 else 100)


def a_model_may_be_converted_before_or_after_it_is_sharded(world: World) -> None:
    mesh = mesh_of(world.size, names=("dp",))
    master = Experts()
    converted = copy.deepcopy(master)
    moxie.quantize_(converted, "mxfp8_rceil")
    wanted = accumulated(converted, world.size)
    before = shard(converted, mesh, within=(nn.Linear,))
    after = shard(copy.deepcopy(master), mesh, within=(nn.Linear,))
    report = moxie.quantize_(after, "mxfp8_rceil")
    assert sorted(report.converted) == ["up", "w1", "w2"] and type(after.up).__name__ == "FSDPMXLinear", report
    for model in (before, after):
        loss_of_rank(model, world.rank).backward()
        assert_close(gradients(model), wanted, EXACT if world.size == 2 else 100)
    assert not report.unused
    moxie.quantize_(after, "bf16")  # after another conversion, the next gathers must hand out weights with the new recipe
    plain = copy.deepcopy(master)
    moxie.quantize_(plain, "bf16")
    wanted = accumulated(plain, world.size)
    after.zero_grad()
    loss_of_rank(after, world.rank).backward()
    assert_close(gradients(after), wanted, EXACT if world.size == 2 else 100)
    assert type(moxie.unquantize_(after).up).__name__ == "FSDPLinear"


def a_weight_cache_is_not_used_for_a_gathered_weight(world: World) -> None:
    mesh = mesh_of(world.size, names=("dp",))
    torch.manual_seed(1)
    master = Model(weight_cache=True)
    master.up = moxie.MXLinear(D, D, config=moxie.MXLinearConfig(weight_cache=True))
    model = shard(copy.deepcopy(master), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    moxie.refresh_after(model, optimizer)
    fresh = shard(Model(), mesh)
    with torch.no_grad():
        for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    steps = torch.optim.SGD(fresh.parameters(), lr=0.5)
    for step in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = loss_of_rank(model, world.rank, step)
        wanted = loss_of_rank(fresh, world.rank, step)
        assert torch.equal(got, wanted), step
        for loss, one in ((got, optimizer), (wanted, steps)):
            loss.backward()
            one.step()
            one.zero_grad()


class Both(nn.Module):
    """An MoE layer, then an MXLinear whose shard on each rank has 128 rows: whole blocks, as FP8 gathers need."""

    def __init__(self, ranks: int, recipe: str):
        super().__init__()
        self.up = moxie.MXLinear(D, 128 * ranks, False, config=recipe)
        self.moe = moxie.nn.MoE(D, F, E, K, recipe=recipe)

    def forward(self, x):
        return self.up(x + self.moe(x)) * 1


def fsdp_gathers_weights_in_fp8(world: World) -> None:
    mesh = mesh_of(world.size, names=("dp",))
    for recipe, block, dtype in (
        ("mxfp8_rceil_128", None, torch.bfloat16),
        ("mxfp8_rceil", "32x32", torch.bfloat16),
        ("mxfp8_rceil", "128x128", torch.float32),
    ):
        torch.manual_seed(2)
        policy = MIXED if dtype == torch.bfloat16 else MixedPrecisionPolicy()
        master = Both(world.size, recipe)
        plain, model = (shard(copy.deepcopy(master), mesh, policy, (moxie.nn.GroupedExperts, moxie.MXLinear)) for _ in "ab")
        names = moxie.distributed.quantize_all_gather_(model, block)
        assert names == ["up.weight", "moe.experts.w13", "moe.experts.w2"], names
        of_plain, of_ours = count_gathers(plain), count_gathers(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            counts = []
            for one, gathers in ((plain, of_plain), (model, of_ours)):
                gathers.calls = gathers.nbytes = 0
                loss = one(tokens(step + 10 * world.rank, dtype)).float().square().mean()
                forward = gathers.calls
                loss.backward()
                counts.append((forward, gathers.calls, gathers.nbytes))
            # In FP8 or not, FSDP2 gathers all 3 groups in forward and 2 again in backward: the root's stays gathered in between.
            assert counts[0][:2] == counts[1][:2] == (3, 5), counts
            if dtype == torch.bfloat16:
                assert counts[1][2] <= 0.505 * counts[0][2], counts
            optimizer.step()
            optimizer.zero_grad()
            check_gathered(model, names, block or "128x128", dtype, recipe)


def check_gathered(model: nn.Module, names: list[str], block: str, dtype: torch.dtype, recipe: str) -> None:
    """Asserts that gathering gives the weights that one process would get by quantizing the whole f32 master."""
    for path, _, name in (one.rpartition(".") for one in names):
        owner = model.get_submodule(path)
        master = getattr(owner, name).full_tensor()
        stacked = master if master.dim() == 3 else master[None]
        owner.unshard()
        gathered = getattr(owner, name).detach().view(stacked.shape).clone()
        owner.reshard()
        wanted = moxie.dequantize_rowwise(*moxie.quantize_rowwise(stacked, block=block), block=block, dtype=dtype)
        assert gathered.dtype == dtype and torch.equal(gathered, wanted), name
        # Quantizing the gathered weight for the product must give the same values as quantizing the f32 master.
        if moxie.Recipe.from_name(recipe).weights == block:
            rows, columns = (moxie.quantize_weights(w, recipe=recipe) for w in (gathered, stacked))
            for part in (0, 2):
                pairs = [moxie.dequantize_rowwise(one[part], one[part + 1], block=block, dtype=dtype) for one in (rows, columns)]
                assert torch.equal(*pairs), (name, part)


# ---- tensor parallelism --------------------------------------------------------------------------------------------------------


def one_product_takes_every_placement(world: World) -> None:
    mesh = mesh_of(world.size, names=("tp",))
    size, offs = world.size, torch.tensor([5, 5, 14, 20], dtype=torch.int32)
    n, k = 128 * size, 128 * size
    x, w = torch.randn(24, k).bfloat16(), (torch.randn(E, n, k) * k**-0.5).bfloat16()
    dy, bias = torch.randn(24, n).bfloat16(), torch.randn(E, n).bfloat16()
    for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
        for given in ("plain", "replicated", "sharded"):
            here = x.clone().requires_grad_()
            of_x = {"plain": here, "replicated": distribute_tensor(here, mesh, [Replicate()])}.get(given)
            of_x = distribute_tensor(here, mesh, [Shard(1)]) if of_x is None else of_x
            of_w, of_bias = (nn.Parameter(distribute_tensor(t, mesh, [p])) for t, p in ((w, placement), (bias, Replicate())))
            y = moxie.grouped_mm(of_x, of_w, offs, bias=of_bias)
            y.redistribute(placements=[Replicate()]).to_local().backward(dy)
            wanted = split_product(x, w, offs, bias, dy, placement, size)
            dx = whole(here.grad if given == "plain" else of_x.grad if of_x.is_leaf else here.grad)
            got = {"y": whole(y).detach(), "dx": dx, "dw": whole(of_w.grad), "dbias": whole(of_bias.grad)}
            exact = {name: got[name] for name in ("dw", "dbias")}
            assert_close(exact, {name: wanted[name] for name in exact}, EXACT)
            assert_close(got, wanted, EXACT if size == 2 else 45)
            assert isinstance(y, DTensor) and of_w.grad.placements == (placement,)


def split_product(x, w, offs, bias, dy, placement, size: int) -> dict[str, Tensor]:
    """Computes in one process what the ranks compute: splits w as `placement` does and multiplies part by part. Returns y and the
    gradients."""
    x, w, bias = (t.clone().requires_grad_() for t in (x, w, bias))
    if not isinstance(placement, Shard) or placement.dim == 0:
        y = moxie.grouped_mm(x, w, offs, bias=bias)
    elif placement.dim == 1:
        parts = zip(w.chunk(size, 1), bias.chunk(size, 1), strict=True)
        y = torch.cat([moxie.grouped_mm(x, part, offs, bias=one) for part, one in parts], 1)
    else:
        parts = zip(x.chunk(size, 1), w.chunk(size, 2), strict=True)
        y = sum(moxie.grouped_mm(one, part, offs, bias=bias if i == 0 else None) for i, (one, part) in enumerate(parts))
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": w.grad, "dbias": bias.grad}


def quantized_activations_meet_sharded_weights(world: World) -> None:
    mesh = mesh_of(world.size, names=("tp",))
    offs, k = torch.tensor([5, 5, 14, 24], dtype=torch.int32), 128 * world.size
    x, w = torch.randn(24, k).bfloat16(), torch.randn(E, k, k).bfloat16()
    for placement, of_x in ((Shard(1), Replicate()), (Shard(2), Shard(1))):
        of_w = nn.Parameter(distribute_tensor(w, mesh, [placement]))
        results = []
        for quantized in (False, True):
            here = distribute_tensor(x, mesh, [of_x]).to_local().requires_grad_()
            local = moxie.MXTensor.to_mx(here, block="1x128") if quantized else here
            y = moxie.grouped_mm(DTensor.from_local(local, mesh, [of_x]), of_w, offs)
            whole(y).square().sum().backward()
            results.append({"y": whole(y).detach(), "dx": here.grad, "dw": whole(of_w.grad)})
            of_w.grad = None
        assert_close(results[1], results[0], EXACT)


class Pair(nn.Module):
    def __init__(self, ranks: int):
        super().__init__()
        self.up, self.down = (moxie.MXLinear(128 * ranks, 128 * ranks, dtype=torch.bfloat16) for _ in "ab")

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


def linears_take_torchs_styles(world: World) -> None:
    mesh, size = mesh_of(world.size, names=("tp",)), world.size
    torch.manual_seed(3)
    master = Pair(size)
    x = torch.randn(2, 4 * size, 128 * size).bfloat16()
    dy = torch.randn_like(x)

    def split(model: Pair, x: Tensor) -> Tensor:
        up, down = model.up, model.down
        hs = [
            torch.nn.functional.silu(moxie.grouped_mm(x.flatten(0, 1), w[None], bias=b))
            for w, b in zip(up.weight.chunk(size), up.bias.chunk(size), strict=True)
        ]
        parts = zip(hs, down.weight.chunk(size, 1), strict=True)
        return sum(moxie.grouped_mm(h, w[None], bias=down.bias if i == 0 else None) for i, (h, w) in enumerate(parts)).view(
            x.shape
        )

    one = copy.deepcopy(master)
    all_x = x.clone().requires_grad_()
    wanted_y = split(one, all_x)
    wanted_y.backward(dy)
    for sequence in (False, True):
        layout = Shard(1) if sequence else Replicate()
        model = parallelize_module(
            copy.deepcopy(master),
            mesh,
            {"up": ColwiseParallel(input_layouts=layout), "down": RowwiseParallel(output_layouts=layout)},
        )
        here = distribute_tensor(x, mesh, [layout]).to_local().requires_grad_()
        y = model(here)
        y.backward(distribute_tensor(dy, mesh, [layout]).to_local())
        y, dx = (DTensor.from_local(t, mesh, [layout]).full_tensor() for t in (y, here.grad))
        assert_close({"y": y, "dx": dx}, {"y": wanted_y.detach(), "dx": all_x.grad}, EXACT if size == 2 else 45)
        got, wanted = gradients(model), gradients(one)
        assert_close({n: got[n] for n in got if "down" in n}, {n: wanted[n] for n in got if "down" in n}, EXACT)
        assert_close(got, wanted, EXACT if size == 2 else 45)


def split_layer(layer: moxie.nn.MoE, size: int):
    """Returns a function that computes the layer's forward in one process with the experts' hidden features cut into `size`
    parts, as tensor parallelism cuts them."""

    def parts(experts):
        gates, ups = experts.w13.chunk(2, 1)
        return [
            (torch.cat(pair, 1), w2)
            for *pair, w2 in zip(gates.chunk(size, 1), ups.chunk(size, 1), experts.w2.chunk(size, 2), strict=True)
        ]

    def forward(x):
        # A view of x, so that autograd adds up the layer's gradients of x before it adds those of the layer's surroundings, as
        # the ranks do.
        x = x.view_as(x)
        routing = layer.router(x)
        offs, slot_of, row_of = moxie.route(routing.ids, E)
        route = {"slot_of": slot_of, "row_of": row_of, "top_k": K, "weights": routing.weights, "recipe": layer.experts.recipe}
        of_experts = x.view_as(x)
        y = sum(moxie.expert_mlp(of_experts, w13, w2, offs, **route) for w13, w2 in parts(layer.experts))
        if layer.shared is not None:
            of_shared = x.view_as(x)
            y = y + sum(
                moxie.expert_mlp(of_shared, w13, w2, recipe=layer.experts.recipe) for w13, w2 in parts(layer.shared.experts)
            )
        return y

    return forward


def tensor_parallelism_of_experts_works_or_names_what_torch_lacks(world: World) -> None:
    layer, mesh = moxie.nn.MoE(D, 128 * world.size, E, K, dtype=torch.bfloat16), mesh_of(world.size, names=("tp",))
    whole_w13, lacks = layer.experts.w13, ""
    try:
        parallelize_module(layer, mesh, moxie.distributed.ExpertTensorParallel())
    except RuntimeError as error:
        lacks = str(error)
    if torch.__version__.startswith("2.11."):
        assert "ExpertTensorParallel: torch 2.11" in lacks and "gate_up_shard(); torch 2.13 can" in lacks, lacks
        assert layer.experts.w13 is whole_w13, "nothing has changed"
    else:
        assert not lacks and isinstance(layer.experts.w13, DTensor), lacks


def experts_are_sharded_by_their_hidden_features(world: World) -> None:
    mesh, size = mesh_of(world.size, names=("tp",)), world.size
    for recipe, shared in (("mxfp8_rceil_128", None), ("mxfp8_rceil", 128 * size)):
        torch.manual_seed(4)
        master = moxie.nn.MoE(D, 128 * size, E, K, recipe=recipe, shared_hidden_dim=shared, dtype=torch.bfloat16)
        one = copy.deepcopy(master)
        x, dy = tokens(1).requires_grad_(), tokens(2)
        y = split_layer(one, size)(x)
        y.backward(dy)
        wanted = {"y": y.detach(), "dx": x.grad, **gradients(one)}
        for layout in (Replicate(), Shard(0)):
            style = moxie.distributed.ExpertTensorParallel(input_layouts=layout, output_layouts=layout)
            layer = parallelize_module(copy.deepcopy(master), mesh, style)
            here = distribute_tensor(x.detach(), mesh, [layout]).to_local().requires_grad_()
            y = layer(here)
            y.backward(distribute_tensor(dy, mesh, [layout]).to_local())
            y, dx = (DTensor.from_local(t.detach(), mesh, [layout]).full_tensor() for t in (y, here.grad))
            got = {"y": y, "dx": dx, **gradients(layer)}
            weights = [name for name in got if "experts" in name]
            assert_close({n: got[n] for n in weights}, {n: wanted[n] for n in weights}, EXACT)
            # With a shared expert, the ranks add up its output and that of the routed experts in another order than one process.
            least = EXACT if size == 2 and shared is None else 45
            assert_close(got, wanted, least)
        state = {name: whole(tensor) for name, tensor in layer.state_dict().items()}
        assert_close(state, dict(master.state_dict()), EXACT)


def fsdp_over_tensor_parallelism(world: World) -> None:
    if world.size != 4:
        return
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    torch.manual_seed(5)
    master = Model(hidden=256)
    forwards = {}

    def split(model: Model, rank: int) -> Tensor:
        # Tensor parallelism splits only the MoE layer here, in two parts; every rank computes the linear and the head whole.
        moe = forwards.setdefault(id(model), split_layer(model.moe, 2))
        x = tokens(rank)
        x = x + model.up(x)
        y = model.head(x + moe(x))
        return (y.float() - tokens(7 + rank).float()).square().mean()

    wanted = accumulated(master, 2, split)
    for quantized in (False, True):
        model = copy.deepcopy(master)
        parallelize_module(model, mesh["tp"], {"moe": moxie.distributed.ExpertTensorParallel()})
        shard(model, mesh["dp"], within=(moxie.nn.GroupedExperts,))
        if quantized:
            names = moxie.distributed.quantize_all_gather_(model.moe)
            assert names == ["experts.w13", "experts.w2"], names
        loss_of_rank(model, mesh["dp"].get_local_rank()).backward()
        # Only 20 dB with FP8 gathers: they round weights from f32, the reference from bf16.
        assert_close(gradients(model), wanted, 20 if quantized else EXACT)


def a_layer_takes_dtensors_without_a_style(world: World) -> None:
    mesh, size = mesh_of(world.size, names=("tp",)), world.size
    torch.manual_seed(4)
    layer = moxie.nn.MoE(D, 128 * size, E, K, dtype=torch.bfloat16)
    x = tokens(1)
    wanted = layer(x)
    for placements in ((moxie.distributed.gate_up_shard(), Shard(2)), (Shard(0), Shard(0))):
        other = copy.deepcopy(layer)
        for name, placement in zip(("w13", "w2"), placements, strict=True):
            whole_one = distribute_tensor(getattr(other.experts, name).detach(), mesh, [Replicate()])
            other.experts.register_parameter(name, nn.Parameter(whole_one.redistribute(placements=[placement])))
        for given in (x, distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(x, mesh, [Shard(0)])):
            y = other(given)
            assert isinstance(y, DTensor) and y.shape == x.shape
            assert decibels(whole(y), wanted) >= 45  # each rank rounds its part of a token's sum to bf16, so y is not exact
    y = layer(distribute_tensor(x, mesh, [Shard(0)]))
    assert torch.equal(whole(y), wanted)


def a_model_gathered_in_fp8_cannot_change_its_recipe_in_silence(world: World) -> None:
    def gathered() -> nn.Module:
        model = nn.Sequential(moxie.MXLinear(256, 256, config="mxfp8_rceil"))
        fully_shard(model, mesh=mesh_of(world.size, names=("dp",)))
        moxie.distributed.quantize_all_gather_(model, "32x32")
        model(torch.randn(4, 256))
        return model

    def convert(model: nn.Module) -> None:
        moxie.quantize_(model, "mxfp8_rceil_128")

    for change, words in ((moxie.unquantize_, "the model was unquantized since"), (convert, "would round it twice")):
        model = gathered()
        change(model)
        try:
            model(torch.randn(4, 256))
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")
