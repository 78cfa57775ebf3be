"""Cases that test_expert_parallel.py runs on every rank (through ranks.py). Each compares an MoE layer whose experts are spread
over the ranks with the layer of one process that gets the tokens of all ranks."""

import dataclasses
import functools
import io
import math

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import moxie
import moxie.nn

DIM, HIDDEN, EXPERTS, TOP_K, TOKENS = 160, 96, 8, 3, 20  # TOKENS on each rank
WIRES = {"bf16": ("unquantized",), "mxfp8_rceil": ("fp8", "unquantized"), "mxfp8_rceil_128": ("fp8", "unquantized")}
NAMES: list[str] = []  # the names of all cases, in the order in which they run


def case(function, name=None):
    """Registers the function as a case, which ranks.py calls with a World."""
    name = name or function.__name__
    NAMES.append(name)
    globals()[name] = lambda world: function(rank=world.rank, size=world.size)
    return globals()[name]


def inputs(kind: str, tokens: int, dtype) -> torch.Tensor:
    x = torch.randn(tokens, DIM)
    if kind == "heavy_tailed":
        x = x * torch.exp(2 * torch.randn(tokens, DIM))
    return x.to(dtype)


def layers(size: int, group, dtype=torch.bfloat16, skewed=False, **options):
    """Makes an MoE layer in one process and one whose experts are spread over the group, with the same weights."""
    wire = options.pop("wire", None)
    torch.manual_seed(1)
    local = moxie.nn.MoE(DIM, HIDDEN, EXPERTS, TOP_K, dtype=dtype, **options)
    torch.manual_seed(1)
    parallel = moxie.nn.MoE(DIM, HIDDEN, EXPERTS, TOP_K, dtype=dtype, ep_group=group, wire=wire, **options)
    if skewed:  # the bias makes every token choose experts 0 to 2, so ranks without these experts get no rows
        with torch.no_grad():
            for layer in (local, parallel):
                layer.router.bias[:TOP_K] += 100
    return local, parallel


def step(layer, x, dy):
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * dy).sum().backward() if dy.numel() == 0 else y.backward(dy)
    return y.detach(), x.grad


def decibels(actual: torch.Tensor, expected: torch.Tensor) -> float:
    noise = (actual.double() - expected.double()).norm().item()
    return math.inf if noise == 0 else 20 * math.log10(expected.double().norm().item() / noise)


def summed(x: torch.Tensor) -> torch.Tensor:
    total = x.double()
    dist.all_reduce(total)
    return total


def shares(rank: int, size: int, counts=None):
    """Returns the slice of the concatenated tokens that belongs to this rank, and the number of all tokens."""
    counts = counts or [TOKENS] * size
    first = sum(counts[:rank])
    return slice(first, first + counts[rank]), sum(counts)


def compare(rank, size, local, parallel, x, dy, *, mine, wire, db=100.0, gate_db=45.0):
    y, dx = step(local, x, dy)
    y_mine, dx_mine = step(parallel, x[mine], dy[mine])
    assert torch.equal(y_mine, y[mine]), "y differs"
    assert torch.equal(dx_mine, dx[mine]), "dx differs"
    experts = EXPERTS // size
    of_rank = slice(rank * experts, (rank + 1) * experts)
    for name in ("w13", "w2"):
        expected, actual = getattr(local.experts, name).grad[of_rank], getattr(parallel.experts, name).grad
        if wire == "unquantized":
            assert torch.equal(actual, expected), f"d{name} differs"
        else:
            assert decibels(actual, expected) >= db, f"d{name}: {decibels(actual, expected)} dB"
    if local.experts.b13 is not None:
        assert torch.equal(parallel.experts.b13.grad, local.experts.b13.grad[of_rank]), "db13 differs"
        db2 = decibels(parallel.experts.b2.grad, local.experts.b2.grad[of_rank])
        assert db2 >= (45.0 if local.experts.b2.dtype == torch.bfloat16 else 100.0), f"db2: {db2} dB"
    gate = summed(parallel.router.gate.weight.grad)
    assert decibels(gate, local.router.gate.weight.grad) >= gate_db, f"gate: {decibels(gate, local.router.gate.weight.grad)} dB"


