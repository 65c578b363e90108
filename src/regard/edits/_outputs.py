"""`ablate` and `patch`: what a head wrote, before the output projection, replaced by something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._checks import as_int
from regard.edits import _places
from regard.edits._edit import Change, Edit, Place
from regard.edits._places import Where
from regard.recording import Recording

_HOW = ("zero", "mean", "resample")
_WHAT = ("output", "pattern")


@dataclass(frozen=True, repr=False)
class Ablate(Edit):
    how: str
    reference: Recording | None
    queries: Any
    seed: int
    acts_on_output = True
    by_numbers = True

    @property
    def counts_queries(self) -> bool:  # type: ignore[override]
        return self.queries is not None

    def output(self, out: Tensor, place: Place) -> Tensor | None:
        rows = place.once("rows", lambda: _places.queries(self.queries, place))
        if not (place.queries if self.queries is None else rows.any()):
            return None
        if self.how == "zero":
            new = place.once(("zero", out.dtype), lambda: out.new_zeros(())).expand_as(out)
        else:
            source = self._source(out, place)  # [head, any, dim]
            if self.how == "mean":
                new = source.mean(1)[None, :, None].to(out).expand_as(out)
            else:
                draw = torch.Generator().manual_seed(self.seed + 1_000_003 * place.layer + place.turn)
                at = torch.randint(source.shape[1], (out.shape[0], out.shape[2]), generator=draw)
                new = source[:, at.to(source.device)].transpose(0, 1).to(out)
        return (
            new
            if self.queries is None
            else torch.where(torch.from_numpy(rows)[:, None, :, None].to(out.device), new, out)
        )

    def _source(self, out: Tensor, place: Place) -> Tensor:
        """Outputs of real queries, [head, any, dim]."""
        if self.reference is None:
            rows = _real_rows(out, place.real)
            if rows.shape[1] == 1:
                raise place.refuse(
                    f"it has one query, so ablate({self.how!r}) would put back what the head wrote there: give "
                    "reference=, the recording of another run"
                )
            return rows
        found = kept_of(self.reference, "output", place)
        parts = [_real_rows(one.output, one.real) for one in found]
        if parts[0].shape[0] != out.shape[1] or parts[0].shape[2] != out.shape[3]:
            raise place.refuse(
                f"the reference has {parts[0].shape[0]} heads of {parts[0].shape[2]} numbers here, and this call "
                f"{out.shape[1]} of {out.shape[3]}"
            )
        return torch.cat(parts, 1).to(out.device)

    def __repr__(self) -> str:
        return f"ablate({self.how!r}{_reference(self.reference)}{_queries(self.queries)})"


def ablate(how: str, reference: Recording | None = None, *, queries: Where | None = None, seed: int = 0) -> Ablate:
    """A head's output replaced where it leaves the attention call, before the output projection.

    The rest of the model runs on. It makes no difference how projections are laid out (fused, split, packed): the
    output of the call has its heads apart.

    Args:
        how: "zero"; "mean", the mean of what the head wrote; "resample", for each query what the head wrote at another
            place, drawn at random.
        reference: the run whose outputs those are, ``regard.watch(model, keep=("output",))``; when None, the call
            itself (its own batch and tokens, without padding), which a token that is decoded alone does not allow.
        queries: only at these tokens; all when None.
        seed: of the draw.
    """
    if how not in _HOW:
        raise ValueError(f"ablate takes one of {', '.join(map(repr, _HOW))}, got {how!r}")
    number = as_int(seed)
    if number is None:
        raise TypeError(f"seed must be an int, got {seed!r}")
    if reference is not None:
        _check_recording(reference, "reference", "output")
        if how == "zero":
            raise ValueError('reference is given with ablate("zero"), which needs none')
    return Ablate(how, reference, _places.checked("queries", queries), number)


@dataclass(frozen=True, repr=False)
class Patch(Edit):
    recording: Recording
    what: str
    queries: Any

    @property
    def acts_on_output(self) -> bool:  # type: ignore[override]
        return self.what == "output"

    @property
    def by_numbers(self) -> bool:  # type: ignore[override]
        return self.what == "output"

    @property
    def counts_queries(self) -> bool:  # type: ignore[override]
        return self.queries is not None

    @property
    def adds_edges(self) -> bool:  # type: ignore[override]
        return self.what == "pattern"

    def change(self, place: Place) -> Change | None:
        return Change(pattern=self._of_turn(place).pattern) if self.what == "pattern" else None

    def output(self, out: Tensor, place: Place) -> Tensor | None:
        rows = place.once("rows", lambda: _places.queries(self.queries, place))
        if self.what != "output" or not rows.any():
            return None
        new = self._of_turn(place).output
        if new.shape[1:] != out.shape[1:] or new.shape[0] not in (1, out.shape[0]):
            raise place.refuse(
                f"its output is {list(out.shape)} [batch, head, query, dim], and that of the recording "
                f"{list(new.shape)}: patch from a run of the same length"
            )
        new = new.to(out).expand_as(out)
        return (
            new
            if self.queries is None
            else torch.where(torch.from_numpy(rows)[:, None, :, None].to(out.device), new, out)
        )

    def _of_turn(self, place: Place) -> Any:
        found = kept_of(self.recording, self.what, place)
        if place.turn >= len(found):
            raise place.refuse(f"the recording has {len(found)} calls of it, and this is call {place.turn + 1}")
        return found[place.turn]

    def __repr__(self) -> str:
        return f"patch(<recording of {self.recording.title}>, what={self.what!r}{_queries(self.queries)})"


def patch(recording: Recording, what: str = "output", *, queries: Where | None = None) -> Patch:
    """What a head did in another run, put into this one.

        with regard.watch(model, keep=("output",)) as clean:
            model(**prompt)
        with regard.edit(model, edits.patch(clean), layers=[3], heads=[5]):
            model(**corrupted)

    Args:
        recording: the other run, recorded with ``keep=("output",)`` or ``keep=("pattern",)``. The n-th call of a layer
            in the block takes what its n-th call there did.
        what: "output", what the heads wrote; or "pattern", their weights: query and key of the other run, with the
            values of this one.
        queries: only at these tokens, for "output"; all when None.
    """
    if what not in _WHAT:
        raise ValueError(f"patch takes what='output' or what='pattern', got {what!r}")
    if what == "pattern" and queries is not None:
        raise ValueError("queries= goes with what='output'; a pattern is patched whole")
    _check_recording(recording, "recording", what)
    return Patch(recording, what, _places.checked("queries", queries))


def kept_of(recording: Recording, what: str, place: Place) -> list[Any]:
    found = [one for one in recording.kept.get(place.site, ()) if getattr(one, what) is not None]
    if not found:
        raise place.refuse(f"the recording holds no {what} of it")
    return found


def _check_recording(given: object, name: str, what: str) -> None:
    if not isinstance(given, Recording):
        raise TypeError(f"{name} must be a regard.Recording, got {type(given).__name__}")
    if not any(getattr(one, what) is not None for calls in given.kept.values() for one in calls):
        raise ValueError(
            f"{name} holds no {what}s: record them with regard.watch(model, keep=({what!r},)); files do not hold them"
        )


def _real_rows(out: Tensor, real: Tensor | None) -> Tensor:
    rows = out.transpose(0, 1)  # [head, batch, query, dim]
    return rows.flatten(1, 2) if real is None else rows[:, real.to(out.device)]


def _reference(recording: Recording | None) -> str:
    return "" if recording is None else f", reference=<recording of {recording.title}>"


def _queries(where: Any) -> str:
    return "" if where is None else f", queries={_places.shown(where)}"
