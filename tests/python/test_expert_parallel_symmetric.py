"""The op of the symmetric engine, expert_mlp.symmetric, with ranks that are threads and share the memory of a CPU."""

import time

import pytest
import torch

import symmetric_ranks
from moxie.symmetric import Sizes, Symmetric, limits_of
from symmetric_ranks import Ranks, b2_gradient_by_rank, one_process, problem, share_of_experts, step, with_rounded_tokens
from wire_reference import FLOOR, decibels

TOKENS = 20  # of each rank
WIRES = [
    ("bf16", "unquantized"),
    ("mxfp8_rceil", "fp8"),
    ("mxfp8_rceil", "unquantized"),
    ("mxfp8_rceil_128", "fp8"),
    ("mxfp8_rceil_128", "unquantized"),
]


def ranks_for(size: int, of, *, wire: str, rows: int | None = None, **options) -> Ranks:
    total = of.x.shape[0]
    return Ranks(size, of, wire=wire, rows=rows or max(1, total * of.top_k), tokens=max(1, total), **options)


def compare(of, size, wire, results, counts, expected=None):
    expected = expected or one_process(of)
    rounded = one_process(with_rounded_tokens(of)) if wire == "fp8" else expected
    first = 0
    for rank, grads in enumerate(results):
        if isinstance(grads, Exception):
            raise grads
        mine, experts = slice(first, first + counts[rank]), symmetric_ranks.share_of_experts(of, size, rank)
        first += counts[rank]
        for name in ("y", "x", "weights"):
            assert torch.equal(getattr(grads, name), getattr(expected, name)[mine]), f"{name} differs on rank {rank}"
        for name in ("w13", "w2"):
            actual, wanted = getattr(grads, name), getattr(expected, name)[experts]
            assert torch.equal(actual, getattr(rounded, name)[experts]), f"d{name} differs on rank {rank}"
            assert decibels(actual, wanted) >= FLOOR["normal"], f"d{name}: {decibels(actual, wanted)} dB on rank {rank}"
        if of.b2 is not None:
            assert torch.equal(grads.b13, expected.b13[experts]), f"db13 differs on rank {rank}"
            assert torch.equal(grads.b2, b2_gradient_by_rank(of, counts)[experts]), f"db2 differs on rank {rank}"


@pytest.mark.parametrize(("recipe", "wire"), WIRES)
@pytest.mark.parametrize("size", (1, 2, 4))
@pytest.mark.parametrize("skewed", (False, True), ids=("even", "skewed"))
def test_the_bits_are_those_of_one_process(recipe, wire, size, skewed):
    torch.manual_seed(0)
    of = problem(TOKENS * size, recipe=recipe, skewed=skewed)
    ranks, counts = ranks_for(size, of, wire=wire), [TOKENS] * size
    compare(of, size, wire, ranks.run(lambda rank: step(ranks, of, counts, rank)), counts)


@pytest.mark.parametrize("size", (2, 4))
def test_f32_layers_have_the_bits_of_one_process(size):
    torch.manual_seed(0)
    of = problem(TOKENS * size, recipe="mxfp8_rceil", dtype=torch.float32, dim=100, hidden=50, top_k=8)
    ranks, counts = ranks_for(size, of, wire="fp8"), [TOKENS] * size
    compare(of, size, "fp8", ranks.run(lambda rank: step(ranks, of, counts, rank)), counts)


@pytest.mark.parametrize(("recipe", "wire"), WIRES)
@pytest.mark.parametrize("counts", ([20], [20, 20], [3, 0, 40, 17]), ids=str)
def test_biases_have_the_bits_of_one_process(recipe, wire, counts):
    torch.manual_seed(0)
    of = problem(sum(counts), recipe=recipe, bias=True)
    ranks = ranks_for(len(counts), of, wire=wire)
    for _ in range(2):  # the second step writes where peers have read in the first
        compare(of, len(counts), wire, ranks.run(lambda rank: step(ranks, of, counts, rank)), counts)


