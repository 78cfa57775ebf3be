"""Tiny models of many transformers families: checks which linears are converted, and that all expert products run through Moxie.

MOXIE_FAMILIES=all runs every family that the installed transformers has, not the four of CI.
"""

import importlib
import os
import re

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import moxie
from hf_families import NotBuiltError, build, experts_of, families, loss_of

FOUR = ["deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe"]
CHOSEN = families() if os.environ.get("MOXIE_FAMILIES") == "all" else FOUR
IDS = torch.arange(32).remainder(11).add(3).view(2, 16)
IS_4 = transformers.__version__.startswith("4.")

# Patterns for names of layers that must stay unconverted: projections that make only keys or values, and routers.
KEYS_AND_VALUES = re.compile(r"(^|[._])(k|v|kv|wk|wv|wkv)($|[._])")
ROUTER = re.compile(r"(^|\.)(gate|router|\w*router\w*|shared_expert_gate)(\.|$)")


def built(family: str, **how):
    try:
        return build(family, **how)
    except NotBuiltError as error:
        pytest.skip(f"{family} is not built: {error}")


@pytest.mark.parametrize("family", CHOSEN)
def test_what_the_skip_list_names_is_left_alone(family):
    model = built(family, device="meta")
    report = moxie.quantize_(model, "mxfp8_rceil")
    for name in report.converted:
        last = ".".join(name.split(".")[-2:])
        assert not KEYS_AND_VALUES.search(re.sub(r"q_?k_?v\w*|b_proj|_b", "", last)), name
        assert not ROUTER.search(name) and not name.endswith("lm_head"), name
    shapes = {entry.fqn: entry.shape for entry in report.entries}
    assert all(min(shapes[name][-2:]) >= 32 for name in report.converted)
    assert set(experts_of(model)) <= set(report.converted)
    stacks = [name for name in report.converted if len(shapes[name]) == 3]
    assert all(re.search(r"experts|(in|out)put_linear", name) for name in stacks)  # some with two names


# "seams": transformers' own calls of torch products, which Moxie intercepts. "moxie": the fused layer of moxie.hf.
@pytest.mark.parametrize("implementation", ("seams", "moxie"))
@pytest.mark.parametrize("family", CHOSEN)
def test_every_expert_product_is_moxies(family, implementation):
    model = built(family)
    if implementation == "moxie" and (IS_4 or not model._can_set_experts_implementation()):
        pytest.skip("its experts take no implementation")
    try:
        expected = loss_of(model, IDS)
    except (RuntimeError, TypeError, KeyError, ValueError, AttributeError) as error:
        pytest.skip(f"{family} does not run as it is built: {error}")
    if implementation == "moxie":
        importlib.import_module("moxie.hf")
        model.set_experts_implementation("moxie")
    moxie.quantize_(model, "mxfp8_rceil")
    loss = loss_of(model, IDS)
    loss.backward()
    part = moxie.participation(model)
    experts = set(experts_of(model))
    assert experts <= set(part.forward) and experts <= set(part.backward)
    # The loss may change by FP8 rounding, and by the tokens that it sends to other experts.
    assert abs(loss - expected) < 0.1 * expected.abs() + 0.01
