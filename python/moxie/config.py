"""Configs for `quantize_`, with torchao's names and fields. Each config stands for a `moxie.Recipe`.

Configs compare by value. Assigning to a field checks the value as the constructor does; if it is refused, the config does not
change. Use `dataclasses.replace` to change several fields that are legal only together. A converted model keeps a copy of its
config, so later assignments do not affect it.
"""

import dataclasses
import enum
from typing import Any, Literal

import torch

from moxie.ops import Block
from moxie.recipe import Recipe, recipe_names


class KernelPreference(str, enum.Enum):
    """auto: the fastest kernels of the device. emulated: decodes FP8 to bf16, then uses torch's bf16 product; on any device.

    >>> moxie.MXFP8GroupedMMConfig(kernel_preference="emulated").kernel_preference is moxie.KernelPreference.EMULATED
    True
    """

    AUTO = "auto"
    EMULATED = "emulated"


class ScaleCalculationMode(str, enum.Enum):
    """How the scale of a block follows from its largest magnitude. The ops call this the `rule`.

    >>> moxie.MXLinearConfig(scale_calculation_mode=moxie.ScaleCalculationMode.FLOOR).to_recipe().rule
    'floor'
    """

    FLOOR = "floor"
    RCEIL = "rceil"
    CEIL = "ceil"
    EVEN = "even"


class MXFP8GroupedMMRecipe(str, enum.Enum):
    """Names of the MXFP8 recipes.

    >>> moxie.MXFP8GroupedMMRecipe("mxfp8_rceil_128").name
    'MXFP8_RCEIL_128'
    """

    MXFP8_RCEIL = "mxfp8_rceil"
    MXFP8_RCEIL_WGRAD_WITH_HP = "mxfp8_rceil_wgrad_with_hp"
    MXFP8_EMULATED_RCEIL = "mxfp8_emulated_rceil"
    MXFP8_FLOOR = "mxfp8_floor"
    MXFP8_EMULATED_FLOOR = "mxfp8_emulated_floor"
    MXFP8_EMULATED_CEIL = "mxfp8_emulated_ceil"
    MXFP8_EMULATED_EVEN = "mxfp8_emulated_even"
    MXFP8_RCEIL_32X32 = "mxfp8_rceil_32x32"
    MXFP8_RCEIL_128 = "mxfp8_rceil_128"


class FP8GroupedMMRecipe(str, enum.Enum):
    """The FP8 recipe without blocks.

    >>> moxie.FP8GroupedMMConfig.from_recipe(moxie.FP8GroupedMMRecipe.FP8_ROWWISE) == moxie.FP8GroupedMMConfig()
    True
    """

    FP8_ROWWISE = "fp8_rowwise"


class MXLinearRecipeName(str, enum.Enum):
    """Names of recipes for linears. "cublas" in torchao's names has no meaning here: every recipe uses the fastest kernels.

    >>> moxie.MXLinearConfig.from_recipe_name(moxie.MXLinearRecipeName.MXFP8_CUBLAS).to_recipe().rule
    'floor'
    """

    MXFP8_EMULATED = "mxfp8_emulated"
    MXFP8_CUBLAS = "mxfp8_cublas"
    MXFP8_CUBLAS_RCEIL = "mxfp8_cublas_rceil"
    MXFP8_RCEIL_32X32 = "mxfp8_rceil_32x32"
    MXFP8_RCEIL_128 = "mxfp8_rceil_128"


class MXFP8Dim0CastKernelChoice(enum.Enum):
    """torchao's choice of a quantization kernel. Accepted but ignored: Moxie has one such kernel per device."""

    TRITON = "triton"
    TORCH = "torch"


class MXFP8Dim1CastKernelChoice(enum.Enum):
    """torchao's choice of a quantization kernel for the transposed form. Accepted but ignored."""

    TRITON = "triton"
    CUDA = "cuda"
    TORCH = "torch"
    CUTEDSL = "cutedsl"
    FLYDSL = "flydsl"


WeightCacheField = Literal[False, True, "kn"]

# Maps torchao's names of recipes for linears to Moxie's names, where they differ.
_LINEAR_RECIPES = {
    "mxfp8_emulated": "mxfp8_emulated_floor",
    "mxfp8_cublas": "mxfp8_floor",
    "mxfp8_cublas_rceil": "mxfp8_rceil",
}


def _text(value: object) -> str:
    """Returns the value of an enum member (Moxie's or torchao's) or a string, in lower case."""
    return str(value.value if isinstance(value, enum.Enum) else value).lower()


