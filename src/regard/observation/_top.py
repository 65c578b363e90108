"""The k largest numbers of each row with their columns, exactly: descending, ties to the lower column."""

from __future__ import annotations

import torch
from torch import Tensor

# Columns of a group. The k largest of a row lie in the k groups with the largest maxima (ties to the earlier group):
# each group ahead of another holds a number that ranks before all of that other's.
_GROUP = 32


def top_of(numbers: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, columns), each [..., min(k, columns)], of a tensor of finite numbers."""
    width = numbers.shape[-1]
    k = min(k, width)
    if numbers.dtype != torch.float32:
        values, columns = torch.sort(numbers, dim=-1, descending=True, stable=True)
        return values[..., :k], columns[..., :k]
    whole = width // _GROUP * _GROUP
    if width <= 4 * k * _GROUP:
        columns = _ranked(numbers, torch.arange(width, device=numbers.device), k)
        return numbers.gather(-1, columns), columns
    grouped = numbers[..., :whole].reshape(*numbers.shape[:-1], -1, _GROUP)
    best = grouped.amax(-1)
    groups = _ranked(best, torch.arange(best.shape[-1], device=best.device), k)
    inside = torch.arange(_GROUP, device=numbers.device)
    candidates = (groups.unsqueeze(-1) * _GROUP + inside).flatten(-2)
    if whole < width:
        rest = torch.arange(whole, width, device=numbers.device)
        candidates = torch.cat([candidates, rest.expand(*candidates.shape[:-1], -1)], -1)
    columns = _ranked(numbers.gather(-1, candidates), candidates, k)
    return numbers.gather(-1, columns), columns


def _ranked(numbers: Tensor, columns: Tensor, k: int) -> Tensor:
    """The columns of the k largest numbers; number and column packed into one integer, so that ties have an order."""
    # as integers, floats >= 0 keep their order and negative ones come below
    high = numbers.contiguous().view(torch.int32).to(torch.int64) << 32
    packed = high | (0xFFFFFFFF - columns)
    return 0xFFFFFFFF - (packed.topk(k, -1).values & 0xFFFFFFFF)
