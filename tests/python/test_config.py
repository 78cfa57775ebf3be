"""Configs with torchao's names and fields: each corresponds to a moxie.Recipe."""

import copy
import pickle

import pytest
import torch

import moxie
from moxie.config import recipe_of

MX, FP8, LINEAR = moxie.MXFP8GroupedMMConfig, moxie.FP8GroupedMMConfig, moxie.MXLinearConfig


@pytest.mark.parametrize("recipe", moxie.MXFP8GroupedMMRecipe)
def test_a_grouped_recipe_is_the_recipe_of_its_name(recipe):
    for given in (recipe, recipe.value):
        assert MX.from_recipe(given).to_recipe() == moxie.Recipe.from_name(recipe.value)
        assert LINEAR.from_recipe(given).to_recipe() == moxie.Recipe.from_name(recipe.value)


def test_every_recipe_that_quantizes_has_a_config():
    names = {member.value for kind in (moxie.MXFP8GroupedMMRecipe, moxie.FP8GroupedMMRecipe) for member in kind}
    assert names == set(moxie.recipe_names()) - {"bf16"}


def test_fields_are_those_of_the_recipe():
    config = MX(
        kernel_preference=moxie.KernelPreference.EMULATED,
        out_dtype=torch.float32,
        wgrad_with_hp=True,
        scale_calculation_mode=moxie.ScaleCalculationMode.EVEN,
        activations="1x128",
        weights="32x32",
    )
    assert config.to_recipe() == moxie.Recipe(
        kernels="emulated", out="float32", wgrad_with_hp=True, rule="even", activations="1x128", weights="32x32"
    )
    assert MX().to_recipe() == moxie.Recipe.from_name("mxfp8_rceil")
    assert FP8(out_dtype=torch.bfloat16).to_recipe() == moxie.Recipe("row", out="bfloat16")


@pytest.mark.parametrize(
    "name, recipe",
    (
        ("MXFP8_EMULATED", "mxfp8_emulated_floor"),
        ("MXFP8_CUBLAS", "mxfp8_floor"),
        ("MXFP8_CUBLAS_RCEIL", "mxfp8_rceil"),
        ("MXFP8_RCEIL_32X32", "mxfp8_rceil_32x32"),
        ("MXFP8_RCEIL_128", "mxfp8_rceil_128"),
    ),
)
def test_linear_recipes(name, recipe):
    member = moxie.MXLinearRecipeName[name]
    for given in (member, member.value):
        assert LINEAR.from_recipe_name(given).to_recipe() == moxie.Recipe.from_name(recipe)


def test_padding_is_accepted_and_changes_nothing():
    for kind in (MX, FP8):
        assert kind(pad_token_groups_for_grouped_mm=True).to_recipe() == kind().to_recipe()


@pytest.mark.parametrize(
    "make",
    (
        lambda: MX(wgrad_with_hp=True, weight_cache=True),
        lambda: FP8(out_dtype=torch.float32),
        lambda: LINEAR(weights="32x32"),
        lambda: moxie.FqnToConfig({"a": MX(), "b": None}),
    ),
    ids=("mx", "fp8", "linear", "fqn"),
)
def test_configs_compare_by_value_and_are_keys(make):
    assert make() == make() and hash(make()) == hash(make()) and {make(): 1}[make()] == 1
    assert copy.copy(make()) == copy.deepcopy(make()) == pickle.loads(pickle.dumps(make())) == make()


@pytest.mark.parametrize(
    "kind, field, value",
    (
        (MX, "kernel_preference", "emulated"),
        (MX, "out_dtype", torch.float32),
        (MX, "wgrad_with_hp", True),
        (MX, "scale_calculation_mode", moxie.ScaleCalculationMode.FLOOR),
        (MX, "pad_token_groups_for_grouped_mm", True),
        (MX, "weight_cache", "kn"),
        (FP8, "float8_linear_recipe", "rowwise_with_gw_hp"),
        (FP8, "out_dtype", torch.bfloat16),
        (LINEAR, "kernel_preference", moxie.KernelPreference.EMULATED),
        (LINEAR, "mxfp8_dim1_cast_kernel_choice", "cuda"),
        (LINEAR, "scale_calculation_mode", "even"),
    ),
)
def test_a_field_assigned_to_is_that_of_a_config_made_with_it(kind, field, value):
    config = kind()
    setattr(config, field, value)
    made = kind(**{field: value})
    assert config == made and hash(config) == hash(made) and config.to_recipe() == made.to_recipe()
    assert config.recipe_text == made.recipe_text and getattr(config, field) == getattr(made, field)


@pytest.mark.parametrize(
    "kind, field, value, words",
    (
        (MX, "kernel_preference", "cutlass", "kernel_preference must be one of KernelPreference.AUTO"),
        (MX, "wgrad_with_hp", "yes", "wgrad_with_hp must be True or False, got 'yes'"),
        (MX, "weights", "7x7", "7x7"),
        (MX, "weight_cache", "nk", "weight_cache must be False, True or 'kn', got 'nk'"),
        (MX, "wgrad_hp", True, "MXFP8GroupedMMConfig: there is no field 'wgrad_hp'; there are kernel_preference, out_dtype"),
        (MX, "recipe_text", "bf16", "there is no field 'recipe_text'"),
        (FP8, "float8_dtype", torch.float8_e5m2, "float8_dtype must be torch.float8_e4m3fn"),
        (LINEAR, "block_size", 16, "block_size must be 32; larger blocks are activations="),
        (LINEAR, "mxfp8_dim0_cast_kernel_choice", "cuda", "must be one of MXFP8Dim0CastKernelChoice.TRITON"),
    ),
)
def test_an_assignment_that_is_refused_leaves_the_config_as_it_was(kind, field, value, words):
    config = kind()
    with pytest.raises((ValueError, TypeError, AttributeError)) as error:
        setattr(config, field, value)
    assert words in str(error.value) and config == kind() and config.recipe_text == kind().recipe_text


def test_a_converted_model_keeps_the_config_that_it_was_converted_with():
    config = LINEAR()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    moxie.quantize_(model, config)
    config.scale_calculation_mode = "floor"
    assert model[0].config == LINEAR() and moxie.Recipe.from_name(model[0].conversion.recipe).rule == "rceil"


def test_different_configs_differ():
    configs = [MX(), MX(wgrad_with_hp=True), MX(pad_token_groups_for_grouped_mm=True), MX(weight_cache=True), FP8(), LINEAR()]
    assert len(set(configs)) == len(configs)


def test_words_and_enums_of_other_libraries_give_equal_configs():
    assert MX(kernel_preference="emulated", scale_calculation_mode="floor") == MX(
        kernel_preference=moxie.KernelPreference.EMULATED, scale_calculation_mode=moxie.ScaleCalculationMode.FLOOR
    )
    torchao = pytest.importorskip("torchao.prototype.mx_formats.config")
    preference = pytest.importorskip("torchao.quantization.quantize_.common.kernel_preference")
    theirs = MX(kernel_preference=preference.KernelPreference.EMULATED, scale_calculation_mode=torchao.ScaleCalculationMode.FLOOR)
    assert theirs == MX(kernel_preference="emulated", scale_calculation_mode="floor") and hash(theirs)


def test_every_kind_of_config_stands_for_a_recipe():
    expected = moxie.Recipe.from_name("mxfp8_rceil")
    for config in ("mxfp8_rceil", expected, MX(), LINEAR(), moxie.MXFP8GroupedMMRecipe.MXFP8_RCEIL):
        assert recipe_of(config) == expected