def _member(op: str, field: str, kind: type[enum.Enum], value: object) -> enum.Enum:
    try:
        return kind(_text(value))
    except ValueError:
        names = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise ValueError(f"{op}: {field} must be one of {names}, got {value!r}") from None


def _out(op: str, dtype: torch.dtype | None) -> Literal["input", "bfloat16", "float32"]:
    known: dict[torch.dtype | None, Literal["input", "bfloat16", "float32"]] = {
        None: "input",
        torch.bfloat16: "bfloat16",
        torch.float32: "float32",
    }
    if dtype not in known:
        raise TypeError(
            f"{op}: out_dtype must be torch.bfloat16, torch.float32, or None for that of the activations, got {dtype}"
        )
    return known[dtype]


def _recipe_from(op: str, recipe: object, kinds: tuple[type[enum.Enum], ...]) -> Recipe:
    text = _text(recipe)
    if "fp4" in text:
        raise ValueError(f"{op}: there is no FP4 here, got {recipe!r}")
    text = _LINEAR_RECIPES.get(text, text)
    if text.partition(":")[0] not in recipe_names():
        names = [member.value for kind in kinds for member in kind]
        raise ValueError(f"{op}: there is no recipe {recipe!r}; there are {', '.join(names)}")
    return Recipe.from_name(text)


@dataclasses.dataclass(unsafe_hash=True)
class _Config:
    """The base of all configs. An illegal combination of fields raises when the config is made, not in the first forward."""

    # The recipe as text, because code traced by torch.compile can read a string but not a Recipe.
    recipe_text: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        # Set last: __setattr__ starts to check assignments once recipe_text exists.
        self.__dict__["recipe_text"] = str(self.to_recipe())

    def __setattr__(self, name: str, value: object) -> None:
        if "recipe_text" not in self.__dict__:
            self.__dict__[name] = value
            return
        fields = [field.name for field in dataclasses.fields(self) if field.init]
        if name not in fields:
            if name.endswith("cast_kernel_choice"):
                return  # ignored: torchao assigns its choice of kernel to every config, whether or not the field exists
            raise AttributeError(f"{type(self).__name__}: there is no field {name!r}; there are {', '.join(fields)}")
        changes: dict[str, Any] = {name: value}
        self.__dict__.update(dataclasses.replace(self, **changes).__dict__)

    def to_recipe(self) -> Recipe:
        raise NotImplementedError


@dataclasses.dataclass(unsafe_hash=True)
class GroupedMMConfig(_Config):
    """The base of the configs for expert parameters. Use one of its subclasses.

    >>> isinstance(moxie.MXFP8GroupedMMConfig(), moxie.GroupedMMConfig)
    True
    """

    def __post_init__(self):
        if type(self) is GroupedMMConfig:
            raise TypeError("GroupedMMConfig: use MXFP8GroupedMMConfig or FP8GroupedMMConfig")
        if wants_cache(self) not in (False, True, "kn"):
            raise ValueError(f"{type(self).__name__}: weight_cache must be False, True or 'kn', got {wants_cache(self)!r}")
        super().__post_init__()


def _block_recipe(op: str, config: "MXFP8GroupedMMConfig | MXLinearConfig") -> Recipe:
    # Replace strings and torchao's enum members by Moxie's, so that configs that mean the same compare equal.
    kernels = _member(op, "kernel_preference", KernelPreference, config.kernel_preference)
    rule = _member(op, "scale_calculation_mode", ScaleCalculationMode, config.scale_calculation_mode)
    config.__dict__.update(kernel_preference=kernels, scale_calculation_mode=rule)
    if not isinstance(config.wgrad_with_hp, bool):
        raise TypeError(f"{op}: wgrad_with_hp must be True or False, got {config.wgrad_with_hp!r}")
    return Recipe(
        rule=rule.value,
        kernels=kernels.value,
        out=_out(op, config.out_dtype),
        wgrad_with_hp=config.wgrad_with_hp,
        activations=config.activations,
        weights=config.weights,
        wgrad_dy=config.wgrad_dy,
        wgrad_x=config.wgrad_x,
    )


def _block_fields(recipe: Recipe) -> dict:
    return dict(
        kernel_preference=KernelPreference(recipe.kernels),
        wgrad_with_hp=recipe.wgrad_with_hp,
        scale_calculation_mode=ScaleCalculationMode(recipe.rule),
        activations=recipe.activations,
        weights=recipe.weights,
        wgrad_dy=recipe.wgrad_dy,
        wgrad_x=recipe.wgrad_x,
        out_dtype=None if recipe.out == "input" else getattr(torch, recipe.out),
    )