def exactness(recipe, wire, kind, dtype, rank, size):
    local, parallel = layers(
        size, dist.group.WORLD, dtype, skewed=kind == "skewed", recipe=recipe, wire=wire, score="sigmoid", balance="bias"
    )
    torch.manual_seed(2)
    mine, total = shares(rank, size)
    x, dy = inputs(kind, total, dtype), inputs(kind, total, dtype)
    compare(
        rank,
        size,
        local,
        parallel,
        x,
        dy,
        mine=mine,
        wire=wire,
        db=80.0 if kind == "heavy_tailed" else 100.0,
        gate_db=90.0 if dtype == torch.float32 else 45.0,
    )


for _recipe, _wires in WIRES.items():
    for _wire in _wires:
        for _kind in ("normal", "heavy_tailed", "skewed"):
            for _dtype in (torch.bfloat16, torch.float32):
                _name = f"the_bits_are_those_of_one_process_{_recipe}_{_wire}_{_kind}_{str(_dtype)[6:]}"
                case(functools.partial(exactness, _recipe, _wire, _kind, _dtype), _name)


# ---- who has what ------------------------------------------------------------------------------------------------------------


@case
def ranks_without_tokens_take_part(rank, size):
    for counts in ([0] + [TOKENS] * (size - 1), [TOKENS] + [0] * (size - 1), [0] * size):
        local, parallel = layers(size, dist.group.WORLD, recipe="mxfp8_rceil_128")
        torch.manual_seed(3)
        mine, total = shares(rank, size, counts)
        x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
        if total:
            compare(rank, size, local, parallel, x, dy, mine=mine, wire="fp8")
        else:
            y, dx = step(parallel, x, dy)
            assert y.shape == dx.shape == (0, DIM)
            assert parallel.experts.w13.grad.count_nonzero() == 0


@case
def frozen_experts_pass_gradients_on(rank, size):
    for frozen in (["w13", "w2"], ["w2"], ["w13"]):
        local, parallel = layers(size, dist.group.WORLD, recipe="mxfp8_rceil")
        for layer in (local, parallel):
            for name in frozen:
                getattr(layer.experts, name).requires_grad_(False)
        mine, total = shares(rank, size)
        torch.manual_seed(4)
        x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
        y, dx = step(local, x, dy)
        y_mine, dx_mine = step(parallel, x[mine], dy[mine])
        assert torch.equal(y_mine, y[mine]) and torch.equal(dx_mine, dx[mine])
        assert all(getattr(parallel.experts, name).grad is None for name in frozen)


@case
def a_rank_may_freeze_what_others_train(rank, size):
    local, parallel = layers(size, dist.group.WORLD, recipe="mxfp8_rceil")
    if rank == size - 1:
        parallel.experts.requires_grad_(False)
    mine, total = shares(rank, size)
    torch.manual_seed(4)
    x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
    y, dx = step(local, x, dy)
    y_mine, dx_mine = step(parallel, x[mine], dy[mine])
    assert torch.equal(y_mine, y[mine]) and torch.equal(dx_mine, dx[mine])


@case
def the_gradient_of_x_may_be_wanted_on_some_ranks(rank, size):
    local, parallel = layers(size, dist.group.WORLD, recipe="mxfp8_rceil")
    for layer in (local, parallel):
        layer.router.requires_grad_(False)
    mine, total = shares(rank, size)
    torch.manual_seed(4)
    x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
    _, dx = step(local, x, dy)
    own = x[mine].clone().requires_grad_(rank == 0)
    parallel(own).backward(dy[mine])
    assert rank != 0 or torch.equal(own.grad, dx[mine])


