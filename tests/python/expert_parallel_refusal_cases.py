"""Cases of test_expert_parallel.py: layers and calls that are refused, on every rank alike or before anything is sent."""

import torch
import torch.distributed as dist

import moxie
import moxie.nn
from expert_parallel_layers import DIM, EXPERTS, HIDDEN, TOKENS, TOP_K, cases_of, error_of, inputs, layers

NAMES, case = cases_of(globals())


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


@case
def a_wrong_route_is_refused_before_anything_is_sent(rank, size):
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
        for name in ("slot_of", "row_of"):
            for number in (-1, len(slot_of)):
                route = {"slot_of": slot_of.clone(), "row_of": row_of.clone()}
                route[name][3] = number
                error = error_of(lambda route=route: parallel.experts(x, offs, **route, top_k=TOP_K, weights=routing.weights))
                assert isinstance(error, ValueError), error
                assert f"{name} must be 0 to {len(slot_of) - 1}, got {number} at 3" in str(error), error
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
