"""What a model is given to read: a text as tokens, an image, a sound; and how much of a text it took."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from regard._display.texts import Catalogue, text
from regard._display.units import whole
from regard.cli import terminal
from regard.cli.names import quiet

WORDS: Catalogue = {
    "cut": ("read {read} of {all} tokens", "读取了 {all} 个词元中的前 {read} 个"),
    "cut-about": ("read {read} of about {all} tokens", "读取了约 {all} 个词元中的前 {read} 个"),
    "unknown": (
        "{unknown} of {read} tokens are not in the model's vocabulary: it cannot tell them apart",
        "{read} 个词元中有 {unknown} 个不在该模型的词表中：模型分不清它们",
    ),
    "wrote": ("wrote {out}.regard and {out}.html", "已写入 {out}.regard 和 {out}.html"),
    "open": (
        "open {out}.html in a browser to see where every token looks (--open does it)",
        "在浏览器中打开 {out}.html，看每个词元在看哪里（--open 会自动打开）",
    ),
    "no-browser": (
        "no browser could be opened; open {out}.html in one",
        "无法打开浏览器；请在浏览器中打开 {out}.html",
    ),
    "loading": ("loading {model}", "正在加载 {model}"),
    "writing": ("writing the recording and the page", "正在写入记录和网页"),
    "layers": ("{tokens} tokens, layer by layer", "{tokens} 个词元，逐层计算"),
}
# So many characters are tokenized to count a text's tokens; of a longer one, the number is worked out from these.
_COUNTED = 1 << 20
_PER_TOKEN = 24  # characters, more than a token of any language has in the mean


class Read(NamedTuple):
    """The arguments of the model's call, the tokens of it, and of how many the text has."""

    given: dict[str, Any]
    ids: Any = None  # [1, token]
    total: int = 0
    exact: bool = True
    words: str = ""  # the part of the text that those tokens come from
    unknown: int = 0  # of them, how many stand for what the model has no token for

    def note(self, lang: str) -> str:
        """That the text was cut, where it was, and that the model does not know what is in it."""
        if self.ids is None:
            return ""
        read, notes = whole(self.ids.shape[1]), []
        if self.total > self.ids.shape[1]:
            notes.append(text(WORDS, lang, "cut" if self.exact else "cut-about", read=read, all=whole(self.total)))
        if self.unknown:
            notes.append(text(WORDS, lang, "unknown", read=read, unknown=whole(self.unknown)))
        return "\n".join(notes)


def given_text(words: str | None, file: Path | None, otherwise: str) -> str:
    """What was typed, or the contents of a file ("-" is the standard input), or the text that stands for none."""
    if words is not None and file is not None:
        raise ValueError("a text and --file were both given; give one")
    if file is None:
        found = otherwise if words is None else terminal.readable(words)
    else:
        try:
            found = (sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()).decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{'standard input' if str(file) == '-' else file} is not UTF-8 text") from None
    if not found.strip():
        where = "" if file is None else f" ({'standard input' if str(file) == '-' else file})"
        raise ValueError(f"the text is empty{where}; give some words, such as 'The cat sat on the mat.'")
    return found


def tokens(tokenizer: Any, words: str, limit: int | None) -> Read:
    """The first `limit` tokens, without tokenizing more of the text than that needs."""
    read, stands = _tokens(tokenizer, words, limit), getattr(tokenizer, "unk_token_id", None)
    return read if stands is None else read._replace(unknown=int((read.ids == stands).sum()))


def _tokens(tokenizer: Any, words: str, limit: int | None) -> Read:
    if limit is None:
        ids = tokenizer(words, return_tensors="pt")["input_ids"]
        return Read({"input_ids": ids}, ids, ids.shape[1], words=words)
    own = tokenizer.num_special_tokens_to_add()
    if limit <= own:
        raise ValueError(
            f"--length is {limit}; the model's own marks are {own} of the tokens: expected at least {own + 1}"
        )
    size = min(len(words), max(_PER_TOKEN * limit, 2000))
    while True:
        with quiet():  # it warns that a text is longer than the model takes, which is said here in other words
            all_of_it = tokenizer(words[:size], truncation=False)["input_ids"]
        # the last word of a piece is cut somewhere: a few tokens more than wanted leave it out
        if size == len(words) or len(all_of_it) > limit + 16 or size >= _COUNTED:
            break
        size = min(4 * size, len(words), max(_COUNTED, size))
    piece, total, exact = words[:size], len(all_of_it), True
    ids = tokenizer(piece, truncation=True, max_length=limit, return_tensors="pt")["input_ids"]
    if size < len(words) <= _COUNTED:
        total = len(tokenizer(words, truncation=False)["input_ids"])
    elif size < len(words):
        total, exact = round(total * len(words) / size / 100) * 100, False
    return Read({"input_ids": ids}, ids, total, exact, piece)


def image(processor: Any, file: Path) -> dict[str, Any]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ImportError("reading an image needs Pillow: pip install pillow") from None
    try:
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
    except UnidentifiedImageError:
        raise ValueError(f"{file} is not an image that can be read") from None
    return {"pixel_values": processor(images=picture, return_tensors="pt")["pixel_values"]}


def sound(extractor: Any, file: Path) -> dict[str, Any]:
    """A WAV file of 8, 16 or 32 bits; several channels become their mean."""
    import wave

    import numpy as np

    try:
        with wave.open(str(file), "rb") as opened:
            rate, channels, width = opened.getframerate(), opened.getnchannels(), opened.getsampwidth()
            raw = opened.readframes(opened.getnframes())
    except (wave.Error, EOFError) as error:
        raise ValueError(
            f"{file} is not a WAV file that can be read ({error}); to make one: ffmpeg -i {file} -ar 16000 sound.wav"
        ) from None
    kinds = {1: ("u1", 128.0, 128.0), 2: ("<i2", 0.0, 2.0**15), 4: ("<i4", 0.0, 2.0**31)}
    if width not in kinds:
        raise ValueError(f"{file} has {8 * width} bits a sample; 8, 16 and 32 can be read")
    kind, middle, most = kinds[width]
    wave_form = ((np.frombuffer(raw, dtype=kind).astype(np.float32) - middle) / most).reshape(-1, channels).mean(1)
    wanted = getattr(extractor, "sampling_rate", rate)
    if rate != wanted:
        raise ValueError(
            f"{file} has {rate} samples a second, and the model reads {wanted}: ffmpeg -i {file} -ar {wanted} other.wav"
        )
    if not wave_form.size:
        raise ValueError(f"{file} holds no sound")
    found = extractor(wave_form, sampling_rate=rate, return_tensors="pt")
    return {name: found[name] for name in ("input_features", "input_values") if name in found}
