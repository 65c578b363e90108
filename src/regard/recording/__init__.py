"""What ``regard.watch`` saw: statistics by layer and head, with the tokens they belong to."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard._checks import as_int, as_path, check_count
from regard._display import Widget
from regard.recording._calls import Head, Recorded, Site
from regard.recording._labels import THRESHOLDS, describe, has_nan
from regard.recording._scores import Scores
from regard.recording._summary import Summary
from regard.recording._tokens import checked_tokens, ids_to_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard._page._show import Page
    from regard.statistics import Want

__all__ = ["THRESHOLDS", "Head", "Recorded", "Recording", "Scores", "Site", "Summary", "load"]


class Recording(Widget):
    """Attention calls in the order in which they ran.

        recording.summary()                    # one row per layer
        recording[3, 5].entropy                # layer 3, head 5: one number per query
        recording.tokens = ["The", " cat"]     # text for the positions, for all of the above
        recording.plot(layer=3, head=5)
        recording.save("run.regard"); recording = regard.Recording.load("run.regard")
        recording.to_html("run.html")
        pandas.DataFrame(recording.to_dicts())

    Calls that could not be observed are in ``missed``, with the reason.
    """

    def __init__(self, title: str = "attention") -> None:
        self.title = title
        self.calls: list[Recorded] = []
        self.sites: list[Site] = []
        self.missed: list[tuple[str, str]] = []  # (module, why its call has no statistics)
        self.kept: dict[Site, list[Any]] = {}  # what ``watch(keep=…)`` keeps for ``regard.edits``; not in files
        # "model" and "text" where a command made it from these alone: `regard serve` runs them again for exact detail
        self.origin: dict[str, str] = {}
        self._tokens: list[list[str]] = []
        self._source_tokens: list[list[str]] = []
        self._described: dict[int, tuple[Recorded, list[dict[str, Any]]]] = {}

    @property
    def tokens(self) -> list[list[str]]:
        """The text of each position, one list an item of the batch; assign a list of strings, or one an item."""
        return self._tokens

    @tokens.setter
    def tokens(self, given: Sequence[str] | Sequence[Sequence[str]]) -> None:
        tokens = checked_tokens(given, "tokens")
        self._check_length("tokens", tokens, [call for call in self.calls if call.kind == "self"])
        self._tokens = tokens

    @property
    def source_tokens(self) -> list[list[str]]:
        """The same for the encoder of an encoder-decoder model: what its cross attention looks at."""
        return self._source_tokens

    @source_tokens.setter
    def source_tokens(self, given: Sequence[str] | Sequence[Sequence[str]]) -> None:
        tokens = checked_tokens(given, "source_tokens")
        self._check_length("source_tokens", tokens, self.calls)
        self._source_tokens = tokens

    def _check_length(self, name: str, tokens: list[list[str]], calls: Sequence[Recorded]) -> None:
        """Tokens of another length would stand at the wrong places. The last one generated was never read."""
        lengths = {n for call in calls for n in (call.queries + call.first_key, call.keys + call.first_key)}
        lengths |= {max(lengths) + 1} if lengths else set()
        if lengths and any(len(item) not in lengths for item in tokens):
            given = sorted({len(item) for item in tokens})
            seen = sorted(lengths)[:-1]
            raise ValueError(
                f"{name} has {', '.join(map(str, given))} entries for one item, and the model read "
                f"{', '.join(map(str, seen[-4:]))}: give one string for each token, special ones and padding too"
            )

    def add(
        self,
        weights: Any,
        name: str = "by hand",
        *,
        kind: str = "self",
        want: Want | None = None,
        query_offset: int | None = None,
    ) -> Recorded:
        """Write down attention whose weights you have: for code that ``regard.watch`` cannot read.

            recording.add(weights, "decoder.layers.3", kind="cross")

        Args:
            weights: [batch, head, query, key], before dropout; rows of zeros are missing (padding).
            name: the layer they belong to, a path of your choice; calls of one name are one layer.
            kind: "self", or "cross" when the keys are another sequence.
            want: which statistics; ``regard.Want()`` when None.
            query_offset: position of the first query among the keys; keys − queries when None, 0 for "cross".
        """
        from regard.recording._by_hand import added

        if query_offset is not None:
            check_count("query_offset", query_offset, -(1 << 40))
        return added(self, weights, name, kind, want, query_offset)

    def tokens_from(self, tokenizer: Any, ids: Any) -> None:
        """Take the tokens from a tokenizer and the ids [batch, token] that the model was given."""
        self._tokens = ids_to_text(tokenizer, ids)

    def at(self, layer: int | str) -> list[Recorded]:
        """The calls of one layer, by its number or its module's path."""
        index = self._layer(layer)
        return [call for call in self.calls if call.layer == index]

    def select(self, layer: int | str, head: int, *, call: int = 0, item: int = 0) -> Head:
        """One head in one call of a layer (the first unless told), for one item of the batch."""
        calls = self.at(layer)
        if not -len(calls) <= call < len(calls):
            raise IndexError(f"layer {layer!r} has {len(calls)} recorded calls; there is no call {call}")
        chosen = calls[call]
        if not 0 <= item < chosen.batch:
            raise IndexError(f"item {item} of the batch was not recorded; there are {chosen.batch}")
        return Head(chosen, head, item, self.query_tokens(chosen, item), self.key_tokens(chosen, item))

    def __getitem__(self, place: tuple[int | str, int] | tuple[int | str, int, int]) -> Head:
        if not isinstance(place, tuple) or len(place) not in (2, 3):
            raise TypeError("recording[layer, head] or recording[layer, head, call]; recording.at(layer) lists calls")
        layer, head, *call = place
        return self.select(layer, head, call=call[0] if call else 0)

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Recorded]:
        return iter(self.calls)

    def cpu(self) -> Recording:
        """The same with its statistics on the CPU (``watch(keep_on_cpu=False)`` leaves them on the device)."""
        if all(call.cpu() is call for call in self.calls):
            return self
        moved = copy.copy(self)
        moved.calls, moved._described = [call.cpu() for call in self.calls], {}
        return moved

    @property
    def bytes(self) -> int:
        """Memory that the statistics take."""
        return sum(call.bytes for call in self.calls)

    def query_tokens(self, call: Recorded, item: int = 0) -> list[str]:
        """The text of a call's queries, for one item of the batch; a position where it is not known."""
        first = int(call.positions[item if len(call.positions) > 1 else 0]) + call.first_key
        return _names(self._text(call, item, of_keys=False), range(first, first + call.queries))

    def key_tokens(self, call: Recorded, item: int = 0) -> list[str]:
        """The text of a call's keys, likewise: the source's in cross attention."""
        return _names(self._text(call, item, of_keys=True), range(call.first_key, call.first_key + call.keys))

    def described(self, call: Recorded) -> list[dict[str, Any]]:
        """For each item and head of a call: mean entropy, share on the first key, label …"""
        kept = self._described.get(id(call))
        if kept is None or kept[0] is not call:
            kept = self._described[id(call)] = (call, describe(call.cpu()))
        return kept[1]

    def to_dicts(self) -> list[dict[str, Any]]:
        """One flat dict for each call, item and head: ``pandas.DataFrame(recording.to_dicts())``."""
        return [
            {
                "layer": call.layer,
                "module": call.path,
                "kind": call.kind,
                "phase": call.phase,
                "pass": call.number,
                "queries": call.queries,
                "keys": call.keys,
                "written_out": call.written_out,
                **row,
            }
            for call in self.calls
            for row in self.described(call)
        ]

    def summary(self, lang: str = "en") -> Summary:
        """A table: for each layer its mean entropy, weight on the first key, distance, tokens and kinds of heads.

        It is in English, or in Chinese with ``lang="zh"``.
        """
        return Summary(self.cpu(), checked_language(lang))

    def scores(self, *, queries: slice | None = None) -> Scores:
        """How much each head does of what heads are known to do: one row for each head of self attention.

        Each is a mean over the queries that have such a key, of the weight that they give to
        previous, next: the token before, or after, the query.
        duplicate: other places with the query's token.
        induction: what followed other places with the query's token.
        copying: other places with the token that comes next in the text.
        retrieval: the share of queries whose largest weight lies on such a place (after Wu et al., 2024).
        sink: the first key that is seen at all; over all queries.
        The last query of a call has no next token, so a decode step of one token adds nothing to copying and retrieval:
        for those, give the whole text to the model at once.

        Needs ``regard.watch(model, want=regard.Want(scores=True))``; all but previous, next and sink need a model that
        is given integers [batch, token].

        Args:
            queries: only these rows of each call count, such as those of an answer; all when None.
        """
        return Scores(self, queries)

    def notes(self, lang: str = "en") -> list[str]:
        """What a reader must know: calls without statistics, by reason; calls with statistics that are NaN."""
        from regard._display.texts import text
        from regard.recording._summary_words import WORDS

        checked_language(lang)
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.missed:
            by_reason.setdefault(reason, []).append(path)
        measured = [call for call in self.calls if "value_length" in call.parts]
        alone = [call for call in measured if call.projection is None]
        unseen = [call for call in self.calls if "value_length" not in call.parts] if measured else []
        nan = [call for call in self.calls if has_nan(call)]
        return [
            *(
                text(WORDS, lang, "missed", count=len(paths), reason=reason, path=paths[0])
                for reason, paths in by_reason.items()
            ),
            *(
                text(WORDS, lang, what, count=len(calls), path=calls[0].path)
                for calls, what in ((nan, "nan"), (alone, "alone"), (unseen, "unseen"))
                if calls
            ),
        ]

    def plot(
        self,
        kind: str | None = None,
        *,
        layer: int | str | None = None,
        head: int | None = None,
        call: int = 0,
        item: int = 0,
        lang: str = "en",
    ) -> Figure:
        """A matplotlib figure: "map" (one head, or a layer's heads), "entropy" or "keys" (what receives most).

        Its labels are in English, or in Chinese with ``lang="zh"``, which needs a font that has Chinese letters.
        """
        from regard.recording._plots import draw

        return draw(self.cpu(), kind, layer, head, call, item, checked_language(lang))

    def save(self, path: str | Path) -> None:
        """Write a ``.regard`` file: safetensors with a JSON header. The file is replaced whole or not at all."""
        from regard.recording._files import save

        save(self, as_path("path", path))

    @staticmethod
    def load(path: str | Path) -> Recording:
        """Read a ``.regard`` file; one that is not whole and well-formed raises ValueError."""
        return load(path)

    def to_html(
        self,
        path: str | Path | None = None,
        *,
        against: Recording | None = None,
        layer: int | None = None,
        head: int | None = None,
        lang: str = "en",
        picture: Any = None,
        patches: tuple[int, int] | None = None,
    ) -> Page:
        """A page that needs nothing but a browser; written to ``path`` when given.

        Args:
            path: the file to write; the page is returned in any case, as a string that shows itself in a notebook.
            against: a second recording, to compare with: two prompts, two checkpoints, two models.
            layer, head: where the page opens; at something worth seeing when None.
            lang: "en" or "zh".
            picture: what a vision model was given, [height, width, 3] or [3, height, width]: its patches take the place
                of words.
            patches: rows and columns of patches; by default the largest square that the tokens can hold, what is left
                over standing before them, as a class token does.
        """
        from regard._page._show import written

        if against is not None and not isinstance(against, Recording):
            raise TypeError(f"against must be a Recording, such as Recording.load(path), got {type(against).__name__}")
        opening = {"layer": layer, "head": head, "lang": lang}
        return written(self, path, against, opening, picture, patches)

    def show(self, **options: Any) -> None:
        """Show the page: in the notebook's cell, or in the browser. Takes the keywords of ``to_html``."""
        from regard._page._show import show

        show(self.to_html(**options))

    def __repr__(self) -> str:
        size = f"{self.bytes / 2**20:.1f} MiB"
        return f"<Recording of {self.title}: {len(self.sites)} layers, {len(self.calls)} calls, {size}>"

    def _layer(self, layer: int | str) -> int:
        if isinstance(layer, str):
            paths = [str(site) for site in self.sites]
            if layer not in paths:
                raise KeyError(f"no layer {layer!r} was seen; the layers are {', '.join(paths) or 'none'}")
            return paths.index(layer)
        number = as_int(layer)
        if number is None:
            raise TypeError(f"layer must be its number or its module's path, got {layer!r} ({type(layer).__name__})")
        if not -len(self.sites) <= number < len(self.sites):
            raise IndexError(f"layer {number} was not seen; there are {len(self.sites)}")
        return number % len(self.sites)

    def _text(self, call: Recorded, item: int, of_keys: bool) -> list[str]:
        encoder = any(part.startswith("encoder") for part in call.site.path.split("."))  # ours are encoder_layers
        source = self._source_tokens and (of_keys if call.kind == "cross" else encoder)
        if call.kind == "cross" and of_keys and not self._source_tokens:
            return []
        if call.kind == "self" and not call.of_text:
            return []
        tokens = self._source_tokens if source else self._tokens
        return tokens[item if len(tokens) > 1 else 0] if len(tokens) in (1, call.batch) else []


def checked_language(given: str) -> str:
    from regard._display.texts import LANGUAGES

    if given not in LANGUAGES:
        raise ValueError(f"lang is {given!r}; expected one of {', '.join(LANGUAGES)}")
    return given


def load(path: str | Path) -> Recording:
    """Read a ``.regard`` file; one that is not whole and well-formed raises ValueError."""
    from regard.recording._files import load as read

    return read(as_path("path", path))


def _names(tokens: list[str], positions: range) -> list[str]:
    return [tokens[at] if 0 <= at < len(tokens) else f"[{at}]" for at in positions]
