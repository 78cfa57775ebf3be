"""Tensor classes for converted weights: their products with activations run through Moxie, all other ops run as usual.

Models rarely multiply by a parameter itself. They take a view of it (a transpose, one expert), cast it, or add an adapter's
update to it first. The results of these ops are therefore `ConvertedTensor`s, which remember the conversion. All other ops return
plain tensors.
"""

import copy
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moxie.config import AnyConfig, recipe_of, wants_cache
from moxie.gemm import WeightCache, grouped_mm
from moxie.steps import Clock, note
from moxie.torchao_objects import config_from_torchao


class Conversion:
    """The state that a converted parameter shares with its views and copies."""

    def __init__(self, name: str, config: AnyConfig):
        self.name = name
        config = config_from_torchao(config, "quantize_")
        self.config = copy.copy(config)  # a copy, because the caller may assign to fields of the original
        self.recipe = str(recipe_of(config))
        self.cache: WeightCache | None = None
        self.cache_is_transposed = wants_cache(config) == "kn"
        self.used = False  # becomes True when a product uses this conversion
        self.ended = False  # becomes True when this conversion is undone or replaced
        self._record_nothing()

    def _record_nothing(self) -> None:
        self.clock = Clock()  # quantize_ replaces it by one clock for all conversions of the model
        self.forward_step: list | None = None  # the last step in whose forward the weight multiplied
        self.backward_step: list | None = None  # the last step in whose backward the weight multiplied

    def __setstate__(self, state: dict) -> None:
        state = dict(state)
        if "cache_is_turned" in state:  # the field's name in older pickles
            state["cache_is_transposed"] = state.pop("cache_is_turned")
        self._record_nothing()  # older pickles lack these fields
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"Conversion({self.name!r}, {self.config!r})"


class _Converted(Tensor if TYPE_CHECKING else object):  # type: ignore[misc]
    """The base of ConvertedTensor and ConvertedParameter. `_moxie` is the Conversion; `_moxie_transposed` says which view of the
    parameter this is.

    `_moxie_transposed` is False for the whole parameter as it is stored, True for its transpose, None for anything else. The
    weight cache holds the whole parameter, so it serves the first two only.
    """

    _moxie: Conversion
    _moxie_transposed: bool | None
    _moxie_is_sum: bool  # whether another tensor has been added to the parameter (or to a view of it)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = {} if kwargs is None else kwargs
        product = _PRODUCTS.get(func)
        if product is not None and "out" not in kwargs:
            with torch._C.DisableTorchFunctionSubclass():
                out = product(*args, **kwargs)
            if out is not None:
                return out
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if func in _SUMS:
            origin = _summand(args, kwargs, out, _SUMS[func])
            return out if origin is None else _mark(out, origin, None, is_sum=True)
        transposes = _VIEWS.get(func)
        if transposes is None or not isinstance(args[0], _Converted):
            return out
        if func in _DETACH and isinstance(args[0], nn.Parameter):
            return out  # state_dict() detaches parameters, and should hold plain tensors
        if isinstance(out, (tuple, list)):
            return type(out)([_mark(part, args[0], None) for part in out])
        if not isinstance(out, Tensor) or out.dim() == 0:
            return out  # Tensor.type() returns a string; a single element needs no conversion
        return _mark(out, args[0], transposes(args, kwargs, out))

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                data = self.detach().clone(memory_format=torch.preserve_format)
            out = nn.Parameter(data, self.requires_grad) if isinstance(self, nn.Parameter) else data
            memo[id(self)] = out
            out.__class__ = type(self)
            out.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        """Saves a plain tensor or parameter, which torch.load(weights_only=True) accepts; the module saves the conversion."""
        with torch._C.DisableTorchFunctionSubclass():
            data = self.detach().requires_grad_(self.requires_grad)
        plain = nn.Parameter(data, self.requires_grad) if isinstance(self, nn.Parameter) else data
        plain.__dict__.update({name: value for name, value in self.__dict__.items() if name not in _OURS})
        return plain.__reduce_ex__(protocol)


class ConvertedTensor(_Converted, Tensor):
    """A view or a copy of a converted parameter."""


class ConvertedParameter(_Converted, nn.Parameter):
    """A parameter whose products run through Moxie."""