@dataclasses.dataclass(unsafe_hash=True)
class MXFP8GroupedMMConfig(GroupedMMConfig):
    """MXFP8 for the products of experts.

    - `out_dtype`: the dtype of the product; None means the dtype of the activations, as in torch's own product.
    - `pad_token_groups_for_grouped_mm`: accepted, and without effect: any group sizes work, and nothing is padded.
    - `activations`, `weights`, `wgrad_dy`, `wgrad_x`: the blocks, as in `moxie.Recipe`.
    - `weight_cache`: weights are quantized once per optimizer step (`moxie.refresh_after`), not in every forward. True for
      parameters [G, N, K], as most models store them; "kn" for [G, K, N].

    >>> config = moxie.MXFP8GroupedMMConfig.from_recipe(moxie.MXFP8GroupedMMRecipe.MXFP8_RCEIL)
    >>> config == moxie.MXFP8GroupedMMConfig() and str(config.to_recipe()) == str(moxie.Recipe.from_name("mxfp8_rceil"))
    True
    """

    kernel_preference: KernelPreference = KernelPreference.AUTO
    out_dtype: torch.dtype | None = None
    wgrad_with_hp: bool = False
    scale_calculation_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL
    pad_token_groups_for_grouped_mm: bool = False
    activations: Block = "1x32"
    weights: Block = "1x32"
    wgrad_dy: Block = "32x1"
    wgrad_x: Block = "32x1"
    weight_cache: WeightCacheField = False

    @classmethod
    def from_recipe(cls, recipe: MXFP8GroupedMMRecipe | str) -> "MXFP8GroupedMMConfig":
        found = _recipe_from("MXFP8GroupedMMConfig.from_recipe", recipe, (MXFP8GroupedMMRecipe,))
        if found.scaling != "block":
            raise ValueError(
                f"MXFP8GroupedMMConfig.from_recipe: {_text(recipe)} is not MXFP8; "
                "FP8GroupedMMConfig.from_recipe takes fp8_rowwise"
            )
        return cls(**_block_fields(found))

    def to_recipe(self) -> Recipe:
        return _block_recipe("MXFP8GroupedMMConfig", self)


@dataclasses.dataclass(unsafe_hash=True)
class FP8GroupedMMConfig(GroupedMMConfig):
    """FP8 with one power-of-two scale per row, for the products of experts; any group sizes.

    >>> moxie.FP8GroupedMMConfig(float8_linear_recipe="rowwise_with_gw_hp").to_recipe().wgrad_with_hp
    True
    """

    float8_dtype: torch.dtype = torch.float8_e4m3fn
    out_dtype: torch.dtype | None = None
    pad_token_groups_for_grouped_mm: bool = False
    float8_linear_recipe: str = "rowwise"
    weight_cache: WeightCacheField = False

    @classmethod
    def from_recipe(cls, recipe: FP8GroupedMMRecipe | str) -> "FP8GroupedMMConfig":
        found = _recipe_from("FP8GroupedMMConfig.from_recipe", recipe, (FP8GroupedMMRecipe,))
        if found.scaling != "row":
            raise ValueError(
                f"FP8GroupedMMConfig.from_recipe: {_text(recipe)} has no scale per row; MXFP8GroupedMMConfig.from_recipe takes it"
            )
        return cls(float8_linear_recipe="rowwise_with_gw_hp" if found.wgrad_with_hp else "rowwise")

    def to_recipe(self) -> Recipe:
        if self.float8_dtype != torch.float8_e4m3fn:
            raise TypeError(f"FP8GroupedMMConfig: float8_dtype must be torch.float8_e4m3fn, got {self.float8_dtype}")
        if self.float8_linear_recipe not in ("rowwise", "rowwise_with_gw_hp"):
            raise ValueError(
                "FP8GroupedMMConfig: float8_linear_recipe must be rowwise or rowwise_with_gw_hp, got "
                f"{self.float8_linear_recipe!r}"
            )
        return Recipe("row", wgrad_with_hp=self.float8_linear_recipe != "rowwise", out=_out("FP8GroupedMMConfig", self.out_dtype))


