"""`regard look --cut … --ablate …`: what is typed becomes edits, and the difference to the answer is said."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.cli.test_look import look
from tests.editing.by_hand import MAKE

import regard
from regard import edits
from regard.cli import acting
from regard.recording import load

TEXT = "The cat sat, because it was tired."


def test_a_cut_edge_is_gone_in_the_recording_and_the_difference_is_printed(tmp_path: Path) -> None:
    given = ("minilm", TEXT, "--out", str(tmp_path / "run"), "--cut", "it>cat", "--ablate", "3.5,2")
    code, printed, said = look(*given)
    assert (code, said) == (0, "")
    assert "cut(queries='it', keys='cat'): changed 6 calls, layers 0 … 5, 72 heads" in printed
    assert "ablate('zero'): changed 1 call, layer 3, 1 head\n" in printed
    assert (
        "cosine of the embedding (mean over tokens) before and after: 0." in printed
        and "moved most (cosine of each token): it 0." in printed
    )
    recording = load(tmp_path / "run.regard")
    assert recording.title.endswith(" · --cut it>cat · --ablate 3.5,2")
    assert "--cut it&gt;cat · --ablate 3.5,2</h1>" in (tmp_path / "run.html").read_text(encoding="utf-8")
    tokens = recording.tokens[0]
    head = recording[2, 4]
    assert head.map.shape[0] == len(tokens)
    assert float(head.map[tokens.index("it"), tokens.index("cat")]) == 0.0
    code, printed, _ = look(*given, "--json")
    found = json.loads(printed)
    assert len(found["heads"]) == 72 and 0.5 < found["answer"]["cosine"] < 0.9999 and len(found["edits"]) == 3


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(40)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def test_a_model_that_writes_says_what_comes_next(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MAKE["llama"]()
    for weight in model.parameters():
        weight.data.normal_(0.0, 0.3)
    model.save_pretrained(tmp_path / "llama")
    _write_tokenizer(tmp_path / "llama")
    ids = torch.tensor([[3, 14, 15, 9]])
    given = (str(tmp_path / "llama"), "w3 w14 w15 w9", "--out", str(tmp_path / "run"))
    code, printed, said = look(*given, "--cut", "1@-1>w14,0", "--json")
    assert code == 0, said
    found = json.loads(printed)["answer"]
    with torch.no_grad():
        plain = model.eval()(input_ids=ids).logits
        with regard.edit(model, edits.cut(queries=-1, keys=[1, 0]), layers=[1]):
            changed = model(input_ids=ids).logits
    best = int(plain[0, -1].argmax())
    assert found["next"][0]["token"] == f"w{best}"
    assert found["next"][0]["before"] == pytest.approx(float(plain[0, -1].softmax(-1)[best]), rel=1e-4)
    assert found["next"][0]["after"] == pytest.approx(float(changed[0, -1].softmax(-1)[best]), rel=1e-4)
    loss = torch.nn.functional.cross_entropy(plain[0, :-1], ids[0, 1:])
    assert found["perplexity"]["before"] == pytest.approx(float(loss.exp()), rel=1e-4)
    code, printed, _ = look(*given, "--ablate", "0")
    assert "what comes next, before and after:\n  'w" in printed and "perplexity of the text: " in printed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:4", (edits.cut(keys=slice(0, 4)), None, None, ())),
        ("it > cat", (edits.cut(queries="it", keys="cat"), None, None, ("it", "cat"))),
        ("3.5@-1>cat,dog,2", (edits.cut(queries=-1, keys=["cat", "dog", 2]), 3, 5, ("cat", "dog"))),
        ('3@"a,b",","', (edits.cut(keys=["a,b", ","]), 3, None, ("a,b", ","))),
        ('2@"@"', (edits.cut(keys="@"), 2, None, ("@",))),
        ("4:>:2", (edits.cut(queries=slice(4, None), keys=slice(None, 2)), None, None, ())),
        ("it>", (edits.cut(queries="it"), None, None, ("it",))),
        ("0:2,5,cat", (edits.cut(keys=[slice(0, 2), 5, "cat"]), None, None, ("cat",))),
    ],
)
def test_what_is_typed(text: str, expected: Any) -> None:
    assert acting.typed([text], []) == [(*expected, f"--cut {text}")]


def test_a_text_is_given_to_edits_that_name_its_tokens() -> None:
    """An edit of the encoder does not read the decoder's text, which is another one."""
    seen: list[Any] = []

    @contextlib.contextmanager
    def edit(*_: Any, tokens: Any, **__: Any) -> Any:
        seen.append(tokens)
        yield

    given = acting.typed(["0", "it>0"], ["1.2"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regard, "edit", edit)
        with acting.edited(None, given, [["it"]]):
            pass
    assert seen == [None, [["it"]], None]


def test_the_answer_of_a_model_of_pictures_and_texts_is_what_they_become() -> None:
    class Out(dict):  # type: ignore[type-arg]
        __getattr__ = dict.get

    one, other = torch.randn(1, 8), torch.randn(1, 8)
    found = acting.answer(Out(logits_per_image=one @ other.T, image_embeds=one, text_embeds=other), None)
    assert torch.equal(found.states, torch.cat([one, other]))


def test_what_cannot_be_read_or_done_is_said_in_one_line(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "run"))
    for arguments, expected in [
        (("--cut", ">"), "--cut '>' names no tokens; expected KEYS or QUERIES>KEYS"),
        (("--cut", "x@cat"), "--cut has 'x'; expected LAYER.HEAD, such as 3.5"),
        (("--ablate", "3."), "--ablate has '3.'; expected LAYER.HEAD"),
        (("--ablate", "²"), "--ablate has '²'; expected LAYER.HEAD"),
        (("--ablate", "9.1"), "--ablate 9.1 names layer 9, and the layers that attend are 0 … 5"),
        (
            ("--ablate", "3.12"),
            "--ablate 3.12 names head 12, and encoder.layer.3.attention.self (layer 3) has 12 heads",
        ),
        (("--cut", "it>cat", "--cut", "2.12@0"), "--cut 2.12@0 names head 12, and"),
        (("--cut", "cat>it", "--cut", "dog"), "--cut dog has 'dog', which is not among the tokens"),
        (("--cut", "0:2,dog"), "--cut 0:2,dog has 'dog', which is not among the tokens"),
        (("--cut", "40"), "--cut 40 changed nothing in 6 calls: no call had these queries and keys"),
    ]:
        code, printed, said = look("minilm", TEXT, *arguments, *out)
        assert (code, printed) == (2, "") and expected in said and said.count("\n") == 1, said
        assert not re.search(r"layers=|heads=|keys=|queries=|cut\(|ablate\(", said)
        assert "cannot read" not in said  # the option is wrong, not the model
