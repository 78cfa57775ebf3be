"""Recipes: the presets, the text that stands for a recipe, which combinations of fields are legal and why others are refused."""

import dataclasses
import itertools

import pytest
import torch

import moxie
from support import BLOCKS, COLWISE_BLOCKS, ROWWISE_BLOCKS, RULES

# name -> scaling, rule, activations, weights, wgrad_dy, wgrad_x, wgrad_with_hp, kernels
PRESETS = {
    "bf16": ("none", "rceil", "1x32", "1x32", "32x1", "32x1", False, "auto"),
    "fp8_rowwise": ("row", "rceil", "1x32", "1x32", "32x1", "32x1", False, "auto"),
    "mxfp8_rceil": ("block", "rceil", "1x32", "1x32", "32x1", "32x1", False, "auto"),
    "mxfp8_floor": ("block", "floor", "1x32", "1x32", "32x1", "32x1", False, "auto"),
    "mxfp8_rceil_wgrad_with_hp": ("block", "rceil", "1x32", "1x32", "32x1", "32x1", True, "auto"),
    "mxfp8_emulated_rceil": ("block", "rceil", "1x32", "1x32", "32x1", "32x1", False, "emulated"),
    "mxfp8_emulated_floor": ("block", "floor", "1x32", "1x32", "32x1", "32x1", False, "emulated"),
    "mxfp8_emulated_ceil": ("block", "ceil", "1x32", "1x32", "32x1", "32x1", False, "emulated"),
    "mxfp8_emulated_even": ("block", "even", "1x32", "1x32", "32x1", "32x1", False, "emulated"),
    "mxfp8_rceil_32x32": ("block", "rceil", "1x32", "32x32", "32x1", "32x1", False, "auto"),
    "mxfp8_rceil_128": ("block", "rceil", "1x128", "128x128", "128x1", "128x32", False, "auto"),
}


# ---- presets ---------------------------------------------------------------------------------------------------------------


def test_these_are_the_presets():
    assert moxie.recipe_names() == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_what_it_quantizes(name):
    recipe = moxie.Recipe.from_name(name)
    assert dataclasses.astuple(recipe) == (*PRESETS[name], "input", True)


def test_presets_that_are_the_same_recipe_are_equal():
    named = {name: moxie.Recipe.from_name(name) for name in PRESETS}
    assert len(set(named.values())) == len(named), "and no two of them are"
    assert moxie.Recipe() == named["mxfp8_rceil"]
    assert hash(moxie.Recipe(rule="floor")) == hash(named["mxfp8_floor"])


@pytest.mark.parametrize("value", ("false", None, 0))
@pytest.mark.parametrize("name", ("keep_w", "wgrad_with_hp"))
def test_a_flag_of_a_recipe_is_a_bool(name, value):
    with pytest.raises(TypeError, match=f"Recipe: {name} must be True or False, got {value!r}"):
        moxie.Recipe(**{name: value})


def test_a_recipe_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        moxie.Recipe().rule = "floor"
    assert dataclasses.replace(moxie.Recipe(), rule="floor") == moxie.Recipe.from_name("mxfp8_floor")


# ---- text ------------------------------------------------------------------------------------------------------------------


def all_legal():
    pairs = [pair for pair in itertools.product(COLWISE_BLOCKS, repeat=2) if pair[0].split("x")[0] == pair[1].split("x")[0]]
    for rule, activations, weights, (dy, x) in itertools.product(RULES, ("1x32", "1x128"), ROWWISE_BLOCKS, pairs):
        yield {"rule": rule, "activations": activations, "weights": weights, "wgrad_dy": dy, "wgrad_x": x}
    for hp, kernels, out in itertools.product((False, True), ("auto", "emulated"), ("input", "bfloat16", "float32")):
        ends = {"kernels": kernels, "out": out}
        yield from ({"wgrad_with_hp": hp, **ends}, {"scaling": "row", "wgrad_with_hp": hp, **ends})
        if not hp:
            yield {"scaling": "none", **ends}
    yield from ({"scaling": scaling, "keep_w": False} for scaling in ("none", "row", "block"))


def test_every_legal_recipe_survives_its_text():
    fields = list(all_legal())
    assert len(fields) == 4 * 2 * 5 * 13 + 12 + 12 + 6 + 3
    for chosen in fields:
        recipe = moxie.Recipe(**chosen)
        assert moxie.Recipe.from_name(str(recipe)) == recipe
        for name, value in chosen.items():
            assert getattr(recipe, name) == value