@dataclasses.dataclass(unsafe_hash=True)
class MXLinearConfig(_Config):
    """MXFP8 for nn.Linear. `block_size` must be 32: larger blocks are set by `activations`, `weights`, `wgrad_dy` and `wgrad_x`.

    torchao's choices of quantizers, `mxfp8_dim0_cast_kernel_choice` and `mxfp8_dim1_cast_kernel_choice`, are without effect.

    >>> config = moxie.MXLinearConfig.from_recipe_name(moxie.MXLinearRecipeName.MXFP8_CUBLAS_RCEIL)
    >>> config.scale_calculation_mode.name
    'RCEIL'
    """

    block_size: int = 32
    elem_dtype: torch.dtype = torch.float8_e4m3fn
    elem_dtype_weight_override: torch.dtype | None = None
    elem_dtype_grad_output_override: torch.dtype | None = None
    kernel_preference: KernelPreference = KernelPreference.AUTO
    mxfp8_dim0_cast_kernel_choice: MXFP8Dim0CastKernelChoice = MXFP8Dim0CastKernelChoice.TORCH
    mxfp8_dim1_cast_kernel_choice: MXFP8Dim1CastKernelChoice = MXFP8Dim1CastKernelChoice.TORCH
    scale_calculation_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL
    out_dtype: torch.dtype | None = None
    wgrad_with_hp: bool = False
    activations: Block = "1x32"
    weights: Block = "1x32"
    wgrad_dy: Block = "32x1"
    wgrad_x: Block = "32x1"
    weight_cache: bool = False

    def __post_init__(self):
        if self.weight_cache not in (False, True):
            raise ValueError(f"MXLinearConfig: weight_cache must be False or True, got {self.weight_cache!r}")
        choices = (MXFP8Dim0CastKernelChoice, MXFP8Dim1CastKernelChoice)
        for field, kind in zip(("mxfp8_dim0_cast_kernel_choice", "mxfp8_dim1_cast_kernel_choice"), choices):
            self.__dict__[field] = _member("MXLinearConfig", field, kind, getattr(self, field))
        super().__post_init__()

    @classmethod
    def from_recipe_name(cls, recipe_name: MXLinearRecipeName | str) -> "MXLinearConfig":
        found = _recipe_from("MXLinearConfig.from_recipe_name", recipe_name, (MXLinearRecipeName, MXFP8GroupedMMRecipe))
        if found.scaling != "block":
            raise ValueError(
                f"MXLinearConfig.from_recipe_name: {_text(recipe_name)} is not MXFP8; "
                "quantize_ takes its name, or a moxie.Recipe, in place of a config"
            )
        return cls(**_block_fields(found))

    from_recipe = from_recipe_name

    def to_recipe(self) -> Recipe:
        if self.block_size != 32:
            raise ValueError(
                "MXLinearConfig: block_size must be 32; larger blocks are activations=, weights=, wgrad_dy= and "
                f"wgrad_x=, or the recipe mxfp8_rceil_128, got {self.block_size}"
            )
        for field in ("elem_dtype", "elem_dtype_weight_override", "elem_dtype_grad_output_override"):
            value = getattr(self, field)
            if value != torch.float8_e4m3fn and not (value is None and field != "elem_dtype"):
                raise TypeError(f"MXLinearConfig: {field} must be torch.float8_e4m3fn, got {value}")
        return _block_recipe("MXLinearConfig", self)


# Everything that quantize_ accepts as a config. A recipe or its name can convert both linears and experts.
AnyConfig = GroupedMMConfig | MXLinearConfig | Recipe | str


def recipe_of(config: AnyConfig, op: str = "quantize_") -> Recipe:
    """Returns the recipe that a config stands for; refuses anything that is not a config."""
    if isinstance(config, Recipe):
        return config
    if isinstance(config, enum.Enum):
        config = config.value
    if isinstance(config, str):
        return _recipe_from(op, config, (MXFP8GroupedMMRecipe, FP8GroupedMMRecipe))
    if isinstance(config, (GroupedMMConfig, MXLinearConfig)):
        return config.to_recipe()
    got = f"the class {config.__name__}; call it" if isinstance(config, type) else f"{type(config).__name__}"
    raise TypeError(
        f"{op}: config must be an MXFP8GroupedMMConfig, FP8GroupedMMConfig, MXLinearConfig, FqnToConfig, "
        f"moxie.Recipe or the name of a recipe, got {got}"
    )


def wants_cache(config: AnyConfig) -> WeightCacheField:
    return getattr(config, "weight_cache", False)
