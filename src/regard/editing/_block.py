"""``regard.edit``: change the attention of any model while it runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from regard.editing._editor import Editor
from regard.editing._functions import Functions
from regard.editing._report import Report
from regard.edits._edit import CannotEdit, Edit
from regard.recording._tokens import checked_tokens
from regard.watching import _around
from regard.watching._block import check_layers_found, check_paths_found, checked_numbers, listening
from regard.watching._follower import Asked
from regard.watching._modules import LeftBehind, paths


@contextlib.contextmanager
def edit(
    model: nn.Module,
    edits: Edit | Sequence[Edit],
    *,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | Mapping[int | str, Sequence[int]] | None = None,
    tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
    tokenizer: Any = None,
    heads_dim: int | Mapping[str, int] | None = None,
) -> Iterator[Report]:
    """Change every attention call that the model makes inside the block, and say what was changed.

        with regard.edit(model, regard.edits.cut(keys=slice(0, 4)), layers=[3]) as report:
            model(**inputs)
        print(report)                             # cut(keys=slice(0, 4)): changed 1 call, layer 3, 12 heads

    All that ``regard.watch`` sees can be edited: torch's attention function and modules, Hugging Face models, regard's
    own calls, attention that a model writes out. Gradients pass through. Blocks nest, with each other (the innermost
    acts first on a call, and last on its output) and with ``watch``, in any order: a watch records what really ran.
    The model is as it was when the block ends, however it ends.

    A call that is to be edited and cannot be raises ``edits.CannotEdit``, as does a block that changed nothing, or in
    which one edit of a list changed nothing.

    Args:
        model: any module; only calls made while it runs are changed. Other threads may run other models; one that
            runs this model while the block is open gets ``CannotEdit`` there, since its calls would be missed.
        edits: a value of ``regard.edits``, or a list of them.
        layers: numbers (from 0, in the order in which they attend) or module paths, as in ``watch``; all when None.
        heads: which heads of each of them (negative ones count from the last); or heads by layer,
            ``{1: [0], 2: [0, 5]}``, in place of ``layers`` too.
        tokens: text of the positions, one list or one an item, for edits that name tokens by their text.
        tokenizer: gives the tokens of ``input_ids`` instead.
        heads_dim: as in ``watch``, where a model writes attention out in a way that does not show its heads.

    Raises:
        CannotEdit: a call cannot be changed (the message names the module and says why), or nothing was changed.
        ValueError: layers or heads that the model does not have.
    """
    given = _checked(model, edits)
    names = paths(model)
    if isinstance(heads, Mapping):
        if layers is not None:
            raise ValueError("layers is given together with heads by layer, which say both; give one")
        if not heads:
            raise ValueError("heads is an empty mapping, which means no heads at all; leave it out for all of them")
        layers = checked_numbers("layers", list(heads), names)
        of_each = [checked_numbers("heads", one, empty=False) for one in heads.values()]
        chosen: Any = dict(zip(layers or (), of_each, strict=True))
    else:
        layers = checked_numbers("layers", layers, names, empty=False)
        chosen = checked_numbers("heads", heads, empty=False)
    report = Report(", ".join(map(repr, given)))
    texts = [] if tokens is None else checked_tokens(tokens, "tokens")
    asked = Asked(layers, heads_dim=heads_dim, tokenizer=tokenizer)
    with acting(model, given, report, asked, chosen, texts) as editor:
        yield report
        editor.check_ended()
    check_layers_found(editor, layers)
    if editor.longest and any(len(item) > editor.longest + 1 for item in texts):  # the last one written is not read
        raise ValueError(
            f"tokens has {max(map(len, texts))} entries for one item, and the model read {editor.longest}: give one "
            "string for each token, special ones and padding too"
        )
    if not report.calls:
        raise CannotEdit(_nothing(editor, given))
    check_paths_found(editor, layers)
    for number, one in enumerate(given):
        if number not in editor.acted:
            hint = f": {one.when_idle}" if one.when_idle else ""
            raise CannotEdit(f"{one!r} changed nothing, where other edits of the list did{hint}")


@contextlib.contextmanager
def acting(
    model: nn.Module,
    edits: Sequence[Edit],
    report: Report,
    asked: Asked,
    heads: Any = None,
    tokens: Sequence[list[str]] = (),
) -> Iterator[Editor]:
    editor = Editor(model, edits, asked, heads, list(tokens), report)
    with contextlib.ExitStack() as restore:
        restore.enter_context(listening(editor))
        functions = Functions(editor, lambda: _others(editor))
        editor.check_ended, editor.forget_pass = functions.written.check_ended, functions.written.clear
        leaving = model.register_forward_hook(_Leaving(functions), prepend=True)
        restore.callback(leaving.remove)
        restore.callback(functions.written.clear)
        restore.enter_context(functions)
        yield editor


class _Leaving(LeftBehind):
    """A hook on the whole model: an output of attention that the model gives as it is, is edited there."""

    def __init__(self, functions: Functions) -> None:
        self.functions = functions

    def __call__(self, module: nn.Module, args: Any, out: Any) -> Any:
        editor = self.functions.editor
        if threading.get_ident() != editor.thread or editor.busy:
            return None
        found = self._edited(out)
        self.functions.written.check_ended()
        return found

    def _edited(self, out: Any) -> Any:
        if isinstance(out, Tensor):
            new = self.functions.written.edited(out)
            return out if new is None else new
        if type(out) in (tuple, list):
            return type(out)(self._edited(one) for one in out)
        if type(out) is dict:
            return {name: self._edited(one) for name, one in out.items()}
        return out


def _others(editor: Editor) -> bool:
    return any(watcher is not editor for watcher in _around.here())


def _checked(model: object, edits: object) -> list[Edit]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    given: list[Any] = list(edits) if isinstance(edits, (list, tuple)) else [edits]
    if not given:
        raise ValueError("edits is an empty list: give a value of regard.edits, such as edits.ablate('zero')")
    for one in given:
        if not isinstance(one, Edit):
            raise TypeError(
                f"edits must be a value of regard.edits, such as edits.cut(keys=0), or a list, got {type(one).__name__}"
            )
    return given


def _nothing(editor: Editor, edits: Sequence[Edit]) -> str:
    what = ", ".join(map(repr, edits))
    if not editor.passes:
        return f"{what} changed nothing: the model did not run inside the block"
    if not editor.recording.sites:
        return f"{what} changed nothing: the model made no attention call that could be met"
    if editor.layers is not None and not any(editor.turns_met()):
        return f"{what} changed nothing: none of the layers {sorted(map(str, editor.layers))} made an attention call"
    hint = "; ".join(dict.fromkeys(edit.when_idle for edit in edits if edit.when_idle))
    met = sum(editor.turns_met())
    return f"{what} changed nothing in {met} {'call' if met == 1 else 'calls'}{': ' + hint if hint else ''}"
