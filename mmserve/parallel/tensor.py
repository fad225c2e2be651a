"""Turns a model into one rank's share of it, along a resolved plan, before any weight is read.

The model stands on the meta device: parameters become empty ones of the rank's own shape, layers that need an exchange
learn which, and what comes back says of each parameter which share of the whole it is, for whoever reads the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmserve.errors import UnsupportedModelError
from mmserve.parallel.group import Group
from mmserve.parallel.layers import GatheredLinear, RowLinear, gather_embedding, look_up_own_rows, sum_output
from mmserve.parallel.shares import HeadShare, Share, share_heads, share_packed, share_width

__all__ = ["shard_model"]

_COLUMN = ("column", "column_gathered", "packed_column")
_ROW = ("row", "row_whole_input", "packed_row")
_KEYS = ("k_proj", "v_proj", "k_norm", "key", "value")
_PARTS = 2
"""A packed weight holds gates and ups, each half of it."""


@dataclass(frozen=True, slots=True)
class _Site:
    """Where a style applies: a module or a parameter, and who owns it."""

    name: str
    owner: Any
    child: str
    style: str


def shard_model(model: Any, plan: Mapping[str, str], group: Group) -> dict[str, Share]:
    """Keep this rank's share of `model`, in place; the share of each parameter that was cut.

    Args:
        model: A transformers model on the meta device.
        plan: Qualified name -> style, as `mmserve.parallel.plan.tensor_plan` gives it.
        group: The ranks that share the model.

    Raises:
        UnsupportedModelError: A style is put on something that it can not shard, or heads do not go round.
    """
    modules = dict(model.named_modules())
    shares: dict[str, Share] = {}
    attentions: dict[str, HeadShare] = {}
    for name, style in plan.items():
        parent, _, child = name.rpartition(".")
        site = _Site(name, modules[parent], child, style)
        heads = _heads_of(site, group)
        if heads is not None:
            attentions[parent] = heads(group.rank)
        if name in modules:
            shares |= _shard_module(modules[name], site, heads, group)
        elif style != "whole":
            share = _deal(site, _dimension(getattr(site.owner, child), site), heads, group)
            if share is not None:
                _cut(site.owner, child, share(group.rank))
                shares[name] = share(group.rank)
    for name, head_share in attentions.items():
        shares |= _shard_attention(name, modules[name], head_share)
    _check_ties(model, shares)
    return shares


def _shard_module(module: Any, site: _Site, heads: Callable[[int], HeadShare] | None, group: Group) -> dict[str, Share]:
    if site.style == "whole":
        return {}
    if site.style == "summed":
        sum_output(module, group)
        return {}
    if site.style == "divided_input":
        module.register_forward_pre_hook(lambda module, args: (args[0] / group.size, *args[1:]))
        return {}
    if site.style in ("vocabulary", "embedding_column"):
        return _shard_embedding(module, site, group)
    if type(module) is not nn.Linear:
        raise UnsupportedModelError(
            f"the tensor-parallel plan shards {site.name}, which is a {type(module).__name__} and not a plain Linear"
        )
    return _shard_linear(module, site, heads, group)


def _shard_linear(
    linear: nn.Linear, site: _Site, heads: Callable[[int], HeadShare] | None, group: Group
) -> dict[str, Share]:
    share = _deal(site, (-2 if site.style in _COLUMN else -1, linear.weight), heads, group)
    assert share is not None
    own, shares = share(group.rank), {}
    _cut(linear, "weight", own)
    shares[f"{site.name}.weight"] = own
    if site.style in _ROW:
        linear.in_features = own.length
        if site.style == "packed_row":
            raise UnsupportedModelError(f"the plan packs the rows of {site.name}, which is one linear layer")
        RowLinear.become(linear, group, own.ranges[0] if site.style == "row_whole_input" else None)
        return shares
    if linear.bias is not None:
        of_bias = Share(-1, own.size, own.ranges, own.parts)
        _cut(linear, "bias", of_bias)
        shares[f"{site.name}.bias"] = of_bias
    if site.style == "column_gathered":
        GatheredLinear.become(linear, group, tuple(share(rank).length for rank in range(group.size)))
    else:
        linear.out_features = own.length
    return shares


def _shard_embedding(embedding: Any, site: _Site, group: Group) -> dict[str, Share]:
    if not isinstance(embedding, nn.Embedding):
        raise UnsupportedModelError(
            f"the tensor-parallel plan shards {site.name} as an embedding, and it is a {type(embedding).__name__}"
        )
    by_row = site.style == "vocabulary"
    dim = -2 if by_row else -1
    size = embedding.weight.shape[dim]
    share = share_width(dim, size, group.rank, group.size)
    _cut(embedding, "weight", share)
    # A lookup outside of the own rows never counts, so no row is special.
    embedding.padding_idx = None
    if by_row:
        look_up_own_rows(embedding, group, share)
    else:
        widths = tuple(share_width(dim, size, rank, group.size).length for rank in range(group.size))
        gather_embedding(embedding, group, widths)
    return {f"{site.name}.weight": share}


def _dimension(parameter: torch.Tensor, site: _Site) -> tuple[int, torch.Tensor]:
    """The dimension of a bare parameter that its style shards: features out stand second to last, features in last."""
    return (-2 if site.style in _COLUMN and parameter.dim() > 1 else -1), parameter


def _deal(
    site: _Site, what: tuple[int, torch.Tensor], heads: Callable[[int], HeadShare] | None, group: Group
) -> Callable[[int], Share] | None:
    """Rank -> its share of a parameter's dimension; None if every rank keeps all of it."""
    dim, parameter = what
    size = parameter.shape[dim]
    if parameter.dim() == 1 and site.style in _ROW:
        return None
    if site.style in ("packed_column", "packed_row"):
        return lambda rank: share_packed(dim, size, _PARTS, rank, group.size)
    if heads is None:
        return lambda rank: share_width(dim, size, rank, group.size)
    if site.child in _KEYS:
        return lambda rank: heads(rank).of_keys(dim, size)
    return lambda rank: heads(rank).of_queries(dim, size)