def test_biases_may_be_f32_where_rows_are_bf16():
    torch.manual_seed(0)
    of, counts = problem(TOKENS * 2, bias=True), [TOKENS] * 2
    of.b13, of.b2 = torch.randn_like(of.b13, dtype=torch.float32), torch.randn_like(of.b2, dtype=torch.float32)
    ranks = ranks_for(2, of, wire="fp8")
    compare(of, 2, "fp8", ranks.run(lambda rank: step(ranks, of, counts, rank)), counts)


def test_a_rank_may_freeze_biases_and_weights_that_others_train():
    torch.manual_seed(0)
    of, counts = problem(TOKENS * 2, bias=True), [TOKENS] * 2
    ranks, expected = ranks_for(2, of, wire="fp8"), one_process(of)

    def body(rank: int):
        mine, experts = slice(rank * TOKENS, (rank + 1) * TOKENS), share_of_experts(of, 2, rank)
        (x,) = symmetric_ranks.leaves(of.x[mine])
        bias = symmetric_ranks.biases(of, experts)
        for tensor in bias.values():
            tensor.requires_grad_(rank == 1)
        y = ranks.call(rank, x, of.w13[experts], of.w2[experts], of.weights[mine], of.ids[mine], of.recipe, **bias)
        y.backward(of.dy[mine])
        return x.grad, bias["b2"].grad

    (first, frozen), (second, db2) = ranks.run(body)
    assert torch.equal(torch.cat([first, second]), expected.x)
    assert frozen is None and torch.equal(db2, b2_gradient_by_rank(of, counts)[share_of_experts(of, 2, 1)])


@pytest.mark.parametrize("counts", ([0, 30], [30, 0], [0, 0, 7, 0]), ids=str)
def test_ranks_without_tokens_take_part(counts):
    torch.manual_seed(0)
    of = problem(sum(counts), recipe="mxfp8_rceil_128")
    ranks = ranks_for(len(counts), of, wire="fp8")
    compare(of, len(counts), "fp8", ranks.run(lambda rank: step(ranks, of, counts, rank)), counts)


def test_layers_share_memory_and_run_forward_before_any_backward():
    torch.manual_seed(0)
    size, layers = 2, [problem(TOKENS * 2, recipe="mxfp8_rceil") for _ in range(3)]
    expected = [one_process(of) for of in layers]
    ranks, counts = ranks_for(size, layers[0], wire="fp8"), [TOKENS] * size

    def body(rank):
        mine, made = slice(rank * TOKENS, (rank + 1) * TOKENS), []
        for of in layers:
            experts = symmetric_ranks.share_of_experts(of, size, rank)
            leaves = symmetric_ranks.leaves(of.x[mine], of.w13[experts], of.w2[experts], of.weights[mine])
            made.append((leaves, ranks.call(rank, *leaves, of.ids[mine], of.recipe)))
        for (_, y), of in reversed(list(zip(made, layers, strict=True))):
            y.backward(of.dy[mine])
        return [symmetric_ranks.Grads(y.detach(), x.grad, weights.grad, w13.grad, w2.grad) for (x, w13, w2, weights), y in made]

    results = ranks.run(body)
    for i, of in enumerate(layers):
        compare(of, size, "fp8", [grads[i] for grads in results], counts, expected[i])


def test_random_steps_with_delays_do_not_hang():
    torch.manual_seed(0)
    size = 2
    ranks = None
    for i in range(40):
        counts = torch.randint(0, 9, (size,)).tolist()
        of = problem(sum(counts), recipe="mxfp8_rceil", dim=32, hidden=32)
        if ranks is None:
            ranks = Ranks(size, of, wire="fp8", rows=8 * size * 3, tokens=8 * size)

        def body(rank, ranks=ranks, of=of, counts=counts, i=i):
            time.sleep((rank * 7 + i) % 5 / 2000)
            return step(ranks, of, counts, rank)

        compare(of, size, "fp8", ranks.run(body), counts)