@case
def evaluation_mode_on_some_ranks_is_defined(rank, size):
    local, parallel = layers(size, dist.group.WORLD, score="sigmoid", balance="bias")
    parallel.train(rank == 0)
    mine, total = shares(rank, size)
    torch.manual_seed(5)
    x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
    compare(rank, size, local, parallel, x, dy, mine=mine, wire="fp8")
    assert parallel.router.load.sum() == (TOKENS * TOP_K if rank == 0 else 0)


@case
def no_gradients_on_some_ranks_is_an_error_on_all(rank, size):
    _, parallel = layers(size, dist.group.WORLD)
    if size == 1:
        return
    with torch.set_grad_enabled(rank != 1):
        error = error_of(lambda: parallel(inputs("normal", TOKENS, torch.bfloat16)))
    assert isinstance(error, ValueError) and "gradients" in str(error), error
    assert ("rank 1" in str(error)) and "group" in str(error), error
    with torch.no_grad():  # if no rank needs gradients, the call works
        assert parallel(inputs("normal", TOKENS, torch.bfloat16)).shape == (TOKENS, DIM)
    with torch.inference_mode():
        assert parallel(inputs("normal", TOKENS, torch.bfloat16)).shape == (TOKENS, DIM)


# ---- agreement ---------------------------------------------------------------------------------------------------------------


def error_of(call) -> Exception | None:
    try:
        call()
    except Exception as error:  # the caller checks the type and the message
        return error
    return None


@case
def layers_that_differ_are_refused_on_every_rank(rank, size):
    if size == 1:
        return
    last = rank == size - 1
    different = {
        "dim": lambda: (DIM + 32 * last, HIDDEN, EXPERTS, TOP_K),
        "hidden_dim": lambda: (DIM, HIDDEN + 32 * last, EXPERTS, TOP_K),
        "num_experts": lambda: (DIM, HIDDEN, EXPERTS + size * last, TOP_K),
    }
    for name, arguments in different.items():
        error = error_of(lambda arguments=arguments: moxie.nn.MoE(*arguments(), ep_group=dist.group.WORLD))
        assert isinstance(error, ValueError) and name in str(error) and f"rank {size - 1}" in str(error), (name, error)
    options = {
        "recipe": {"recipe": "mxfp8_rceil" if last else "mxfp8_floor"},
        "wire": {"wire": "unquantized" if last else "fp8"},
        "dtype": {"dtype": torch.bfloat16 if last else torch.float32},
    }
    for name, kwargs in options.items():
        error = error_of(lambda kwargs=kwargs: moxie.nn.MoE(DIM, HIDDEN, EXPERTS, TOP_K, ep_group=dist.group.WORLD, **kwargs))
        assert isinstance(error, ValueError) and name in str(error) and f"rank {size - 1}" in str(error), (name, error)


@case
def calls_that_differ_are_refused_on_every_rank(rank, size):
    if size == 1:
        return
    _, parallel = layers(size, dist.group.WORLD, dtype=torch.float32, recipe="mxfp8_rceil")
    error = error_of(lambda: parallel(inputs("normal", 4, torch.bfloat16 if rank == 0 else torch.float32)))
    assert isinstance(error, ValueError) and "dtypes" in str(error), error
    if rank == 0:
        parallel.experts.set_recipe_("mxfp8_floor")
    error = error_of(lambda: parallel(inputs("normal", 4, torch.float32)))
    assert isinstance(error, ValueError) and "recipe" in str(error) and ("rank 0" in str(error)), error


@case
def wrong_ends_of_groups_are_refused_before_anything_is_sent(rank, size):
    _, parallel = layers(size, dist.group.WORLD, recipe="mxfp8_rceil")
    x = inputs("normal", 5, torch.bfloat16)
    routing = parallel.router(x)
    offs, slot_of, row_of = moxie.route(routing.ids, EXPERTS)
    huge = offs.clone()
    huge[1] = 2**31 - 1
    wrong = {"must not decrease": [offs.flip(0), huge, -offs - 1], "must end at the": [offs.clamp(max=len(slot_of) - 1)]}
    if rank == 0:  # only rank 0 calls: it must raise before it sends anything, or this would wait for the other ranks forever
        for words, all_ends in wrong.items():
            for ends in all_ends:
                call = lambda ends=ends: parallel.experts(
                    x, ends, slot_of=slot_of, row_of=row_of, top_k=TOP_K, weights=routing.weights
                )
                error = error_of(call)
                assert isinstance(error, ValueError) and words in str(error), (words, error)
        none = lambda: parallel.experts(x, offs, slot_of=slot_of[:0], row_of=row_of[:0], top_k=0, weights=routing.weights[:, :0])
        assert "weights must have at least one column" in str(error_of(none))


