"""Mistakes in converting a model: the exception names the rule and the value, and says what to write instead."""

import warnings

import pytest
import torch
from torch import nn

import moxie
from moe_models import TitanExperts, make
from moxie.torchao_compat import _quantize_then_scaled_grouped_mm, _to_mxfp8_then_scaled_grouped_mm, generate_jagged_offs

GROUPED, LINEAR = moxie.MXFP8GroupedMMConfig(), moxie.MXLinearConfig()
X, W = torch.randn(8, 64), torch.randn(2, 32, 64)
OFFS = torch.tensor([3, 8], dtype=torch.int32)
QDATA, SCALE = moxie.quantize_rowwise(X)


def by_name(keys: dict):
    return lambda: moxie.quantize_(make(), moxie.FqnToConfig(keys))


def mx(qdata=QDATA, scale=SCALE, dtype=torch.bfloat16, **kwargs):
    return moxie.MXTensor.from_qdata_and_scales(qdata, scale, dtype, **kwargs)


def sharded():
    class Sharded(torch.Tensor):
        pass

    model = nn.Module()
    model.w = nn.Parameter(torch.randn(2, 32, 64).as_subclass(Sharded))
    moxie.quantize_(model, GROUPED)


class Twice(nn.Module):
    """A module under two names."""

    def __init__(self):
        super().__init__()
        self.first = self.second = TitanExperts()


def matrix():
    model = nn.Module()
    model.table = nn.Parameter(torch.randn(32, 64))
    moxie.quantize_(model, moxie.FqnToConfig({"table": moxie.MXFP8GroupedMMConfig(weight_cache=True)}))


def taken():
    experts = TitanExperts()
    experts.w1_cache = {}
    moxie.quantize_(experts, moxie.MXFP8GroupedMMConfig(weight_cache=True))


