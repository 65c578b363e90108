"""Models as `regard look` runs them: of transformers, with what prepares their input."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regard._display.texts import reason
from regard.cli import reading
from regard.cli.names import find, quiet, refuse_ours, why_not_loaded
from regard.cli.reading import Read

if TYPE_CHECKING:
    from regard.recording import Recording


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model",
)  # fmt: skip


def transformers_for(why: str) -> Any:
    """Hugging Face's library, or an ImportError that says what it is needed for."""
    try:
        import transformers
    except ImportError:
        raise ImportError(why) from None
    return transformers


class Loaded(NamedTuple):
    model: Any
    folder: Path
    gguf: str | None
    tokenizer: Any  # None where the folder has none


def load(name: str, *, answers: bool = False) -> Loaded:
    """The model in evaluation mode and its tokenizer; only safetensors and GGUF are read, a pickle could run code.
    With ``answers``, a model that writes is loaded with what says the next token."""
    transformers = transformers_for("looking at a model needs transformers: pip install transformers")
    folder, gguf = find(name)
    if gguf is None:
        refuse_ours(folder)
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if gguf is not None:
        local["gguf_file"] = gguf
    with quiet(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(folder, **local)
            weights = {} if gguf is not None else {"use_safetensors": True}
            model = _class_for(transformers, config, answers, gguf).from_pretrained(folder, **local, **weights)
        except Exception as error:
            raise ValueError(f"no model can be loaded from {folder}: {why_not_loaded(folder, error)}") from None
        try:
            tokenizer = (
                transformers.AutoTokenizer.from_pretrained(folder, **local) if _has_tokenizer(folder, gguf) else None
            )
        except Exception as error:
            raise ValueError(f"the tokenizer in {folder} cannot be loaded: {reason(error)}") from None
    return Loaded(model.eval(), folder, gguf, tokenizer)


def _class_for(transformers: Any, config: Any, answers: bool, gguf: str | None) -> Any:
    """A model that writes is loaded with what it writes with, so that its decoder has something of its own to read."""
    names = transformers.models.auto.modeling_auto
    if getattr(config, "is_encoder_decoder", False):
        if config.model_type in names.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
            return transformers.AutoModelForSeq2SeqLM
        if config.model_type in names.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
            return transformers.AutoModelForSpeechSeq2Seq
    stored = (getattr(config, "architectures", None) or [""])[0]
    writes = gguf is not None and config.model_type in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if answers and (writes or stored.endswith(("ForCausalLM", "LMHeadModel"))):
        return transformers.AutoModelForCausalLM
    if config.model_type not in names.MODEL_MAPPING_NAMES:  # vision-encoder-decoder, and others that have one class
        return getattr(transformers, stored, transformers.AutoModel)
    return transformers.AutoModel


def _has_tokenizer(folder: Path, gguf: str | None) -> bool:
    # transformers would make up an empty one where there is none
    return gguf is not None or any((folder / name).is_file() for name in (*TOKENIZER_FILES, "spiece.model"))


# What models call their input: the option that gives it. By option: what prepares it, and who reads the file.
_OPTIONS = {"pixel_values": "--image", "input_features": "--audio", "input_values": "--audio"}
_READERS = {"--image": ("AutoImageProcessor", reading.image), "--audio": ("AutoFeatureExtractor", reading.sound)}


def read(loaded: Loaded, words: str, built_in: bool, image: Path | None, audio: Path | None, length: int) -> Read:
    """The arguments of the call: what the model says it reads, of what was given."""
    model = loaded.model
    wanted = _OPTIONS.get(getattr(model, "main_input_name", "input_ids"))
    given = {"--image": image, "--audio": audio}
    if wanted is not None and given[wanted] is None:
        raise ValueError(
            f"{type(model).__name__} reads {'images' if wanted == '--image' else 'sound'}: give {wanted} FILE"
        )
    found: dict[str, Any] = {}
    for option, file in given.items():
        if file is not None:
            found |= _prepared(loaded, option, file)
    if found and "input_ids" not in _parameters(model):
        if not built_in:
            raise ValueError(f"{type(model).__name__} reads no text: leave it out")
        return Read(found)
    if wanted is not None and built_in:
        return Read(found)
    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.folder} has no tokenizer (tokenizer.json or another), so a text cannot be read")
    read = reading.tokens(loaded.tokenizer, words, _limit(loaded, length))
    return read._replace(given={**found, **read.given})