@case
def wrong_settings_are_refused(rank, size):
    refused = {
        "multiple of the": (EXPERTS + 1, {}),
        "wire must be fp8 or unquantized": (EXPERTS, {"wire": "bf16"}),
        "wire fp8 takes recipes": (EXPERTS, {"wire": "fp8", "recipe": "bf16"}),
        "wire fp8 takes": (EXPERTS, {"wire": "fp8", "recipe": "mxfp8_rceil_wgrad_with_hp"}),
        "dtype must be torch.bfloat16 or torch.float32 over a group": (EXPERTS, {"dtype": torch.float64, "recipe": "identity"}),
        "collect_stats must be False over a group": (EXPERTS, {"collect_stats": True}),
    }
    for words, (experts, kwargs) in refused.items():
        if experts % size == 0 and experts != EXPERTS:
            continue
        error = error_of(
            lambda experts=experts, kwargs=kwargs: moxie.nn.MoE(DIM, HIDDEN, experts, TOP_K, ep_group=dist.group.WORLD, **kwargs)
        )
        assert isinstance(error, ValueError) and words in str(error), (words, error)
    error = error_of(lambda: moxie.nn.MoE(DIM, HIDDEN, EXPERTS, TOP_K, ep_group="world"))
    assert isinstance(error, TypeError) and "ep_group" in str(error), error
    error = error_of(lambda: moxie.nn.MoE(DIM, HIDDEN, EXPERTS, TOP_K, wire="fp8"))
    assert isinstance(error, ValueError) and "ep_group" in str(error), error


# ---- the router --------------------------------------------------------------------------------------------------------------


@case
def losses_and_biases_are_those_of_all_tokens(rank, size):
    counts = [TOKENS + 7 * i for i in range(size)]
    mine, total = shares(rank, size, counts)
    for options in (
        {"balance": "loss", "z_loss_weight": 1e-2},
        {"balance": "loss", "score": "sigmoid", "loss_weight": 0.5},
        {"z_loss_weight": 1.0},
    ):
        local, parallel = layers(size, dist.group.WORLD, dtype=torch.float32, **options)
        torch.manual_seed(6)
        x = inputs("normal", total, torch.float32)
        for layer, tokens in ((local, x), (parallel, x[mine])):
            layer(tokens)
            layer.loss.backward()
        assert abs(parallel.loss.item() / local.loss.item() - 1) < 1e-6, options
        everyone = [torch.zeros(()) for _ in range(size)]
        dist.all_gather(everyone, parallel.loss.detach())
        assert all(torch.equal(loss, parallel.loss) for loss in everyone), "one number on all ranks"
        gate = summed(parallel.router.gate.weight.grad)
        assert decibels(gate, local.router.gate.weight.grad) >= 90, options
    local, parallel = layers(size, dist.group.WORLD, dtype=torch.float32, score="sigmoid", balance="bias", bias_rate=0.1)
    for seed in range(3):
        torch.manual_seed(seed)
        x = inputs("normal", total, torch.float32)
        local(x)
        parallel(x[mine])
        local.router.update_bias_()
        parallel.router.update_bias_()
        assert torch.equal(local.router.bias, parallel.router.bias)
        assert parallel.router.load.count_nonzero() == 0


# ---- the layer as a module ---------------------------------------------------------------------------------------------------


