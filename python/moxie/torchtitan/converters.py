"""The overrides of overrides.py as converters, for a config_registry of TorchTitan 0.3: `model_registry(flavor,
converters=[...])`."""

from dataclasses import dataclass, field

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from moxie.expert_parallel import Wire
from moxie.gemm import DEFAULT_RECIPE
from moxie.torchtitan.choose import Choice
from moxie.torchtitan.dispatcher import MoxieTokenDispatcher
from moxie.torchtitan.replace import takes_tokens


def _replace_all(model_config, target: type, replacement):
    """Replaces every config of the type `target` by replacement(config, name)."""
    for fqn, config, parent, attr in list(model_config.traverse(target)):
        new = replacement(config, fqn)
        if parent is None:
            model_config = new
        elif isinstance(parent, list):
            parent[attr] = new
        else:
            setattr(parent, attr, new)
    return model_config


def _tell_dispatchers(model_config) -> None:
    """Tells Moxie's dispatchers which experts take tokens. Both converters call it, because the user decides which of them runs
    first."""
    for _, block, _, _ in model_config.traverse(RoutedExperts.Config):
        if isinstance(block.token_dispatcher, MoxieTokenDispatcher.Config):
            block.token_dispatcher.experts_take_tokens = takes_tokens(block.inner_experts)


class MoxieGroupedExpertsConverter(QuantizationConverter):
    """Makes experts multiply through Moxie, in one autograd node with one product for w1 and w3. Parameters keep their names."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: str = DEFAULT_RECIPE
        fqns: list[str] = field(default_factory=list)
        """Parts of names: experts whose name contains one are converted; with none, all are."""

    def __init__(self, config: Config):
        self.choice = Choice(type(self).__name__, config.recipe, config.fqns)

    def convert(self, model_config):
        model_config = _replace_all(model_config, GroupedExperts.Config, self.choice.experts)
        _tell_dispatchers(model_config)
        self.choice.finish("experts")
        return model_config


class MoxieLinearConverter(QuantizationConverter):
    """Makes linears MXLinear, except those on the skip list."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: str = DEFAULT_RECIPE
        fqns: list[str] = field(default_factory=list)
        """Parts of names: linears whose name contains one are converted; with none, all but those of the skip list."""
        skip: list[str] | None = None
        """Patterns for whole names of linears to leave alone. None: moxie.LM_SKIP, or none where fqns are given."""

    def __init__(self, config: Config):
        self.choice = Choice(type(self).__name__, config.recipe, config.fqns, config.skip)

    def convert(self, model_config):
        model_config = _replace_all(model_config, Linear.Config, self.choice.linear)
        self.choice.finish("linears")
        return model_config


class MoxieTokenDispatcherConverter(QuantizationConverter):
    """Replaces token dispatchers by Moxie's, which send x and dy in FP8, and each token at most once to a rank. The experts do
    not change."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        wire: Wire | None = None
        """"fp8" or "unquantized": how x and dy travel. None: fp8 where the recipe of the experts allows it."""
        recipe: str = DEFAULT_RECIPE
        """How x and dy are quantized on their way to experts that are not Moxie's fused ones."""
        fqns: list[str] = field(default_factory=list)
        """Parts of names: dispatchers whose name contains one are replaced; with none, all are."""

    def __init__(self, config: Config):
        self.choice, self.wire = Choice(type(self).__name__, config.recipe, config.fqns), config.wire

    def convert(self, model_config):
        replace = lambda config, fqn: self.choice.dispatcher(config, fqn, self.wire)
        model_config = _replace_all(model_config, LocalTokenDispatcher.Config, replace)
        _tell_dispatchers(model_config)
        self.choice.finish("token dispatchers")
        return model_config