class Conv1D(nn.Module):
    """A linear layer as in transformers, with a weight [in, out]."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(64, 96)), nn.Parameter(torch.randn(96))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class OfConv1D(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = Conv1D()

    def forward(self, x):
        return self.c_attn(x)


# fmt: off
CASES = {
    # Keys that match no name, or nothing that can be converted.
    "a typo in a name": (by_name({"layers.0.moe.expert.w1": GROUPED}), ValueError,
                         "key 'layers.0.moe.expert.w1' matches no module and no parameter of the model (did you mean "
                         "layers.0.moe.experts.w1"),
    "a typo in a pattern": (by_name({"re:.*xperts\\.w9": GROUPED}), ValueError, "key 're:.*xperts\\\\.w9' matches no module"),
    "a pattern that matches a part": (by_name({"re:experts": GROUPED}), ValueError, "did you mean layers.0.moe.experts"),
    "a typo beside a good key": (by_name({"re:.*experts.*": GROUPED, "re:.*atention.*": LINEAR}), ValueError, "atention"),
    "a key for None that matches nothing": (by_name({"re:.*experts.*": GROUPED, "lm_head": None}), ValueError, "'lm_head'"),
    "a layer with nothing to convert": (by_name({"layers.0.norm1": GROUPED}), ValueError,
                                        "'layers.0.norm1' matches layers.0.norm1, where there is no nn.Linear and no 3D"),
    "a config for linears on experts": (by_name({"layers.0.moe.experts.w1": LINEAR}), TypeError,
                                        "layers.0.moe.experts.w1 is a parameter of experts, and MXLinearConfig is for nn.Linear"),
    "a config for linears where there are experts only": (by_name({"layers.0.moe.experts": LINEAR}), ValueError,
                                                         "'layers.0.moe.experts' converts nothing: MXLinearConfig suits nothing"),
    "one weight of our own experts": (
        lambda: moxie.quantize_(moxie.nn.GroupedExperts(64, 32, 2), moxie.FqnToConfig({"w2": "mxfp8_rceil"})), ValueError,
        "key 'w2' is one weight of a GroupedExperts, which has one recipe for both"),
    "a pattern that is none": (by_name({"re:(": GROUPED}), ValueError, "'re:(' is no regular expression"),
    "a key that is no name": (by_name({3: GROUPED}), TypeError, "a key must be a name or re:pattern, got 3"),
    "no keys": (by_name({}), ValueError, "there are no keys"),
    "keys and a filter": (lambda: moxie.quantize_(make(), moxie.FqnToConfig({"output": LINEAR}), lambda module, fqn: True),
                          ValueError, "with an FqnToConfig filter_fn must be None"),
    "two mappings that differ": (lambda: moxie.FqnToConfig({"a": GROUPED}, {"b": GROUPED}), ValueError,
                                 "are both given and differ"),
    "a filter that accepts nothing": (lambda: moxie.quantize_(make(), GROUPED, lambda module, fqn: "expert_s" in fqn), ValueError,
                                      "nothing to convert: the model has 11 linears and 3D parameters, and none of them is "
                                      "chosen (layers.0.attention.wq: filter_fn says no"),
    "a filter that is a name": (lambda: moxie.quantize_(make(), GROUPED, "experts"), TypeError,
                                "filter_fn must be a function of a module and its name, got 'experts'"),
    "a model without linears": (lambda: moxie.quantize_(nn.ReLU(), "mxfp8_rceil"), ValueError, "the model has 0 linears"),
    "a linear that its owner multiplies by": (
        lambda: moxie.quantize_(nn.ModuleDict({"a": nn.MultiheadAttention(64, 4)}), moxie.FqnToConfig({"a.out_proj": LINEAR})),
        TypeError, "a.out_proj cannot be converted: NonDynamicallyQuantizableLinear is multiplied by its owner"),
    "a state dict for a model": (lambda: moxie.quantize_(make().state_dict(), GROUPED), TypeError,
                                 "model must be an nn.Module, got OrderedDict"),
    "nothing but None": (by_name({"output": None}), ValueError,
                         "every key says None; '_default' is the key of all that no other matches"),
    "the second name of a module": (lambda: moxie.quantize_(Twice(), moxie.FqnToConfig({"second.w1": GROUPED})), ValueError,
                                    "key 'second.w1' is of a module with two names; its first is 'first'"),
    "a filter for the module around": (lambda: moxie.quantize_(make(), GROUPED, lambda module, fqn: fqn == "layers.0.moe"),
                                       ValueError, "filter_fn chooses layers.0.moe, and is asked about the modules inside that "
                                       "hold the weights"),
    "one pattern to skip": (lambda: moxie.quantize_(make(), LINEAR, skip="output"), TypeError,
                            "skip must be a list of patterns, got 'output'; a list of one is ['output']"),
    "a part of a name to skip": (lambda: moxie.quantize_(make(), LINEAR, skip=["wq"]), ValueError,
                                 "'wq' in skip matches the whole name of no linear (did you mean layers.0.attention.wq?)"),
    "experts to skip": (lambda: moxie.quantize_(make(), LINEAR, skip=[".*w1"]), ValueError,
                        "an FqnToConfig leaves parameters of experts alone"),
    "a pattern to skip that is none": (lambda: moxie.quantize_(make(), LINEAR, skip=["("]), ValueError,
                                       "'(' in skip is no regular expression"),
    "something to skip and a filter": (lambda: moxie.quantize_(make(), LINEAR, lambda module, fqn: True, skip=[".*wq"]),
                                       ValueError, "skip is for a call without filter_fn and without an FqnToConfig"),
    "something to skip and keys": (lambda: moxie.quantize_(make(), moxie.FqnToConfig({"output": LINEAR}), skip=[".*wq"]),
                                   ValueError, "skip is for a call without filter_fn and without an FqnToConfig"),
    "a layer without a shape": (lambda: moxie.quantize_(nn.Sequential(nn.LazyLinear(8)), LINEAR), ValueError,
                                "0.weight has no shape yet; give the model a first batch"),
    # Configs.
    "an unknown recipe": (lambda: moxie.quantize_(make(), "mxfp8_rciel"), ValueError,
                          "there is no recipe 'mxfp8_rciel'; there are mxfp8_rceil, "),
    "an unknown recipe of linears": (lambda: moxie.MXLinearConfig.from_recipe_name("mxfp8_cutlass"), ValueError,
                                     "there is no recipe 'mxfp8_cutlass'; there are mxfp8_emulated, mxfp8_cublas"),
    "FP4": (lambda: moxie.MXLinearConfig.from_recipe_name("mxfp4_cutlass"), ValueError, "there is no FP4 here"),
    "the wrong family of recipe": (lambda: moxie.MXFP8GroupedMMConfig.from_recipe("fp8_rowwise"), ValueError,
                                   "fp8_rowwise is not MXFP8; FP8GroupedMMConfig.from_recipe takes"),
    "a class for a config": (lambda: moxie.quantize_(make(), moxie.MXFP8GroupedMMConfig), TypeError,
                             "got the class MXFP8GroupedMMConfig; call it"),
    "something that is no config": (lambda: moxie.quantize_(make(), {"experts": GROUPED}), TypeError, "got dict"),
    "the base of configs": (moxie.GroupedMMConfig, TypeError, "use MXFP8GroupedMMConfig or FP8GroupedMMConfig"),
    "kernels that are not ours": (lambda: moxie.MXFP8GroupedMMConfig(kernel_preference="triton"), ValueError,
                                  "kernel_preference must be one of KernelPreference.AUTO, KernelPreference.EMULATED, got "
                                  "'triton'"),
    "an unknown rule": (lambda: moxie.MXFP8GroupedMMConfig(scale_calculation_mode="round"), ValueError,
                        "scale_calculation_mode must be one of ScaleCalculationMode.FLOOR"),
    "a half-precision result": (lambda: moxie.MXFP8GroupedMMConfig(out_dtype=torch.float16), TypeError,
                                "out_dtype must be torch.bfloat16, torch.float32, or None for that of the activations, got "
                                "torch.float16"),
    "blocks that reach into other groups": (lambda: moxie.MXFP8GroupedMMConfig(activations="32x32"), ValueError,
                                            "activations must be one row tall"),
    "a block size": (lambda: moxie.MXLinearConfig(block_size=64), ValueError,
                     "block_size must be 32; larger blocks are activations="),
    "e5m2 elements": (lambda: moxie.MXLinearConfig(elem_dtype=torch.float8_e5m2), TypeError,
                      "elem_dtype must be torch.float8_e4m3fn, got torch.float8_e5m2"),
    "tensorwise scaling": (lambda: moxie.FP8GroupedMMConfig(float8_linear_recipe="tensorwise"), ValueError,
                           "float8_linear_recipe must be rowwise or rowwise_with_gw_hp, got 'tensorwise'"),
    "a cache of an unknown layout": (lambda: moxie.MXFP8GroupedMMConfig(weight_cache="nk"), ValueError,
                                     "weight_cache must be False, True or 'kn', got 'nk'"),
    "a layout for the cache of a linear": (lambda: moxie.MXLinearConfig(weight_cache="kn"), ValueError,
                                           "weight_cache must be False or True, got 'kn'"),
    "a cache of a matrix": (matrix, ValueError, "table is a matrix, and weight_cache is for linears and 3D parameters"),
    "a name that a cache would take": (taken, ValueError,
                                       "the weight cache of w1 would be its module's w1_cache, which there is already, a dict"),
    "a word for a flag": (lambda: moxie.MXFP8GroupedMMConfig(wgrad_with_hp="no"), TypeError,
                          "wgrad_with_hp must be True or False, got 'no'"),
    "a hook without a cache": (lambda: moxie.refresh_after(nn.Linear(2, 2), None), ValueError, "weight_cache=True in a config"),
    # Dtypes and shapes.
    "a model in half precision": (lambda: moxie.quantize_(make().half(), "mxfp8_rceil"), TypeError,
                                  "layers.0.attention.wq.weight must be torch.bfloat16 or torch.float32 to be quantized, got "
                                  "torch.float16"),
    "a parameter that is sharded": (sharded, TypeError,
                                    "w must be an nn.Parameter, got Sharded; convert a model before it is sharded"),
    "an empty parameter": (lambda: moxie.quantize_(nn.Linear(0, 8, bias=False), LINEAR), ValueError,
                           "weight must not be empty, got"),
    "activations of another width": (lambda: moxie.MXLinear(64, 32)(torch.randn(2, 96)), ValueError, "x has 96 columns"),
    # Tensors that are quantized already.
    "a tuple for an MXTensor": (lambda: moxie.grouped_mm((QDATA, SCALE), W, OFFS), TypeError,
                                "moxie.MXTensor.from_qdata_and_scales(qdata, scale, orig_dtype)"),
    "a tuple for an MXTensor beside another": (
        lambda: _to_mxfp8_then_scaled_grouped_mm(mx(), W.mT, OFFS, prequantized_A=(QDATA, SCALE)), TypeError,
        "prequantized_A must be (qdata, scale) of A, a plain tensor; an MXTensor is given as A itself"),
    "bytes for scales": (lambda: mx(scale=SCALE.view(torch.uint8)), TypeError,
                         "scales must be torch.float8_e8m0fnu, got torch.uint8; bytes become scales with scale.view("),
    "bytes for elements": (lambda: mx(QDATA.view(torch.uint8)), TypeError, "qdata must be torch.float8_e4m3fn, got torch.uint8"),
    "scales of another shape": (lambda: mx(scale=SCALE[:4]), ValueError,
                                "scales of qdata (8, 64) in blocks of 1x32 must be (8, 2), got (4, 2)"),
    "swizzled scales": (lambda: mx(scale=moxie.swizzle_scale(SCALE)), ValueError, "swizzled scales become plain ones with"),
    "swizzled scales by flag": (lambda: mx(is_swizzled_scales=True), ValueError, "moxie.unswizzle_scale(scales, rows, cols)"),
    "an integer dtype": (lambda: mx(dtype=torch.int32), TypeError, "orig_dtype must be torch.bfloat16 or torch.float32"),
    "an unknown block": (lambda: mx(block="1x64"), ValueError, "block must be one of 1x32, 32x32"),
    "an unknown size of blocks": (lambda: mx(block_size=64), ValueError, "block_size must be 32, the block of the MX format, or"),
    "elements of another format": (lambda: moxie.MXTensor.to_mx(X, torch.float8_e5m2), TypeError,
                                   "elem_dtype must be torch.float8_e4m3fn, got torch.float8_e5m2"),
    "one dim": (lambda: mx(QDATA[0], SCALE[0], block="32x32"), ValueError,
                "qdata in blocks of 32x32 must have at least 2 dims, got 1"),
    "blocks that the recipe does not take": (lambda: moxie.grouped_mm(mx(), W, OFFS), ValueError,
                                             "x is an MXTensor in blocks of 1x32, and the recipe takes activations in blocks of "
                                             "1x128; quantize it so, or take a recipe with activations=1x32"),
    "a recipe without blocks": (lambda: moxie.grouped_mm(mx(), W, OFFS, recipe="fp8_rowwise"), ValueError,
                                "and this recipe has none; x.dequantize() is a plain tensor"),
    "half precision": (lambda: moxie.MXTensor.to_mx(X).half(), NotImplementedError,
                       "to(torch.float16) would not be quantized; dequantize().to(torch.float16) gives a plain tensor"),
    "another dtype of ours": (lambda: moxie.MXTensor.to_mx(X).bfloat16(), NotImplementedError,
                              "dequantize(torch.bfloat16) gives a plain tensor"),
    "half precision of elements": (lambda: mx().dequantize(torch.float16), TypeError,
                                   "dequantize gives torch.bfloat16 or torch.float32, got torch.float16; "
                                   "dequantize().to(torch.float16) casts it"),
    # Weight matrices of modules other than nn.Linear, which are converted only under their whole name.
    "a model of Conv1D": (lambda: moxie.quantize_(OfConv1D(), "mxfp8_rceil"), ValueError,
                          "c_attn.weight: a matrix outside of an nn.Linear, which an FqnToConfig converts under its whole name"),
    "a Conv1D by its module": (lambda: moxie.quantize_(OfConv1D(), moxie.FqnToConfig({"c_attn": "mxfp8_rceil"})), ValueError,
                               "key 'c_attn' converts nothing: str suits nothing that it matches; c_attn.weight is a matrix "
                               "outside of an nn.Linear, which an FqnToConfig converts under its whole name"),
    # The names of another library.
    "a config of another library": (lambda: _quantize_then_scaled_grouped_mm(X, W.mT, object(), OFFS), TypeError,
                                    "config must be an MXFP8GroupedMMConfig or FP8GroupedMMConfig, got object"),
    "weights that are a matrix": (lambda: _to_mxfp8_then_scaled_grouped_mm(X, W[0].T, OFFS), ValueError,
                                  "B_t must be [G, K, N], got (64, 32)"),
    "groups that do not divide": (lambda: generate_jagged_offs(4, 100), ValueError,
                                  "M must be a multiple of multiple_of, 32, got 100"),
}
# fmt: on


@pytest.mark.parametrize("case", CASES)
def test_misuse_is_told_in_words_that_help(case):
    call, kind, words = CASES[case]
    with pytest.raises(kind) as error:
        call()
    assert words in str(error.value), str(error.value)


def test_there_are_more_than_twenty_cases():
    assert len(CASES) > 20


def test_nothing_is_converted_when_something_is_refused():
    model = make()
    model.layers[0].moe.experts.w2.data = model.layers[0].moe.experts.w2.data.half()
    with pytest.raises(TypeError):
        moxie.quantize_(model, "mxfp8_rceil")
    assert not any(isinstance(module, moxie.MXLinear) for module in model.modules()) and not model._forward_hooks
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


class Refusing(moxie.nn.GroupedExperts):
    """Experts that refuse a second recipe with an error, after they have set it already: the caller must undo the half-done
    change."""

    def set_recipe_(self, recipe, *, weight_cache=False):
        if hasattr(self, "recipe"):
            super().set_recipe_(recipe, weight_cache=weight_cache)  # half done
            raise ValueError("not this one")
        super().set_recipe_(recipe, weight_cache=weight_cache)


def state_of(model):
    """Returns everything that a conversion may change, except the values of tensors: types, attributes, hooks, identities,
    recipes."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_load_state_dict_post_hooks")
    modules = {
        name: (type(module), sorted(module.__dict__), list(module._modules), [len(getattr(module, hook)) for hook in hooks])
        for name, module in model.named_modules()
    }
    parameters = {
        name: (id(parameter), type(parameter), sorted(parameter.__dict__)) for name, parameter in model.named_parameters()
    }
    recipes = {name: getattr(module, "recipe", None) for name, module in model.named_modules()}
    return modules, parameters, recipes