@case
def the_state_dict_has_the_names_of_the_local_layer_and_local_experts(rank, size):
    local, parallel = layers(size, dist.group.WORLD, shared_hidden_dim=64, balance="bias", score="sigmoid", bias=True)
    whole, part = local.state_dict(), parallel.state_dict()
    assert list(whole) == list(part)
    experts = EXPERTS // size
    for name, value in part.items():
        expected = whole[name]
        if name in ("experts.w13", "experts.w2", "experts.b13", "experts.b2"):
            expected = expected[rank * experts : (rank + 1) * experts]
        assert torch.equal(value, expected), name
    file = io.BytesIO()
    torch.save(parallel, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    x = inputs("normal", TOKENS, torch.bfloat16)
    assert torch.equal(again(x), parallel(x))


@case
def options_of_the_layer_keep_their_meaning(rank, size):
    mine, total = shares(rank, size)
    for options in (
        {"weight_cache": True},
        {"keep": "h_fp8"},
        {"shared_hidden_dim": 64},
        {"recipe": "fp8_rowwise"},
        {"recipe": "mxfp8_rceil_wgrad_with_hp"},
        {"recipe": "mxfp8_rceil_32x32", "weight_cache": True},
        {"activation": "clamped_swiglu", "bias": True, "w13_layout": "interleaved", "transposed": True},
        {"recipe": "mxfp8_rceil", "bias": True, "keep": "h_fp8", "wire": "unquantized"},
        {"recipe": "bf16", "bias": True, "w13_layout": "interleaved"},
        {"activation": "clamped_swiglu", "transposed": True, "weight_cache": True},
    ):
        local, parallel = layers(size, dist.group.WORLD, **options)
        torch.manual_seed(7)
        x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
        compare(rank, size, local, parallel, x, dy, mine=mine, wire=parallel.experts.wire)


@case
def biases_in_f32_have_the_gradients_of_one_process(rank, size):
    local, parallel = layers(size, dist.group.WORLD, torch.float32, bias=True, score="sigmoid")
    mine, total = shares(rank, size)
    torch.manual_seed(12)
    x, dy = inputs("normal", total, torch.float32), inputs("normal", total, torch.float32)
    compare(rank, size, local, parallel, x, dy, mine=mine, wire="fp8", gate_db=90.0)


@case
def a_rank_may_freeze_biases_that_others_train(rank, size):
    local, parallel = layers(size, dist.group.WORLD, bias=True)
    if rank == size - 1:
        parallel.experts.b2.requires_grad_(False)
    mine, total = shares(rank, size)
    torch.manual_seed(13)
    x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
    _, dx = step(local, x, dy)
    _, dx_mine = step(parallel, x[mine], dy[mine])
    assert torch.equal(dx_mine, dx[mine])
    assert (parallel.experts.b2.grad is None) == (rank == size - 1)


@case
def main_gradients_are_those_of_one_process(rank, size):
    experts = EXPERTS // size
    of_rank = slice(rank * experts, (rank + 1) * experts)
    mine, total = shares(rank, size)
    for options in ({}, {"w13_layout": "interleaved"}, {"transposed": True}):
        local, parallel = layers(size, dist.group.WORLD, main_grad=True, wire="unquantized", **options)
        for layer in (local, parallel):
            for weight in (layer.experts.w13, layer.experts.w2):
                weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
        torch.manual_seed(14)
        x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
        _, dx = step(local, x, dy)
        _, dx_mine = step(parallel, x[mine], dy[mine])
        assert torch.equal(dx_mine, dx[mine])
        for name in ("w13", "w2"):
            whole, own = getattr(local.experts, name), getattr(parallel.experts, name)
            assert own.grad is None and torch.equal(own.main_grad, whole.main_grad[of_rank]), (name, options)


@case
def autocast_gives_the_bits_of_one_process(rank, size):
    local, parallel = layers(size, dist.group.WORLD, dtype=torch.float32)
    mine, total = shares(rank, size)
    torch.manual_seed(8)
    x, dy = inputs("normal", total, torch.float32), inputs("normal", total, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx = step(local, x, dy)
        y_mine, dx_mine = step(parallel, x[mine], dy[mine])
    assert y_mine.dtype == y.dtype == torch.bfloat16
    assert torch.equal(y_mine, y[mine]) and torch.equal(dx_mine, dx[mine])


@case
def a_checkpointed_layer_gives_the_same_bits(rank, size):
    local, parallel = layers(size, dist.group.WORLD)
    mine, total = shares(rank, size)
    torch.manual_seed(9)
    x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
    _, dx = step(local, x, dy)
    _, dx_mine = step(lambda own: checkpoint(parallel, own, use_reentrant=False), x[mine], dy[mine])
    assert torch.equal(dx_mine, dx[mine])


@case
def a_mesh_dimension_is_a_group(rank, size):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "ep"))
    local, parallel = layers(size, mesh["ep"])
    mine, total = shares(rank, size)
    torch.manual_seed(10)
    x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
    compare(rank, size, local, parallel, x, dy, mine=mine, wire="fp8")
    error = error_of(lambda: moxie.nn.MoE(DIM, HIDDEN, EXPERTS, TOP_K, ep_group=mesh))
    assert isinstance(error, ValueError) and "one dimension" in str(error), error