# Attributes that Moxie or torch sets on a parameter. All others are the user's, so the plain copy keeps them.
_OURS = ("_moxie", "_moxie_transposed", "_moxie_is_sum", "_is_param")


def tag(parameter: nn.Parameter, conversion: Conversion, transposed: bool | None = False) -> None:
    parameter.__class__ = ConvertedParameter
    converted = cast(ConvertedParameter, parameter)
    converted._moxie, converted._moxie_transposed, converted._moxie_is_sum = conversion, transposed, False


def _mark(out: Tensor, origin: _Converted, transposed: bool | None, is_sum: bool = False) -> Tensor:
    # Under torch.compile as_subclass fails on the result of an attribute such as .mT, so make a view of it first.
    out = out.view(out.shape) if torch.compiler.is_compiling() else out
    marked = out.as_subclass(ConvertedTensor)
    marked._moxie = origin._moxie
    marked._moxie_transposed = (
        None if transposed is None or origin._moxie_transposed is None else origin._moxie_transposed != transposed
    )
    marked._moxie_is_sum = is_sum or origin._moxie_is_sum
    return marked


# ---- ops whose results keep the conversion -----------------------------------------------------------------------------------

_LAST_TWO = ((-2, -1), (-1, -2), (1, 2), (2, 1))


def _transposed_by_dims(args, kwargs, out) -> bool | None:
    dims = tuple(args[1:]) + tuple(kwargs.values())
    return True if args[0].dim() == 3 and dims in _LAST_TWO else None


def _transposed_by_permute(args, kwargs, out) -> bool | None:
    dims = args[1:] if len(args) > 2 else tuple(args[1]) if len(args) == 2 else tuple(kwargs.get("dims", ()))
    return True if tuple(dims) in ((0, 2, 1), (0, -1, -2)) else None


def _same(args, kwargs, out) -> bool | None:
    return False


def _transposed(args, kwargs, out) -> bool | None:
    return True


def _cast(args, kwargs, out) -> bool | None:
    # False (not transposed): the cast changed nothing and torch returned the parameter itself, so its weight cache still holds.
    # None: a copy, which may be written to, so the cache must not be used.
    same = (out.dtype, out.device) == (args[0].dtype, args[0].device) and "copy" not in kwargs
    return False if same else None


def _part(args, kwargs, out) -> bool | None:
    return None


def _views() -> dict[Callable, Callable]:
    """Maps each torch function whose result keeps the conversion to a function of its arguments that says which view the
    result is: True if it is transposed, False if not, None if it is a part or a copy."""
    views: dict[Callable, Callable] = {torch.Tensor.__getitem__: _part}
    for name, transpose in (("mT", _transposed), ("mH", _transposed), ("T", _part)):
        views[getattr(torch.Tensor, name).__get__] = transpose
    names = {
        _transposed_by_dims: "transpose swapaxes swapdims",
        _transposed_by_permute: "permute",
        _transposed: "adjoint",
        _same: "detach contiguous",
        _cast: "to type type_as bfloat16 float cuda cpu",
        _part: "t select narrow unbind chunk split tensor_split view view_as reshape unsqueeze squeeze flatten unflatten expand "
        "movedim moveaxis clone empty_like index_select",
    }
    for transposes, functions in names.items():
        for name in functions.split():
            for owner in (torch, torch.Tensor):
                function = getattr(owner, name, None)
                if callable(function):  # skips torch.float, which is a dtype, and torch.cuda, a module
                    views[function] = transposes
    return views


_VIEWS = _views()
_DETACH = (torch.Tensor.detach, torch.detach)

# Maps each torch function that adds tensors to the positions of the arguments that may be the converted weight.
_SUMS: dict[Callable, tuple[int, ...]] = {
    torch.add: (0, 1),
    torch.Tensor.add: (0, 1),
    torch.Tensor.__add__: (0, 1),
    torch.Tensor.__radd__: (0, 1),
    torch.sub: (0,),
    torch.Tensor.sub: (0,),
    torch.Tensor.__sub__: (0,),
    torch.baddbmm: (0,),
    torch.Tensor.baddbmm: (0,),
    torch.addmm: (0,),
    torch.Tensor.addmm: (0,),
}