def _prepared(loaded: Loaded, option: str, file: Path) -> dict[str, Any]:
    """A picture or a sound as the model's own preparation makes it."""
    import transformers

    what = option.removeprefix("--")
    if not any(_OPTIONS.get(name) == option for name in _parameters(loaded.model)):
        nothing = "image" if option == "--image" else "sound"
        raise ValueError(f"{type(loaded.model).__name__} reads no {nothing}: leave {option} out")
    kind, as_numbers = _READERS[option]
    with quiet(transformers):
        try:
            prepare = getattr(transformers, kind).from_pretrained(loaded.folder, local_files_only=True)
        except Exception:
            raise ValueError(f"{loaded.folder} has no preprocessor_config.json to prepare the {what} by") from None
        return as_numbers(prepare, file)


def _parameters(model: Any) -> set[str]:
    import inspect

    return set(inspect.signature(model.forward).parameters)


def _limit(loaded: Loaded, length: int) -> int | None:
    """How many tokens are read: what was asked for, or what the model has positions for."""
    import torch

    config = loaded.model.config
    most = getattr(config, "max_position_embeddings", None)
    if most is None:  # a model of two parts, such as CLIP: what the part that reads text takes
        most = getattr(config.get_text_config(), "max_position_embeddings", None)
    for name, part in loaded.model.named_modules():
        # RoBERTa and its relatives count positions from behind that of padding
        if (
            name.endswith("position_embeddings")
            and isinstance(part, torch.nn.Embedding)
            and part.padding_idx is not None
        ):
            most = part.num_embeddings - part.padding_idx - 1
    if most is not None and length > most:
        raise ValueError(f"--length is {length}; this model takes {most} tokens at most")
    return length or most


def outputs(model: Any, given: dict[str, Any]) -> Any:
    """What the model gives. Whatever goes wrong in there is about this input: one line, with what may be missing."""
    try:
        return model(**given)
    except Exception as error:
        if _raised_by_regard(error):
            raise  # an edit, say, that this model or this text has no place for
        takes = _parameters(model)
        wanted = [option for name, option in _OPTIONS.items() if name in takes and name not in given]
        hint = f"; it also takes {wanted[0]} FILE" if wanted else ""
        raise ValueError(f"{type(model).__name__} cannot read this ({reason(error)}){hint}") from error


def arguments(loaded: Loaded, read: Read) -> dict[str, Any]:
    """The arguments of the call, with what the decoder reads where there is one."""
    given = dict(read.given)
    if getattr(loaded.model.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = written(loaded.model, given)
    return given


def watched(loaded: Loaded, given: dict[str, Any], read: Read, **watch: Any) -> tuple[Recording, Any]:
    """What the model's attention did, with the tokens of both its texts; and what the model gives."""
    import torch

    import regard
    from regard.recording._tokens import ids_to_text

    model, tokenizer = loaded.model, loaded.tokenizer
    with torch.inference_mode(), regard.watch(model, tokenizer=tokenizer, **watch) as recording:
        out = outputs(model, given)
    if not recording.calls:
        raise ValueError("the model made no attention call that can be seen")
    if "decoder_input_ids" in given and tokenizer is not None:
        recording.tokens_from(tokenizer, given["decoder_input_ids"])
        if read.ids is not None:
            recording.source_tokens = ids_to_text(tokenizer, read.ids)
    return recording, out


def _raised_by_regard(error: Exception) -> bool:
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return step is not None and str(step.tb_frame.f_globals.get("__name__")).startswith("regard.")


def written(model: Any, given: dict[str, Any]) -> Any:
    """What the decoder reads: the tokens that the model itself writes, each of which looked at the source."""
    import torch
    import transformers

    with torch.inference_mode(), quiet(transformers):
        if model.can_generate():
            return model.generate(**given, max_new_tokens=32, do_sample=False, num_beams=1)
    start = getattr(model.config, "decoder_start_token_id", None)
    return torch.tensor([[0 if start is None else start]])