@pytest.mark.parametrize(
    "text, same",
    (
        ("mxfp8_rceil:rule=floor", "mxfp8_floor"),
        ("mxfp8_rceil:weights=32x32", "mxfp8_rceil_32x32"),
        ("mxfp8_floor:rule=rceil,kernels=emulated", "mxfp8_emulated_rceil"),
        ("mxfp8_rceil_128:activations=1x32,weights=1x32,wgrad_dy=32x1,wgrad_x=32x1", "mxfp8_rceil"),
        ("mxfp8_rceil:rule=even,rule=floor", "mxfp8_floor"),
        ("mxfp8_rceil:wgrad_with_hp=true", "mxfp8_rceil_wgrad_with_hp"),
        ("mxfp8_rceil:", "mxfp8_rceil"),
        ("mxfp8_rceil:keep_w=false,keep_w=true", "mxfp8_rceil"),
    ),
)
def test_fields_after_a_name_change_it(text, same):
    assert moxie.Recipe.from_name(text) == moxie.Recipe.from_name(same)


def test_an_op_takes_a_name_and_a_recipe_alike(device):
    x, w = torch.randn(10, 64, device=device), torch.randn(1, 32, 64, device=device)
    for name in PRESETS:
        by_name = moxie.grouped_mm(x, w, recipe=name)
        assert torch.equal(moxie.grouped_mm(x, w, recipe=moxie.Recipe.from_name(name)), by_name), name
    assert torch.equal(moxie.grouped_mm(x, w), moxie.grouped_mm(x, w, recipe="mxfp8_rceil_128")), "the default"


def test_the_recipe_of_tests_is_not_among_the_names(device):
    assert "identity" not in moxie.recipe_names()
    x, w = torch.randn(10, 7, device=device), torch.randn(1, 3, 7, device=device)
    torch.testing.assert_close(moxie.grouped_mm(x, w, recipe="identity"), x @ w[0].T)


# ---- what is refused -------------------------------------------------------------------------------------------------------


BAD_TEXTS = [
    ("", "there is no recipe ''; there are bf16, fp8_rowwise, mxfp8_rceil,"),
    ("mxfp9", "there is no recipe 'mxfp9'; there are bf16,"),
    ("MXFP8_RCEIL", "there is no recipe 'MXFP8_RCEIL'"),
    ("mxfp8_rceil:rule", "fields are written name=value, got 'rule'"),
    ("mxfp8_rceil:colour=red", "a recipe has no field 'colour'; there are rule, activations,"),
    ("mxfp8_rceil:keep_w=no", "recipe field keep_w must be true or false, got 'no'"),
    ("mxfp8_rceil:rule=round", "rule must be one of rceil, floor, ceil, even, got 'round'"),
    ("mxfp8_rceil:weights=64x64", "recipe field weights must be one of 1x32,", "got '64x64'"),
    ("mxfp8_rceil:activations=32x32", "activations must be one row tall (1x32 or 1x128)", "got 32x32"),
    ("mxfp8_rceil:activations=32x1", "activations must be one row tall", "got 32x1"),
    ("mxfp8_rceil:weights=32x1", "weights must span at least 32 columns, which forward contracts, got 32x1"),
    ("mxfp8_rceil:wgrad_x=1x32", "wgrad_x must span at least 32 rows, which wgrad contracts, got 1x32"),
    ("mxfp8_rceil:wgrad_dy=1x128", "wgrad_dy must span at least 32 rows", "got 1x128"),
    ("mxfp8_rceil:wgrad_x=128x1", "wgrad_dy and wgrad_x must have as many rows", "got 32x1 and 128x1"),
    ("mxfp8_rceil:wgrad_with_hp=yes", "wgrad_with_hp must be true or false, got 'yes'"),
    ("mxfp8_rceil:kernels=fast", "kernels must be auto or emulated, got 'fast'"),
    ("mxfp8_rceil:out=float16", "out must be bfloat16, float32 or input, got 'float16'"),
    ("bf16:rule=floor", "this recipe has no blocks, so rule"),
    ("fp8_rowwise:weights=32x32", "this recipe has no blocks, so rule, activations, weights"),
    ("bf16:wgrad_with_hp=true", "this recipe quantizes nothing, so wgrad_with_hp cannot be set"),
]


@pytest.mark.parametrize("text, parts", [pytest.param(case[0], case[1:], id=case[0]) for case in BAD_TEXTS])
def test_an_illegal_recipe_is_refused_with_the_reason(text, parts):
    x, w = torch.zeros(4, 32), torch.zeros(1, 8, 32)
    calls = {
        "recipe": lambda: moxie.Recipe.from_name(text),
        "grouped_mm": lambda: moxie.grouped_mm(x, w, recipe=text),
        "expert_mlp": lambda: moxie.expert_mlp(x, w, w[:, :4, :4], recipe=text),
        "quantize_weights": lambda: moxie.quantize_weights(w, recipe=text),
    }
    for op, call in calls.items():
        with pytest.raises(ValueError) as caught:
            call()
        message = str(caught.value)
        assert message.startswith(f"{op}: "), message
        for part in parts:
            assert part in message


