"""What every edit is: a value that says what it changes of an attention call, wherever that is met."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from regard.masks import Mask
    from regard.recording import Site


_MOST_DECIDED = 256  # masks that are new for each pass are decided about anew


class CannotEdit(ValueError):
    """A call that an edit was to change and cannot, or an edit that changed nothing."""


@dataclass(slots=True)
class Place:
    """A call that an edit meets, without its tensors."""

    site: Site
    layer: int
    turn: int  # how many calls of this site the block has met before
    kind: str  # "self" or "cross"
    batch: int
    count: int  # heads of the call
    kv_heads: int  # heads that keys have of their own
    heads: tuple[int, ...]  # those that are edited
    queries: int
    keys: int
    offset: int | Tensor  # position of the first query among the keys
    first: int | Tensor | None  # and among all tokens; None where nothing says which token it is
    read: int | Tensor | None  # keys that are tokens, before memory that is not filled yet; None where nothing says
    dropped: int  # keys that a rolling cache has forgotten, before the first that is here
    device: torch.device
    tokens: list[list[str]]
    goes_on: bool = False  # whether it has a cache: more tokens may follow
    in_order: bool = False  # whether the keys that are here are the tokens after those, one after another
    real: Tensor | None = None  # bool [batch, query]: False where a query is padding
    # bool [batch or 1, head or 1, row, column], the edges that the call has in a rectangle; None where it is not known
    has_edges: Callable[[range, range], Tensor] | None = None
    memory: dict[Any, Any] = field(default_factory=dict)  # what an edit remembers of this site, until the block ends
    alike: Hashable = None  # the same for calls that are alike in all of these numbers; None where tensors say more
    decided: dict[Hashable, Any] | None = None  # what an edit has decided for such calls
    edges: Hashable = None  # what tells ``has_edges`` of calls that are alike apart; None where nothing short does

    @property
    def misplaced(self) -> bool:
        """Whether it is not known which tokens its keys are."""
        return bool(self.dropped) and not self.in_order

    @property
    def forgotten(self) -> str:
        return f"{self.dropped} key{'s' * (self.dropped > 1)}"

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, which the numbers of this place alone decide."""
        if self.decided is None:
            return make()
        if name not in self.decided:
            if len(self.decided) > _MOST_DECIDED:
                self.decided.clear()
            with torch.inference_mode(False), torch.no_grad():  # a later call may want gradients
                self.decided[name] = make()
        return self.decided[name]

    def refuse(self, why: str) -> CannotEdit:
        return CannotEdit(f"{self.site} (layer {self.layer}): {why}")


class Added:
    """``amount`` joins the logits of these queries, [batch or 1, query], with these keys, [batch or 1, key]."""

    def __init__(self, queries: NDArray[np.bool_], keys: NDArray[np.bool_], amount: float) -> None:
        self.queries, self.keys, self.amount = queries, keys, amount
        self.of_all_queries = bool(queries.all())
        self._made: dict[Hashable, Any] = {}

    def factors(self) -> tuple[Tensor, Tensor]:
        """u [batch or 1, query] and b [batch or 1, key], on the CPU: u·b joins the logits."""
        u = torch.from_numpy(self.queries.astype(np.float32))
        return u, torch.from_numpy(self.keys * self.amount)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What is made of it for calls of one kind; it outlives the call."""
        if key not in self._made:
            with torch.inference_mode(False), torch.no_grad():
                self._made[key] = make()
        return self._made[key]


class Change(NamedTuple):
    """What an edit does to the weights of a call. All parts leave heads that are not edited as they are."""

    hide: Mask | None = None  # edges that are taken away
    add: Added | None = None
    pattern: Any = None  # a Pattern of another run, in place of the call's own


class Edit:
    """A value of ``regard.edits``: frozen, printable, used by ``regard.edit``."""

    when_idle = ""  # what to say where it changed nothing
    acts_on_output = False
    only_looks = False  # whether it changes nothing, and writes down what it is shown
    by_numbers = False  # whether ``change`` goes by the numbers of a place alone, and by nothing that it remembers
    adds_edges = False  # whether weights that were 0 may be others after it
    counts_queries = False  # whether it matters which tokens the queries of a call are
    wants_mass = False  # whether ``after`` is to be called with the weight that each key received

    def change(self, place: Place) -> Change | None:
        """What becomes of the weights; None where this call stays as it is."""
        return None

    def output(self, out: Tensor, place: Place) -> Tensor | None:
        """The output [batch, head, query, dim] of all heads in place of ``out``; None where it stays as it is. Only
        the heads of the place are taken from it."""
        return None

    def after(self, mass: Tensor, place: Place) -> None:
        """Told what each key received, [batch, head, key], from the queries that ``mass_of`` names."""

    def mass_of(self, place: Place) -> slice | Tensor | None:
        """A slice, bool [batch, query], or None for all."""
        return None

    def saw(self, pattern: Any, place: Place) -> None:
        """Told what the weights of the call came from, after all changes."""
