"""Averaged weights, which translate better than the last ones: a running mean, or that of the last checkpoints."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from regard.train._processes import whole
from regard.train._settings import Settings


class Average:
    """`model` holds what is validated and kept: averaged weights, or the trained ones as they are ("none").

    It is a whole model in each process, also where the trained one lies in parts on several.
    """

    def __init__(self, trained: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self.trained = trained
        self.model = copy.deepcopy(trained).eval().requires_grad_(False)
        self.snapshots: list[list[Tensor]] = []  # of "last"

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """EMA. It starts as a plain mean, so that the first steps do not weigh more than they should."""
        if self.settings.average == "ema":
            decay = min(self.settings.ema_decay, step / (step + 9))
            torch._foreach_lerp_(list(self.model.parameters()), self._trained(), 1 - decay)

    def _trained(self) -> list[Tensor]:
        return [whole(each.detach()) for each in self.trained.parameters()]

    @torch.no_grad()
    def before_validation(self) -> None:
        """Bring `model` up to date."""
        if self.settings.average == "none":
            torch._foreach_copy_(list(self.model.parameters()), self._trained())
        if self.settings.average == "last":
            self.snapshots.append([each.clone() for each in self._trained()])
            self.snapshots = self.snapshots[-self.settings.last :]
            for own, many in zip(self.model.parameters(), zip(*self.snapshots, strict=True), strict=True):
                own.copy_(torch.stack(many).mean(0))

    def state(self) -> dict[str, Tensor]:
        if self.settings.average == "none":
            return {}
        found: dict[str, Tensor] = {f"average.{name}": each for name, each in self.model.named_parameters()}
        names = [name for name, _ in self.model.named_parameters()]
        for age, snapshot in enumerate(self.snapshots):
            found |= {f"snapshot.{age}.{name}": each for name, each in zip(names, snapshot, strict=True)}
        return found

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        if self.settings.average == "none":
            return
        for name, own in self.model.named_parameters():
            own.copy_(state[f"average.{name}"])
        self.snapshots = []
        while f"snapshot.{len(self.snapshots)}.{next(iter(self.model.named_parameters()))[0]}" in state:
            age = len(self.snapshots)
            here = [
                state[f"snapshot.{age}.{name}"].to(each.device, copy=True)
                for name, each in self.model.named_parameters()
            ]
            self.snapshots.append(here)
