"""MXLinear: nn.Linear whose three products are quantized."""

import functools
import re
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from moxie.config import AnyConfig, wants_cache
from moxie.convert_parameter import ViewCache, stacked
from moxie.converted import Conversion
from moxie.dtensors import any_dtensor, class_of, set_class
from moxie.gemm import DEFAULT_RECIPE, grouped_mm
from moxie.steps import note


def _without_ours(cls: type, base: type) -> type:
    """Takes the class that torch.nn.utils.parametrize made from MXLinear, and returns the same class derived from `base`."""
    members = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(re.sub("MX(FP8)?Linear", "Linear", cls.__name__), (base,), members)


def own_forward(cls: type[nn.Linear]) -> str:
    """Why linears of this class cannot be converted, or "". MXLinear replaces nn.Linear's forward only, so a subclass with its
    own forward is left alone."""
    if not issubclass(cls, MXLinear) and cls.forward is not nn.Linear.forward:
        return f"{cls.__name__} has a forward of its own"
    if issubclass(cls, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return f"{cls.__name__} is multiplied by its owner, nn.MultiheadAttention"
    return ""


@functools.cache
def quantized_class(cls: Any, base: Any) -> Any:
    """Makes a class that derives from both MXLinear and `cls`, a subclass of nn.Linear, so that the methods of `cls` stay."""
    members = {
        "__module__": cls.__module__,
        "__qualname__": f"MX{cls.__qualname__}",
        "__reduce_ex__": _reduce,
        "float_class": cls,
    }
    return type(f"MX{cls.__name__}", (base, cls), members)


def _reduce(linear: "MXLinear", protocol):
    """Implements __reduce_ex__ for classes made by quantized_class: pickle cannot find them by name."""
    state = linear.__getstate__() if hasattr(linear, "__getstate__") else linear.__dict__  # missing in Python 3.10
    return _unpickled, (linear.float_class, class_of(linear).__bases__[0]), state


def _unpickled(cls: Any, base: Any) -> "MXLinear":
    made = quantized_class(cls, base)
    return made.__new__(made)


class MXLinear(nn.Linear):
    """y = x w^T + bias, for x with any leading dims, quantized as the config says. The state dict is that of nn.Linear.

    >>> linear = moxie.MXLinear(64, 96, config="mxfp8_rceil")
    >>> linear(torch.randn(2, 5, 64)).shape
    torch.Size([2, 5, 96])
    """

    conversion: Conversion
    float_class: type = nn.Linear  # the class that to_float restores

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: AnyConfig = DEFAULT_RECIPE,
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self._convert(config, "")

    @classmethod
    def from_float(cls, linear: nn.Linear, config: AnyConfig = DEFAULT_RECIPE, *, name: str = "") -> "MXLinear":
        """Turns the nn.Linear into an MXLinear in place. Its parameters, its hooks and references to it stay valid. An instance
        of a subclass of nn.Linear remains an instance of that subclass."""
        reason = own_forward(class_of(linear)) if isinstance(linear, nn.Linear) else f"got {type(linear).__name__}"
        if reason:
            raise TypeError(f"MXLinear.from_float: linear must be an nn.Linear with its forward, {reason}")
        conversion = Conversion(name, config)  # raises for an invalid config before anything changes
        if not isinstance(linear, cls):
            plain = linear.float_class if isinstance(linear, MXLinear) else class_of(linear)
            ours: Any = cls
            set_class(linear, ours if plain is nn.Linear else quantized_class(plain, ours))
        converted = cast(MXLinear, linear)
        converted._convert(conversion.config, name)
        return converted

    def to_float(self) -> nn.Linear:
        """The inverse of from_float."""
        self._modules.pop("weight_cache", None)
        self.conversion.ended = True
        del self.conversion
        own = class_of(self)
        since = is_parametrized(self) and "float_class" not in vars(own)  # whether it was parametrized after the conversion
        set_class(self, _without_ours(own, self.float_class) if since else self.float_class)
        return self

    def _convert(self, config: AnyConfig, name: str) -> None:
        if "conversion" in self.__dict__:
            self.conversion.ended = True
        self.conversion = Conversion(name, config)
        self._modules.pop("weight_cache", None)
        if wants_cache(config):
            self.weight_cache = ViewCache(self.weight, stacked, recipe=self.conversion.recipe)
            self.conversion.cache = self.weight_cache

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self.refresh_()

    def _cache(self) -> ViewCache | None:
        return cast("ViewCache | None", self._modules.get("weight_cache"))

    def refresh_(self) -> None:
        """Quantizes the cached weight again, if there is a cache and the weight is not sharded."""
        cache = self._cache()
        if cache is not None and (cache.is_of(self.weight) or type(self.weight) is nn.Parameter):
            cache.refresh_(self.weight)

    @property
    def config(self) -> AnyConfig:
        return self.conversion.config

    def forward(self, x: Tensor) -> Tensor:
        cache = self._cache()
        if cache is not None and not cache.is_of(self.weight):
            cache = None
            if not torch.compiler.is_compiling():
                warnings.warn(
                    f"MXLinear {self.conversion.name}: another parameter has taken the place of the cached one, as when "
                    "a model is sharded, so it is quantized in every forward",
                    stacklevel=2,
                )
        if any_dtensor(x, self.weight):
            from moxie.distributed import products

            y = products.linear(x, self.weight, self.bias, recipe=self.conversion.recipe)
            note(self.conversion, y)
            return y
        y = grouped_mm(
            x.reshape(-1, x.shape[-1]), self.weight.unsqueeze(0), recipe=self.conversion.recipe, bias=self.bias, quantized_w=cache
        )
        note(self.conversion, y)
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        from moxie.report import recipe_label

        return f"{super().extra_repr()}, recipe={recipe_label(self.conversion.recipe)}"