def _summand(args, kwargs, out, places: tuple[int, ...]) -> _Converted | None:
    """Returns the converted weight among the terms of a sum, or None if the terms do not all have its shape."""
    terms = args if args else tuple(kwargs[name] for name in ("input", "other") if name in kwargs)
    found = [terms[place] for place in places if place < len(terms) and isinstance(terms[place], _Converted)]
    if not found or not isinstance(out, Tensor) or out.shape != found[0].shape:
        return None
    others = [term for term in terms[:2] if term is not found[0]] if len(places) == 2 else []
    same = all(isinstance(term, Tensor) and term.shape == out.shape for term in others)
    return found[0] if same else None


# ---- products -----------------------------------------------------------------------------------------------------------------
# Each function below takes the arguments of a torch function and computes the same product through Moxie. It returns None if no
# argument is a converted weight; __torch_function__ then calls torch's function.


def _cache_of(w: _Converted, transposed: bool) -> WeightCache | None:
    """Returns the weight cache if it matches w: the whole parameter, in the orientation that was cached. Otherwise warns and
    returns None. `transposed` says whether the product uses w transposed."""
    conversion = w._moxie
    if conversion.cache is None:
        return None
    if w._moxie_transposed is not None and (w._moxie_transposed != transposed) == conversion.cache_is_transposed:
        return conversion.cache
    if not torch.compiler.is_compiling():
        stored, other = ("[G, K, N]", True) if conversion.cache_is_transposed else ("[G, N, K]", "kn")
        why = (
            f"the weight cache takes it for {stored}, and the model multiplies by it as the other order; "
            f"weight_cache={other!r} is right for it. Until then"
            if w._moxie_transposed is not None
            else "the weight cache is of the whole parameter, and the model multiplies by a part or a copy of it, so"
        )
        warnings.warn(f"{conversion.name}: {why} it is quantized in every forward.", stacklevel=2)
    return None


def _multiply(x: Tensor, w: _Converted, transposed: bool, offs=None, bias=None, dtype=None) -> Tensor:
    """Multiplies x by w [G, N, K]. If `transposed`, w is [G, K, N], as torch's grouped product takes it."""
    conversion, cache = w._moxie, _cache_of(w, transposed)
    y = grouped_mm(
        x, w.transpose(-2, -1) if transposed else w, offs, recipe=conversion.recipe, bias=bias, dtype=dtype, quantized_w=cache
    )
    note(conversion, y)
    return y


def _multiply_2d(x: Tensor, w: _Converted, transposed: bool, bias=None) -> Tensor:
    """Multiplies x [..., K] by one matrix w [N, K]. If `transposed`, w is [K, N]."""
    conversion = w._moxie
    _cache_of(w, transposed)  # called for its warning only: single matrices have no cache
    matrix = w.t() if transposed else w
    y = grouped_mm(x.reshape(-1, x.shape[-1]), matrix.unsqueeze(0), recipe=conversion.recipe, bias=bias)
    note(conversion, y)
    return y.reshape(*x.shape[:-1], matrix.shape[0])


def _multiply_batch(x: Tensor, w: _Converted, bias=None, dtype=None, *, transposed: bool = True) -> Tensor:
    """Multiplies x [G, T, K] by w [G, K, N] as a grouped product with T rows in each group. If not `transposed`, w is
    [G, N, K]."""
    groups, rows, k = x.shape
    if groups > MAX_GROUPS:
        raise ValueError(
            f"{w._moxie.name}: a product must be of 1 to {MAX_GROUPS} matrices, got {groups}: the model multiplies each row by a "
            'copy of its expert; in transformers model.set_experts_implementation("grouped_mm"), or "moxie" after import '
            "moxie.hf, multiplies by each expert once"
        )
    offs = torch.arange(1, groups + 1, dtype=torch.int32, device=x.device) * rows
    y = _multiply(x.reshape(-1, k), w, transposed, offs, bias, dtype)
    return y.view(groups, rows, y.shape[1])


MAX_GROUPS = 1024  # the limit of one grouped product; the op checks it as well


def _multiplies(w: Tensor, x: Tensor) -> bool:
    """Whether w is a converted weight and x holds activations, so that the product runs through Moxie.

    torch's own product runs if both are weights (a regularizer, an adapter that is being merged), or if the conversion has
    ended while a tensor still refers to it, as tensors that FSDP2 gathered do. A converted x that is a sum counts as activations
    unless w is a sum too: a model may add a parameter, such as position embeddings, to its activations."""
    if not isinstance(w, _Converted) or w._moxie.ended:
        return False
    return not isinstance(x, _Converted) or (x._moxie_is_sum and not w._moxie_is_sum)


