"""Uses Moxie inside TorchTitan: for experts and linears in MXFP8, and for sending tokens between ranks (docs/TORCHTITAN.md).

With TorchTitan 0.3 from the command line, without a line of code:

    --override.imports 'moxie.torchtitan.experts={"recipe": "mxfp8_rceil_128"}' moxie.torchtitan.linears moxie.torchtitan.dispatch

or, for those who edit a config_registry, as converters: `MoxieGroupedExpertsConverter`, `MoxieLinearConverter` and
`MoxieTokenDispatcherConverter`.

With TorchTitan 0.2 this module registers the model converters moxie.experts and moxie.linears, and adds their flags:

    --job.custom_config_module=moxie.torchtitan --model.converters=moxie.experts,moxie.linears --moxie.experts.fqns=experts
"""

import importlib.util


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if _has("torchtitan.config.override"):
    from moxie.torchtitan.converters import MoxieGroupedExpertsConverter, MoxieLinearConverter, MoxieTokenDispatcherConverter
    from moxie.torchtitan.dispatcher import MoxieTokenDispatcher
    from moxie.torchtitan.overrides import dispatch, experts, linears

    __all__ = [
        "MoxieGroupedExpertsConverter",
        "MoxieLinearConverter",
        "MoxieTokenDispatcher",
        "MoxieTokenDispatcherConverter",
        "dispatch",
        "experts",
        "linears",
    ]
elif _has("torchtitan.protocols.model_converter"):
    from moxie.torchtitan.model_converters import ExpertsConverter, JobConfig, LinearsConverter

    __all__ = ["ExpertsConverter", "JobConfig", "LinearsConverter"]
else:
    raise ImportError("moxie.torchtitan: TorchTitan 0.3 or 0.2 must be installed: pip install torchtitan==0.3.0")
