"""The choice of operations for a model: compiled ones, FlexAttention's or torch's."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from covey.models.compiled import CompiledOps
from covey.models.flex import FlexOps
from covey.models.kernels.calls import DTYPES, LANES, MAX_HEAD_WIDTH, available
from covey.models.ops import Heads, Ops, TorchOps


def pick_ops(weight: Tensor, unfit: str) -> Ops:
    """Choose compiled operations if these weights allow them, else torch's, with FlexAttention on a GPU.

    ``unfit`` is the reason why a model cannot use compiled ones (`why_unfit`), or empty.
    """
    if not unfit and available(weight.dtype, weight.device):
        return CompiledOps(weight.dtype)
    return FlexOps() if weight.device.type == "cuda" else TorchOps()


def why_unfit(weight: Tensor, heads: Heads, widths: Mapping[str, int], norm: Tensor, rotated: int) -> str:
    """The first property of a model that the compiled operations cannot compute; empty if there is none.

    ``widths`` are the sizes besides a head's that vectors run over, by their names in a config. Norms need
    the weights' dtype, and the rotation has to turn whole heads (``rotated`` features) in halves.
    """
    # The C code runs over whole vectors without a remainder, halves of a head included.
    uneven = [f"{name} {width}" for name, width in widths.items() if width % LANES]
    if weight.dtype not in DTYPES:
        return f"weights of {str(weight.dtype).removeprefix('torch.')}"
    if norm.dtype != weight.dtype:
        return "norms of another dtype than its weights"
    if heads.interleaved:
        return "a rotation of neighbours"
    if rotated != heads.width:
        return f"a rotation of {rotated} of {heads.width} features"
    if uneven or heads.width % (2 * LANES) or heads.width > MAX_HEAD_WIDTH:
        return f"{uneven[0]}, no multiple of {LANES}" if uneven else f"heads of {heads.width} features"
    # `decode_attend` has room for the queries of 16 heads that share a key head.
    queries_per_key = heads.queries // heads.keys
    return f"{queries_per_key} query heads for each key head" if queries_per_key > LANES else ""
