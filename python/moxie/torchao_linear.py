"""MXFP8Linear: MXLinear with the arguments, attributes and defaults of torchao's."""

import dataclasses

from torch import nn

from moxie.config import AnyConfig, KernelPreference, MXLinearConfig, ScaleCalculationMode, recipe_of, wants_cache
from moxie.linear import MXLinear


class MXFP8Linear(MXLinear):
    """nn.Linear in MXFP8 with torchao's defaults: blocks of 1x32, and scales rounded up (RCEIL).

    Hopper has no FP8 product for blocks of 1x32, so they are decoded to bf16 there; `config="mxfp8_rceil_128"`, the default of
    `moxie.MXLinear`, uses Hopper's FP8 kernel. Give either `config` or the arguments kernel_preference, scale_calculation_mode
    and wgrad_with_hp. These three can be assigned to after construction.

    >>> from moxie.torchao_compat import MXFP8Linear
    >>> MXFP8Linear(64, 96, bias=False, wgrad_with_hp=True).wgrad_with_hp
    True
    """

    def __init__(
        self,
        *args,
        kernel_preference: KernelPreference | str = KernelPreference.AUTO,
        scale_calculation_mode: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL,
        wgrad_with_hp: bool = False,
        config: AnyConfig | None = None,
        **kwargs,
    ):
        given = _config(kernel_preference, scale_calculation_mode, wgrad_with_hp)
        if config is not None and given != MXLinearConfig():
            raise ValueError(
                "MXFP8Linear: config is in place of kernel_preference, scale_calculation_mode and wgrad_with_hp; give one or the "
                f"other, got {config!r} and {given!r}"
            )
        super().__init__(*args, config=given if config is None else config, **kwargs)

    @classmethod
    def from_float(cls, linear: nn.Linear, config: AnyConfig | None = None, *, name: str = "") -> "MXFP8Linear":
        """Turns the nn.Linear into an MXFP8Linear in place."""
        return super().from_float(linear, MXLinearConfig() if config is None else config, name=name)  # type: ignore[return-value]

    @property
    def kernel_preference(self) -> KernelPreference:
        return KernelPreference(recipe_of(self.config).kernels)

    @kernel_preference.setter
    def kernel_preference(self, value: KernelPreference | str) -> None:
        self._change(kernel_preference=value)

    @property
    def scale_calculation_mode(self) -> ScaleCalculationMode:
        return ScaleCalculationMode(recipe_of(self.config).rule)

    @scale_calculation_mode.setter
    def scale_calculation_mode(self, value: ScaleCalculationMode | str) -> None:
        self._change(scale_calculation_mode=value)

    @property
    def wgrad_with_hp(self) -> bool:
        return recipe_of(self.config).wgrad_with_hp

    @wgrad_with_hp.setter
    def wgrad_with_hp(self, value: bool) -> None:
        self._change(wgrad_with_hp=value)

    def _change(self, **fields) -> None:
        config = self.config
        if not isinstance(config, MXLinearConfig):
            config = MXLinearConfig.from_recipe(str(recipe_of(config)))
            config.weight_cache = bool(wants_cache(self.config))
        self._convert(dataclasses.replace(config, **fields), self.conversion.name)


def _config(kernel_preference, scale_calculation_mode, wgrad_with_hp) -> MXLinearConfig:
    return MXLinearConfig(
        kernel_preference=kernel_preference, scale_calculation_mode=scale_calculation_mode, wgrad_with_hp=wgrad_with_hp
    )