def test_limits_are_the_even_share_twice_and_never_more_than_the_worst_routing():
    sizes = Sizes(ranks=4, experts=64, dim=128, top_k=8, recipe="bf16", wire="unquantized", dtype=torch.bfloat16, bias=False)
    assert limits_of(Symmetric(), sizes, 1000) == (16000, 4000)
    assert limits_of(Symmetric(max_tokens=500), sizes, 1000) == (8000, 2000)
    assert limits_of(Symmetric(max_rows=300), sizes, 1000) == (300, 300)
    assert limits_of(Symmetric(), sizes, 0) == (16, 0)  # a row for each local expert
    assert limits_of(Symmetric(), sizes._replace(ranks=1), 1000) == (8000, 1000)
    assert limits_of(Symmetric(), sizes._replace(experts=4, top_k=4), 10) == (40, 40)
    for options, words in (({"max_rows": 0}, "max_rows"), ({"max_tokens": -1}, "max_tokens"), ({"timeout": 0}, "timeout")):
        with pytest.raises(ValueError, match=words):
            Symmetric(**options)


# ---- failures ----------------------------------------------------------------------------------------------------------------


def all_nan(grads) -> bool:
    names = ("y", "x", "weights", "w13", "w2") + (() if grads.b2 is None else ("b13", "b2"))
    return all(getattr(grads, name).isnan().all() for name in names)


def errors_of_next_call(ranks, of, counts):
    return ranks.run(lambda rank: step(ranks, of, counts, rank))


@pytest.mark.parametrize("size", (1, 2))
def test_after_a_failure_gradients_of_biases_are_nan(size):
    torch.manual_seed(0)
    of, counts = problem(TOKENS * size, bias=True), [TOKENS] * size
    ranks = ranks_for(size, of, wire="fp8", rows=8)
    assert all(all_nan(grads) for grads in ranks.run(lambda rank: step(ranks, of, counts, rank)))


@pytest.mark.parametrize("wire", ("fp8", "unquantized"))
def test_too_many_rows_are_nan_everywhere_and_an_error_in_the_next_call(wire):
    torch.manual_seed(0)
    size, counts = 4, [TOKENS] * 4
    of = problem(sum(counts), recipe="mxfp8_rceil", skewed=True)  # rank 0 and 1 have the first four experts
    ranks = ranks_for(size, of, wire=wire, rows=100)
    rows = int((of.ids < 2).sum())
    assert rows > 100
    for grads in ranks.run(lambda rank: step(ranks, of, counts, rank)):
        assert all_nan(grads)
    for rank, error in enumerate(errors_of_next_call(ranks, of, counts)):
        assert isinstance(error, RuntimeError), error
        for part in ("expert_mlp", "rank 0", f"{rows} rows", "max_rows is 100", f"rank {rank} of the 4 ranks", "'threads'"):
            assert part in str(error), (part, error)
        with pytest.raises(RuntimeError, match="max_rows is 100"):
            torch.ops.moxie._exchange_check(ranks.status[rank], rank, size, 1, "threads")


def test_more_tokens_than_there_is_room_for_are_an_error():
    torch.manual_seed(0)
    of, counts = problem(TOKENS * 2), [TOKENS] * 2
    ranks = Ranks(2, of, wire="fp8", rows=TOKENS * 6, tokens=10)
    assert all(all_nan(grads) for grads in ranks.run(lambda rank: step(ranks, of, counts, rank)))
    for error in errors_of_next_call(ranks, of, counts):
        assert isinstance(error, RuntimeError) and "room for 10" in str(error), error