def test_every_combination_of_blocks_is_either_legal_or_refused():
    legal = refused = 0
    for activations, weights, dy, x in itertools.product(BLOCKS, repeat=4):
        allowed = (
            activations.startswith("1x")
            and weights in ROWWISE_BLOCKS
            and dy in COLWISE_BLOCKS
            and x in COLWISE_BLOCKS
            and dy.split("x")[0] == x.split("x")[0]
        )
        try:
            moxie.Recipe(activations=activations, weights=weights, wgrad_dy=dy, wgrad_x=x)
            assert allowed
            legal += 1
        except ValueError:
            assert not allowed
            refused += 1
    assert (legal, legal + refused) == (2 * 5 * 13, 7**4)


@pytest.mark.parametrize(
    "fields, part",
    (
        ({"scaling": "tensor"}, "scaling must be none, row or block, got 'tensor'"),
        ({"scaling": "none", "rule": "floor"}, "this recipe has no blocks"),
        ({"scaling": "row", "weights": "32x32"}, "this recipe has no blocks"),
        ({"scaling": "none", "wgrad_with_hp": True}, "this recipe quantizes nothing"),
        ({"rule": "rule=floor,weights=32x32"}, "rule must be one of"),
        ({"rule": None}, "rule must be one of"),
        ({"kernels": "fast"}, "kernels must be auto or emulated"),
    ),
    ids=str,
)
def test_illegal_fields_are_refused_with_the_reason(fields, part):
    with pytest.raises(ValueError, match=part):
        moxie.Recipe(**fields)


# ---- kernels that explain gives for each pass ----------------------------------------------------------------------------------


def kernels(recipe: str, device: str = "cpu", n: int = 64, k: int = 64) -> list[str]:
    told = moxie.explain(recipe, n, k, rows=100, groups=4, device=device)
    return [told.forward.kernel, told.dgrad.kernel, told.wgrad.kernel]


@pytest.mark.parametrize("name", PRESETS)
def test_a_kernel_other_than_the_fastest_comes_with_the_reason(name, device):
    told = moxie.explain(name, 64, 64, rows=100, groups=4, device=device)
    for one in (told.forward, told.dgrad, told.wgrad):
        assert bool(one.reason) == (one.kernel not in ("sm90", "sm90_rows", "sm100"))


def test_on_a_cpu_everything_is_decoded_and_says_why():
    for name in PRESETS:
        decoded = "mm" if name == "bf16" else "decode, mm"
        wgrad = "mm" if name == "mxfp8_rceil_wgrad_with_hp" else decoded
        assert kernels(name) == [decoded, decoded, wgrad]
    reason = lambda name: moxie.explain(name, 64, 64, device="cpu").forward.reason
    assert reason("mxfp8_rceil") == reason("fp8_rowwise") == "a CPU has no FP8 product"
    assert reason("bf16") == "the recipe quantizes nothing"
    assert reason("mxfp8_emulated_rceil") == "the recipe asks for it"


def test_a_gpu_that_is_not_here_can_be_pretended_by_name_alone():
    with pytest.raises(ValueError, match="pretend_gpu: there are sm90, sm100 and other, got 'sm70'"):
        torch.ops.moxie._pretend_gpu("sm70")
    try:
        torch.ops.moxie._pretend_gpu("sm100")
        assert kernels("mxfp8_rceil") == ["sm100"] * 3
        assert kernels("mxfp8_emulated_rceil") == kernels("fp8_rowwise") == ["decode, mm"] * 3
        torch.ops.moxie._pretend_gpu("sm90")
        assert kernels("fp8_rowwise") == ["sm90_rows"] * 3 and kernels("mxfp8_rceil_128") == ["sm90"] * 3
        assert kernels("fp8_rowwise:kernels=emulated") == kernels("mxfp8_rceil") == ["decode, mm"] * 3
    finally:
        torch.ops.moxie._pretend_gpu("")
    assert kernels("mxfp8_rceil") == ["decode, mm"] * 3


@pytest.mark.parametrize("bad", ({"n": -1}, {"k": -2}, {"rows": -3}, {"groups": -4}), ids=str)
def test_explain_refuses_sizes_that_are_none(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"explain: {name} must be [01] to .*, got {value}"):
        moxie.explain("bf16", **{"n": 8, "k": 8, "device": "cpu", **bad})


def test_explain_prints_a_line_for_each_pass_and_the_bytes():
    lines = str(moxie.explain("mxfp8_rceil", 64, 96, rows=100, groups=4, device="cpu")).splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == ["forward", "dgrad", "wgrad", "kept for backward"]
    assert moxie.explain("mxfp8_rceil", 64, 96, rows=100, needs_dx=False, needs_dw=False, device="cpu").x_bytes == 0