@case
def received_tokens_are_kept_once_and_in_fp8(rank, size):
    _, parallel = layers(size, dist.group.WORLD, recipe="mxfp8_rceil_128", weight_cache=True)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    x = inputs("normal", TOKENS, torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        parallel(x)
    in_fp8 = [tensor for tensor in kept if tensor.dtype == torch.float8_e4m3fn and tensor.dim() == 2 and tensor.shape[1] == DIM]
    h = [tensor for tensor in kept if tensor.dtype == torch.bfloat16 and tensor.shape[-1] == 2 * HIDDEN]
    assert len(in_fp8) == 1 and len(h) == 1
    assert in_fp8[0].shape[0] <= min(h[0].shape[0], TOKENS * size), "once for each token"
    wide = [tensor for tensor in kept if tensor.dtype == torch.bfloat16 and tensor.shape[-1] == DIM and tensor is not x]
    assert all(tensor.shape[0] in (TOKENS, EXPERTS) for tensor in wide), [tensor.shape for tensor in wide]


@case
def a_compiled_layer_gives_the_same_bits(rank, size):
    if size != 2:  # tracing takes seconds, and one number of ranks is enough
        return
    local, parallel = layers(size, dist.group.WORLD, balance="loss")
    mine, total = shares(rank, size)
    torch.manual_seed(11)
    x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
    y, dx = step(local, x, dy)
    y_mine, dx_mine = step(torch.compile(parallel, backend="aot_eager"), x[mine], dy[mine])
    assert torch.equal(y_mine, y[mine]) and torch.equal(dx_mine, dx[mine])


# ---- bytes -------------------------------------------------------------------------------------------------------------------


class Counted(dist.ProcessGroup):
    """Forwards all-to-alls to `inner` and appends to `sent` how many bytes each of them sends to each rank."""

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        self.inner, self.sent = inner, []

    def getBackendName(self):
        return "counted"

    def _note(self, tensor, splits):
        row = tensor.numel() // max(tensor.shape[0], 1) * tensor.element_size() if tensor.shape[0] else 0
        self.sent.append([count * row for count in splits])

    def alltoall_base(self, output, tensor, output_splits, input_splits, options):
        self._note(tensor, input_splits)
        return self.inner.alltoall_base(output, tensor, output_splits, input_splits, options)

    def all_to_all_single(self, output, tensor, output_splits, input_splits, options):
        self._note(tensor, input_splits)
        return self.inner.all_to_all_single(output, tensor, output_splits, input_splits, options)


def count_bytes(group, layer, x, dy):
    """Runs a step. Returns the bytes sent to each rank in each exchange: counts of rows, x, y, dy and dx."""
    counted = Counted(group)
    name = f"counted.{len(COUNTED)}"
    COUNTED.append(counted)
    torch._C._distributed_c10d._register_process_group(name, counted)
    member = layer.experts.member
    layer.experts.member = dataclasses.replace(member, name=name)
    step(layer, x, dy)
    layer.experts.member = member
    torch._C._distributed_c10d._unregister_process_group(name)
    assert counted.sent[0] == [4] * group.size(), "the number of experts"
    return counted.sent[1:]


COUNTED: list = []


def round16(count: int) -> int:
    return -(-count // 16) * 16


def expected_bytes(ids, size, dim, block, element, experts):
    """Computes the bytes that docs/EXPERT_PARALLEL.md predicts for one rank, whose tokens go to the experts `ids` [T, k]."""
    ranks_of = ids.long() // (experts // size)
    tokens = [int((ranks_of == rank).any(1).sum()) for rank in range(size)]
    pairs = [int((ranks_of == rank).sum()) for rank in range(size)]
    row = round16(dim + -(-dim // block)) if block else round16(dim * element)
    back = round16(dim * element)
    counts = [4 * (experts // size + 3)] * size
    x = [t * row + p * 8 for t, p in zip(tokens, pairs)]
    return counts, x, [p * back for p in pairs], [t * row for t in tokens], [p * (back + 4) for p in pairs], tokens


@case
def bytes_on_the_wire_are_those_of_the_formula(rank, size):
    for recipe, wires in WIRES.items():
        block = {"mxfp8_rceil": 32, "mxfp8_rceil_128": 128}.get(recipe, 0)
        for wire in wires:
            for dtype in (torch.bfloat16, torch.float32):
                _, parallel = layers(size, dist.group.WORLD, dtype=dtype, recipe=recipe, wire=wire)
                torch.manual_seed(20 + rank)
                x, dy = inputs("normal", TOKENS, dtype), inputs("normal", TOKENS, dtype)
                sent = count_bytes(dist.group.WORLD, parallel, x, dy)
                ids = parallel.router(x).ids
                counts, of_x, _, of_dy, _, _ = expected_bytes(
                    ids, size, DIM, block if wire == "fp8" else 0, dtype.itemsize, EXPERTS
                )
                assert sent[0] == counts and sent[1] == of_x and sent[3] == of_dy, (recipe, wire, sent)
                # y (2) and dx (4) travel back from the experts' ranks, so what this rank gets is in the other ranks' lists.
                for leg, of in ((2, 2), (4, 4)):
                    everyone = [None] * size
                    dist.all_gather_object(everyone, sent[leg])
                    back = expected_bytes(ids, size, DIM, 0, dtype.itemsize, EXPERTS)[of]
                    assert [other[rank] for other in everyone] == back, (recipe, wire, leg)


@case
def a_wide_layer_sends_as_little_as_it_should(rank, size):
    if size != 4:
        return
    dim, experts, tokens = 7168, 256, 24
    for top_k, most in ((1, 0.76), (8, 0.62)):
        torch.manual_seed(30)
        layer = moxie.nn.MoE(dim, 32, experts, top_k, recipe="mxfp8_rceil", dtype=torch.bfloat16, ep_group=dist.group.WORLD)
        layer.experts.requires_grad_(False)
        torch.manual_seed(31 + rank)
        x, dy = torch.randn(tokens, dim).bfloat16(), torch.randn(tokens, dim).bfloat16()
        sent = count_bytes(dist.group.WORLD, layer, x, dy)
        ids = layer.router(x).ids
        *_, unique = expected_bytes(ids, size, dim, 32, 2, experts)
        assert sum(sent[3]) == sum(unique) * 7392, "rows are unique pairs of token and rank"
        assert 7392 / (2 * dim) <= 0.525
        total = summed(torch.tensor(float(sum(sum(leg) for leg in sent[1:])))).item()
        plain = 4 * size * tokens * top_k * 2 * dim
        print(f"top {top_k}: {total / plain:.4f} of bf16's bytes", flush=True)
        assert total / plain <= most, (top_k, total / plain)
