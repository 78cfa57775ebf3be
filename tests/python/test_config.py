"""Configs and recipes by the names people know: each is a moxie.Recipe."""

import dataclasses

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
def test_configs_compare_by_value_are_keys_and_do_not_change(make):
    assert make() == make() and hash(make()) == hash(make()) and {make(): 1}[make()] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().weight_cache = True


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
