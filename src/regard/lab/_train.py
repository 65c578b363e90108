"""Training as the experiments do it: small, seeded, on one thread, so that the number of cores changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # tokens [batch, token] and, for each of them, what is to be answered


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[torch.Generator]:
    """A generator for the data. Inside, torch's own draws follow the seed too; outside, they go on undisturbed."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield torch.Generator().manual_seed(seed)
        finally:
            torch.set_num_threads(threads)


def fit(model: nn.Module, draw: Callable[[], Batch], *, steps: int, rate: float = 3e-3) -> list[float]:
    """Adam on the cross entropy of the answers; a target of −100 is not asked. Returns the loss of every step."""
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        tokens, answers = draw()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, -2), answers.flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def right(model: nn.Module, batch: Batch) -> float:
    """The share of right answers among those that are asked."""
    tokens, answers = batch
    asked = answers != -100
    hits: Tensor = (model(tokens).argmax(-1) == answers)[asked]
    return hits.double().mean().item()