def _heads_of(site: _Site, group: Group) -> Callable[[int], HeadShare] | None:
    """Rank -> the heads that are its own, if the site is a projection of an attention layer that goes by heads."""
    owner = site.owner
    if site.style not in ("column", "row") or "attention" not in type(owner).__name__.lower():
        return None
    config = getattr(owner, "config", None)
    heads = _first(owner, ("num_heads", "num_attention_heads"), config)
    kv_heads = _first(owner, ("num_key_value_heads", "num_kv_heads"), config) or heads
    if heads is None or kv_heads is None:
        raise UnsupportedModelError(f"{type(owner).__name__} does not say how many heads it has")
    return lambda rank: share_heads(heads, kv_heads, rank, group.size)


def _first(owner: Any, names: tuple[str, ...], config: Any) -> int | None:
    for place in (owner, config):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int):
                return value
    return None


def _shard_attention(name: str, attention: Any, heads: HeadShare) -> dict[str, Share]:
    """What an attention layer holds besides its projections: counts of heads, and norms with a row a head."""
    counts = {
        "num_heads": heads.heads[1] - heads.heads[0],
        "num_attention_heads": heads.heads[1] - heads.heads[0],
        "num_key_value_heads": heads.kv_heads[1] - heads.kv_heads[0],
        "num_key_value_groups": heads.group,
    }
    for attribute, count in counts.items():
        if isinstance(getattr(attention, attribute, None), int):
            setattr(attention, attribute, count)
    shares = {}
    for child, norm in attention.named_children():
        weight = getattr(norm, "weight", None)
        if isinstance(norm, nn.Linear) or weight is None or "norm" not in child:
            continue
        units = heads.num_kv_heads if child in _KEYS else heads.num_heads
        if weight.dim() == 2 and weight.shape[0] == units:
            share = heads.of_keys(-2, units) if child in _KEYS else heads.of_queries(-2, units)
            _cut(norm, "weight", share)
            shares[f"{name}.{child}.weight"] = share
        elif weight.numel() == units * _head_width(attention, heads) and units > 1:
            raise UnsupportedModelError(
                f"{name}.{child} takes a mean over {weight.numel()} features of all heads, and the plan of its layer "
                'leaves each rank its own: the plan must say "colwise_gather_output" and "rowwise_split_input"'
            )
    return shares


def _head_width(attention: Any, heads: HeadShare) -> int:
    """D, or 0 if the layer is not of a kind that says so."""
    projection = getattr(attention, "q_proj", None)
    if projection is None:
        return 0
    return int(projection.out_features // (heads.heads[1] - heads.heads[0]))


def _cut(owner: Any, name: str, share: Share) -> None:
    """An empty parameter of the rank's own shape in place of the whole one."""
    whole = getattr(owner, name)
    shape = share.shape(whole.shape)
    setattr(owner, name, nn.Parameter(torch.empty(shape, dtype=whole.dtype, device=whole.device), requires_grad=False))


def _check_ties(model: Any, shares: Mapping[str, Share]) -> None:
    for one, other in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if shares.get(one) != shares.get(other):
            raise UnsupportedModelError(
                f"the tensor-parallel plan of {type(model).__name__} shards {one} and {other} differently, "
                "and they are one tensor"
            )