def test_a_stalled_rank_is_named_by_the_others_and_nothing_hangs():
    torch.manual_seed(0)
    of, counts = problem(TOKENS * 3, experts=6), [TOKENS] * 3
    ranks = ranks_for(3, of, wire="fp8", timeout_ms=500)
    results = ranks.run(lambda rank: None if rank == 1 else step(ranks, of, counts, rank))
    assert all_nan(results[0]) and all_nan(results[2])
    # The rank that was late: the others have failed.
    late = ranks.run(lambda rank: step(ranks, of, counts, rank))
    assert all_nan(late[1])
    for rank in (0, 2):
        assert isinstance(late[rank], RuntimeError), late[rank]
        assert "the exchange of counts failed" in str(late[rank]) and "no word from rank 1 within 500 ms" in str(late[rank])
    again = errors_of_next_call(ranks, of, counts)[1]
    assert isinstance(again, RuntimeError) and "has failed" in str(again), again


def test_calls_that_differ_are_an_error_on_every_rank():
    torch.manual_seed(0)
    of, counts = problem(TOKENS * 2), [TOKENS] * 2
    ranks = ranks_for(2, of, wire="fp8")
    options = [{"activation": "swiglu"}, {"activation": "clamped_swiglu"}]
    results = ranks.run(lambda rank: step(ranks, of, counts, rank, **options[rank]))
    assert all(all_nan(grads) for grads in results)
    for error in errors_of_next_call(ranks, of, counts):
        assert isinstance(error, RuntimeError) and "rank 1 differs from rank 0" in str(error), error


def test_a_rank_that_leaves_out_backward_is_found_by_the_others():
    torch.manual_seed(0)
    of, counts = problem(TOKENS * 3, experts=6), [TOKENS] * 3
    ranks = ranks_for(3, of, wire="fp8")

    def forward_twice(rank: int) -> list[torch.Tensor]:
        mine, experts = slice(rank * TOKENS, (rank + 1) * TOKENS), share_of_experts(of, 3, rank)
        weights = (of.w13[experts].clone().requires_grad_(), of.w2[experts], of.weights[mine])
        return [ranks.call(rank, of.x[mine], *weights, of.ids[mine], of.recipe).detach() for _ in range(2)]

    results = ranks.run(lambda rank: forward_twice(rank) if rank == 1 else step(ranks, of, counts, rank))
    for rank in (0, 2):
        grads = results[rank]
        assert grads.y.isfinite().all()  # of the forward that all have run
        assert all(getattr(grads, name).isnan().all() for name in ("x", "weights", "w13", "w2"))
    assert results[1][0].isfinite().all() and results[1][1].isnan().all()
    errors = [str(error) for error in errors_of_next_call(ranks, of, counts)]
    assert any("came to the exchange of counts" in error and "was at that of dy" in error for error in errors), errors
    assert all("came to the exchange of" in error or "has failed" in error for error in errors), errors


def test_results_of_the_recipes_dtype_have_room():
    torch.manual_seed(0)
    of, counts = problem(TOKENS * 2, recipe="mxfp8_rceil:out=float32"), [TOKENS] * 2
    ranks = ranks_for(2, of, wire="fp8")
    expected = one_process(of)
    y = torch.cat([grads.y for grads in ranks.run(lambda rank: step(ranks, of, counts, rank))])
    assert y.dtype == expected.y.dtype == torch.float32 and torch.equal(y, expected.y)


def test_bad_calls_are_refused_before_anything_is_sent():
    torch.manual_seed(0)
    of = problem(TOKENS)
    ranks = ranks_for(1, of, wire="fp8")
    with pytest.raises(ValueError, match="b2 of an expert needs 640 bytes, and the shared memory has 0"):
        step(ranks, of, [TOKENS], 0, b2=torch.zeros(of.experts, of.x.shape[1], dtype=of.x.dtype))
    ranks.limits = [of.x.shape[0] * of.top_k + 1, TOKENS]
    with pytest.raises(ValueError, match="limit of rows"):
        step(ranks, of, [TOKENS], 0)
    ranks.limits, ranks.memory = [TOKENS * of.top_k, TOKENS], [ranks.memory[0][:-1]]
    with pytest.raises(ValueError, match="memory must be at least"):
        step(ranks, of, [TOKENS], 0)
    with pytest.raises(ValueError, match="capacity must be"):
        torch.ops.moxie._exchange_bytes(1, [1, 2])