def _grouped_mm(input, mat2, offs=None, bias=None, out_dtype=None):
    if not _multiplies(mat2, input) or mat2.dim() != 3:
        return None
    if input.dim() == 2 and offs is not None:
        return _multiply(input, mat2, True, offs, bias, out_dtype)
    return _multiply_batch(input, mat2, bias, out_dtype) if input.dim() == 3 and offs is None else None


def _grouped_mm_of_transformers(input, weight, offs):
    """Replaces transformers::grouped_mm_fallback, the op that transformers calls in compiled graphs if the weights are not
    bf16."""
    return _grouped_mm(input, weight, offs.to(torch.int32))


def _functional_grouped_mm(mat_a, mat_b, *, offs=None, bias=None, out_dtype=None):
    return _grouped_mm(mat_a, mat_b, offs, bias, out_dtype)


def _linear(input, weight, bias=None):
    return _multiply_2d(input, weight, False, bias) if _multiplies(weight, input) and weight.dim() == 2 else None


def _matmul(input, other=None, out_dtype=None, *, tensor2=None):
    if out_dtype is not None:
        return None
    other = tensor2 if other is None else other
    if _multiplies(other, input):
        if other.dim() == 2:
            return _multiply_2d(input, other, True)
        if other.dim() != 3 or input.dim() not in (2, 3) or (input.dim() == 3 and input.shape[0] not in (1, other.shape[0])):
            return None
        return _multiply_batch(input.expand(other.shape[0], -1, -1), other)
    if not _multiplies(input, other):
        return None
    if input.dim() == 2 and other.dim() == 2:  # w times x is the transpose of x^T times w^T
        return _multiply_2d(other.t(), input, False).t()
    if input.dim() == 3 and other.dim() == 3 and input.shape[0] == other.shape[0]:
        return _multiply_batch(other.mT, input, transposed=False).mT
    return None


def _mm(input, mat2, out_dtype=None):
    return _matmul(input, mat2, out_dtype) if input.dim() == 2 and mat2.dim() == 2 else None


def _bmm(input, mat2, out_dtype=None):
    return _matmul(input, mat2, out_dtype) if input.dim() == 3 and mat2.dim() == 3 and len(input) == len(mat2) else None


def _operator(input, other):
    if torch.compiler.is_compiling():
        return _matmul(input, other)
    try:
        return _matmul(input, other)
    except TypeError as error:  # torch would replace it by an error that @ is not defined, and its message would be lost
        raise RuntimeError(str(error)) from error


def _reflected(self, other):
    return _operator(other, self)


def _addmm(input, mat1, mat2, *, beta=1, alpha=1, out_dtype=None):
    if not _multiplies(mat2, mat1) or out_dtype is not None or mat1.dim() != 2 or mat2.dim() != 2 or input.dim() > 2:
        return None
    if input.dim() == 1 and input.shape[0] == mat2.shape[1] and beta == 1 and alpha == 1:
        return _multiply_2d(mat1, mat2, True, input)
    y = alpha * _multiply_2d(mat1, mat2, True)
    return y if beta == 0 else beta * input + y  # addmm ignores `input` if beta is 0, even if it holds NaN


_PRODUCTS: dict[Callable, Callable] = {
    torch._grouped_mm: _grouped_mm,
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _operator,
    torch.Tensor.__rmatmul__: _reflected,
    torch.mm: _mm,
    torch.Tensor.mm: _mm,
    torch.bmm: _bmm,
    torch.Tensor.bmm: _bmm,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
}
if hasattr(F, "grouped_mm"):
    _PRODUCTS[F.grouped_mm] = _functional_grouped_mm


def know_transformers() -> list[Callable]:
    """Adds the op that transformers defines to the known products, once transformers is loaded. Returns the functions under
    which the op can be called."""
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        return []
    packet = torch.ops.transformers.grouped_mm_fallback
    functions = [packet, *(getattr(packet, overload) for overload in packet.overloads())]
    _PRODUCTS.update(dict.fromkeys(functions, _grouped_mm_of_transformers))
    return functions


def is_converted(parameter: object) -> bool:
    return isinstance(parameter, _Converted)