@pytest.mark.parametrize("before", (None, "mxfp8_floor"), ids=("plain", "converted before"))
@pytest.mark.parametrize("cached", (False, True))
def test_a_call_that_is_refused_midway_changes_nothing(before, cached):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.experts, self.own = nn.Linear(64, 64), TitanExperts(), moxie.nn.GroupedExperts(64, 32, 2)
            self.last, self.after = Refusing(64, 32, 2), nn.Linear(64, 64)

        def forward(self, x):
            offs = torch.tensor([1, 2, 3, 8], dtype=torch.int32)
            y = torch._grouped_mm(self.first(x), self.experts.w1.mT, offs=offs)
            return y, self.own(self.after(x), offs[2:])

    model, x = Model(), torch.randn(8, 64)
    if before:
        report = moxie.quantize_(model, moxie.FqnToConfig({"last": None, "_default": before}))
    expected = model(x)  # before state_of(), because the first forward removes the hook that warns of unused conversions
    state = state_of(model)
    with pytest.raises(ValueError, match="not this one"):
        config = moxie.MXFP8GroupedMMConfig(weight_cache=cached)
        linear = moxie.MXLinearConfig(weight_cache=cached)
        moxie.quantize_(model, moxie.FqnToConfig({"re:first|after": linear, "_default": config}))
    assert state_of(model) == state
    assert all(torch.equal(y, of) for y, of in zip(model(x), expected))
    if before:
        assert not any(entry.conversion.ended for entry in report.entries if entry.conversion is not None)
        assert sorted(moxie.participation(model).forward) == ["after", "experts.w1", "first", "own"]
    # The next conversion works as if the failed one had not been tried.
    moxie.quantize_(model, moxie.FqnToConfig({"last": None, "_default": "mxfp8_rceil"}))
    assert model.first.conversion.recipe == model.own.recipe and model.own.recipe.startswith("mxfp8_rceil:")


