"""RMS norms of every family as one native call, in the three forms that there are.

    plain              n * weight           Llama, Qwen, Mistral, ...
    one plus weight    n * (1 + weight)     Gemma
    without weight     n                    Gemma 3n's values, Llama 4's queries

with n = x / sqrt(mean(x^2) + eps). A norm is taken by what it computes: a copy of it with random weights is run on
random input, and one of the three must agree with it; a class that only has the name of one is found out. In half
precision the native norm must also be as near to the exact result as the module's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from mmserve.kernels.library import kernels
from mmserve.model.replace_checks import overridden, plain_attributes

__all__ = ["replace_norms"]

_EPSILONS: Final = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_TOLERANCE: Final = 1e-5
_DTYPES: Final = (torch.bfloat16, torch.float32)

_Weight = Callable[[torch.Tensor], torch.Tensor]
_FORMS: Final[dict[str, _Weight]] = {
    "plain": lambda weight: weight,
    "one plus weight": lambda weight: 1.0 + weight.float(),
}


def replace_norms(model: nn.Module, done: frozenset[nn.Module]) -> Iterator[tuple[str, str, str | None]]:
    """Replace every RMS norm that can be, in place.

    Args:
        model: A loaded model on the CPU.
        done: Modules whose insides run no more, since a native layer stands for them.

    Yields:
        (name of the norm, its form, None), or (name, "", why it stays).
    """
    tried: dict[object, tuple[str, str | None]] = {}
    inside = {part for module in done for part in module.modules()}
    for name, module in model.named_modules():
        if "RMSNorm" not in type(module).__name__ or module in inside:
            continue
        reason = _unlike_a_norm(module)
        if reason is not None:
            yield name, "", reason
            continue
        kind = (type(module), _width(module), _dtype(module, model), plain_attributes(module))
        if kind not in tried:
            tried[kind] = _form(module, _dtype(module, model))
        form, reason = tried[kind]
        if reason is None:
            reason = _take_over(module, form, _dtype(module, model))
        yield name, "" if reason else form, reason


def _unlike_a_norm(norm: nn.Module) -> str | None:
    """Why this module can not be an RMS norm of one vector of weights, or None."""
    name = type(norm).__name__
    if (reason := overridden(norm)) is not None:
        return reason
    tensors = any(isinstance(value, torch.Tensor) for value in vars(norm).values())
    if tensors or any(True for _ in norm.children()) or any(True for _ in norm.buffers()):
        return f"{name} has parts of its own"
    parameters = dict(norm.named_parameters())
    if set(parameters) - {"weight"}:
        return f"{name} has parameters {', '.join(sorted(parameters))}"
    if "weight" in parameters and (parameters["weight"].dim() != 1 or parameters["weight"].dtype not in _DTYPES):
        return f"{name} has a weight of {tuple(parameters['weight'].shape)} in {parameters['weight'].dtype}"
    if _eps(norm) is None:
        return f"{name} names no epsilon"
    return None


def _eps(norm: nn.Module) -> float | None:
    values = (getattr(norm, name, None) for name in _EPSILONS)
    return next((value for value in values if isinstance(value, float)), None)


def _weight(norm: nn.Module) -> torch.Tensor | None:
    weight: torch.Tensor | None = norm._parameters.get("weight")
    return weight


def _width(norm: nn.Module) -> int | None:
    weight = _weight(norm)
    return None if weight is None else weight.shape[0]


def _dtype(norm: nn.Module, model: nn.Module) -> torch.dtype:
    """Of what it is given: its weight's, or the model's."""
    weight = _weight(norm)
    return weight.dtype if weight is not None else next(model.parameters()).dtype


def _form(norm: nn.Module, dtype: torch.dtype) -> tuple[str, str | None]:
    """Which of the forms a norm computes, or why none of them."""
    random = torch.Generator().manual_seed(0)
    twin = copy.deepcopy(norm).float()
    weight = _weight(twin)
    if weight is not None:
        weight.data = torch.randn(weight.shape, generator=random)
    width, eps = weight.shape[0] if weight is not None else 24, _eps(norm)
    assert eps is not None
    # Large rows, and rows so small that epsilon decides.
    x = torch.randn(2, 4, width, generator=random) * torch.tensor([100.0, 1.0, 0.01, 1e-4])[:, None]
    try:
        expected = twin(x.clone())
    except Exception as error:  # noqa: BLE001 - whatever it needs besides, it is not one of ours
        return "", f"{type(norm).__name__} does not run on hidden states alone: {type(error).__name__}"
    if not isinstance(expected, torch.Tensor) or expected.shape != x.shape:
        return "", f"{type(norm).__name__} does not give one tensor like its input"
    for form, scale in _FORMS.items() if weight is not None else [("without weight", torch.ones_like)]:
        given = kernels().rms_norm(x, scale(weight if weight is not None else x[0, 0]), eps)
        if _agree(given, expected):
            return form, None if dtype == torch.float32 else _rounds_worse(twin, x, form, dtype)
    return "", f"{type(norm).__name__} computes something else than an RMS norm"


def _agree(given: torch.Tensor, expected: torch.Tensor) -> bool:
    """Row by row, relative to the largest value of the row."""
    size = expected.abs().amax(-1).clamp(min=1e-30)
    return bool(((given - expected).abs().amax(-1) / size).max() < _TOLERANCE)


def _rounds_worse(twin: nn.Module, x: torch.Tensor, form: str, dtype: torch.dtype) -> str | None:
    """Why the native norm in half precision is not as good as the module's own, or None."""
    half = copy.deepcopy(twin).to(dtype)
    weight, eps = _weight(half), _eps(half)
    assert eps is not None
    x = x.to(dtype)
    own = half(x.clone())
    if own.dtype != dtype:
        return f"{type(twin).__name__} gives {own.dtype} for {dtype}"
    exact = copy.deepcopy(half).double()(x.double())
    given = kernels().rms_norm(x, _native_weight(weight, form, x), eps)
    errors = [float((y.double() - exact).norm() / exact.norm()) for y in (given, own)]
    if errors[0] > 1.2 * errors[1]:
        return f"the native norm rounds worse than {type(twin).__name__} in {dtype}: {errors[0]:.1e}, {errors[1]:.1e}"
    return None


def _native_weight(weight: torch.Tensor | None, form: str, x: torch.Tensor) -> torch.Tensor:
    """What the kernel multiplies by, in the dtype of `x`."""
    if weight is None:
        return x.new_ones(x.shape[-1])
    return _FORMS[form](weight).to(x.dtype)


def _take_over(norm: Any, form: str, dtype: torch.dtype) -> str | None:
    """Give the module the native forward; its parameters stay where they are."""
    own, weight, eps = norm.forward, _weight(norm), _eps(norm)
    native = None if weight is None else _FORMS[form](weight.data).to(dtype).contiguous()
    assert eps is not None

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or hidden_states.dtype != dtype or hidden_states.device.type != "cpu":
            result: torch.Tensor = own(hidden_states, *args, **kwargs)
            return result
        scale = native if native is not None else hidden_states.new_ones(hidden_states.shape[-1])
        return kernels().rms_norm(hidden_states.contiguous(), scale, eps)

    norm.forward = forward
    return None