def test_a_conv1d_converts_under_its_whole_name_and_is_listed_otherwise():
    model = nn.ModuleDict({"of": OfConv1D(), "up": nn.Linear(64, 64)})
    report = moxie.quantize_(model, "mxfp8_rceil")
    assert "weight  parameter 64x96  left alone: a matrix outside of an nn.Linear" in str(report)
    model, x = OfConv1D(), torch.randn(8, 64)
    moxie.quantize_(model, moxie.FqnToConfig({"c_attn.weight": "mxfp8_rceil"}))
    conv = model.c_attn
    expected = moxie.grouped_mm(x, conv.weight.detach().t().unsqueeze(0), recipe="mxfp8_rceil", bias=conv.bias)
    assert torch.equal(model(x), expected)


def test_experts_that_are_matrices_are_listed():
    class ExpertGLU(nn.Module):
        """Experts as in DBRX: one matrix holds the weights of all experts, one below the other."""

        def __init__(self):
            super().__init__()
            self.w1, self.w1_bias = nn.Parameter(torch.randn(4 * 96, 64)), nn.Parameter(torch.randn(64, 96))

    model = nn.ModuleDict({"experts": ExpertGLU(), "up": nn.Linear(64, 64)})
    report = moxie.quantize_(model, "mxfp8_rceil")
    reasons = {entry.fqn: entry.reason for entry in report.entries}
    assert list(reasons) == ["experts.w1", "up"] and "an FqnToConfig converts under its whole name" in reasons["experts.w1"]
    moxie.quantize_(model, moxie.FqnToConfig({"experts.w1": "mxfp8_rceil"}))
    assert type(model.experts.w1).__name__ == "ConvertedParameter"


def test_a_key_that_others_leave_nothing_to_is_warned_of():
    with pytest.warns(UserWarning, match="key 're:.*experts.*' decides nothing: other keys win"):
        by_name({"layers.0.moe": GROUPED, "re:.*experts.*": LINEAR})()


def test_a_cache_in_the_wrong_order_is_warned_of():
    experts = TitanExperts()
    moxie.quantize_(experts, moxie.MXFP8GroupedMMConfig(weight_cache="kn"))
    x, offs = torch.randn(8, 64), torch.tensor([1, 2, 3, 8], dtype=torch.int32)
    with pytest.warns(UserWarning, match=r"w1: the weight cache takes it for \[G, K, N\].*weight_cache=True is right"):
        torch._grouped_mm(x, experts.w1.mT, offs=offs)
    moxie.quantize_(experts, moxie.MXFP8GroupedMMConfig(weight_cache=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch._grouped_mm(x, experts.w1.mT, offs=offs)
