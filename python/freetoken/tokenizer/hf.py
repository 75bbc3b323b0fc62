"""Tokenizers of Hugging Face directories, with the ids that transformers' AutoTokenizer gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from freetoken.checkpoints.base import Checkpoint
from freetoken.checkpoints.mapping import read_json_object, read_text
from freetoken.errors import CheckpointError
from freetoken.tokenizer.absent import AbsentTokenizer
from freetoken.tokenizer.base import Tokenizer
from freetoken.tokenizer.chat import ChatTemplate, choose_template
from freetoken.tokenizer.decoders import vocabulary_of
from freetoken.tokenizer.fast import FastEncoder, panics_explained
from freetoken.tokenizer.spm_directory import load_spm_tokenizer
from freetoken.tokenizer.text import SpecialIds, TextTokenizer

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_SAVE_AGAIN = (
    "load the directory with transformers' AutoTokenizer and call save_pretrained on it, which "
    "writes tokenizer.json"
)


@dataclass(frozen=True)
class TokenizerFiles:
    """The small JSON files beside the weights. Absent files are empty mappings."""

    directory: Path
    model_config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]

    @staticmethod
    def of(checkpoint: Checkpoint) -> TokenizerFiles:
        """The files of the directory that holds the checkpoint. What the checkpoint has read
        already is not read again."""
        path = checkpoint.path
        directory = path if path.is_dir() else path.parent
        file = directory / "tokenizer_config.json"
        return TokenizerFiles(
            directory=directory,
            model_config=checkpoint.metadata,
            tokenizer_config=read_json_object(file) if file.is_file() else {},
            generation_config=checkpoint.generation_config,
        )

    def named_tokens(self) -> dict[str, str]:
        """{"bos_token": "<s>", ...} as tokenizer_config.json has them."""
        texts = {name: token_text(self.tokenizer_config.get(name)) for name in _TOKEN_NAMES}
        named = {name: text for name, text in texts.items() if text is not None}
        for name, text in named.items():
            with self._reading(name, "valid Unicode"):
                text.encode("utf-8")  # fails for lone surrogates
        return named

    def added_tokens(self) -> dict[int, AddedToken]:
        """`added_tokens_decoder` of tokenizer_config.json, by id."""
        entries = self.tokenizer_config.get("added_tokens_decoder", {})
        with self._reading("added_tokens_decoder", '{"id": {"content": "text", ...}}'):
            return {int(token_id): _added_token(entry) for token_id, entry in entries.items()}

    def end_ids(self) -> frozenset[int]:
        """The end ids of config.json and generation_config.json: numbers or lists of numbers."""
        sources = (self.model_config, self.generation_config)
        return frozenset(
            token_id for source in sources for token_id in _id_list(source.get("eos_token_id"))
        )

    def chat_template(self) -> ChatTemplate | None:
        """chat_template.jinja if there is one, else what tokenizer_config.json has."""
        file = self.directory / "chat_template.jinja"
        if file.is_file():
            return ChatTemplate(read_text(file), self.named_tokens())
        with self._reading("chat_template", 'a text, or a list of {"name", "template"}'):
            source = _template_source(self.tokenizer_config.get("chat_template"))
        return None if source is None else ChatTemplate(source, self.named_tokens())

    @contextmanager
    def _reading(self, key: str, expected: str) -> Iterator[None]:
        """Turns the failures of reading an odd entry into a CheckpointError."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{key} cannot be read: {error}",
                file=self.directory / "tokenizer_config.json",
                found=repr(self.tokenizer_config[key])[:80],
                expected=expected,
                hint="download the file again",
            ) from error


def load_hf_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of the directory that holds the checkpoint.

    tokenizer.json is preferred, then a SentencePiece tokenizer.model; a directory without any
    tokenizer file gives ids only. Raises CheckpointError for files that cannot be used.
    """
    files = TokenizerFiles.of(checkpoint)
    directory = files.directory
    if (directory / "tokenizer.json").is_file():
        return _load_tokenizer_json(files)
    if (directory / "tokenizer.model").is_file():
        return load_spm_tokenizer(
            directory / "tokenizer.model",
            added=files.added_tokens(),
            config=files.tokenizer_config,
            end_ids=files.end_ids(),
            chat=files.chat_template(),
        )
    if (directory / "vocab.json").is_file():
        raise CheckpointError(
            "has only the old files of its tokenizer",
            file=directory,
            found="vocab.json",
            expected="tokenizer.json, or a SentencePiece tokenizer.model",
            hint=_SAVE_AGAIN,
        )
    bos = _id_list(checkpoint.metadata.get("bos_token_id"))
    return AbsentTokenizer(
        path=directory,
        vocab_size=_model_vocab_size(checkpoint),
        bos_id=bos[0] if bos else None,
        eos_ids=files.end_ids(),
    )


def token_text(entry: object) -> str | None:
    """A token's text in tokenizer_config.json: a string, or an object with `content`."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _load_tokenizer_json(files: TokenizerFiles) -> TextTokenizer:
    path = files.directory / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever is wrong
        raise _unreadable(path, error) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    named = files.named_tokens()
    _add_missing(tokenizer, files, named.values())
    bos = named.get("bos_token")
    eos = named.get("eos_token")
    eos_id = None if eos is None else tokenizer.token_to_id(eos)
    prefix, suffix = _surroundings(tokenizer, path)
    return TextTokenizer(
        encoder=FastEncoder(tokenizer),
        vocabulary=vocabulary_of(tokenizer, path),
        special=SpecialIds(
            bos_id=None if bos is None else tokenizer.token_to_id(bos),
            eos_ids=files.end_ids() | (frozenset() if eos_id is None else {eos_id}),
            prefix=prefix,
            suffix=suffix,
        ),
        chat=files.chat_template(),
    )


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"cannot be read as a tokenizer: {error}",
        file=path,
        expected="a tokenizer.json of the tokenizers library",
        hint="download the file again (a Git LFS pointer of about 130 bytes is not the file)",
    )


def _add_missing(
    tokenizer: tokenizers.Tokenizer, files: TokenizerFiles, named: Iterable[str]
) -> None:
    """Tokens that only tokenizer_config.json has, as transformers adds them."""
    for token_id, token in sorted(files.added_tokens().items()):
        if tokenizer.token_to_id(token.content) is None:
            tokenizer.add_tokens([token])
        found = tokenizer.token_to_id(token.content)
        if found != token_id:
            raise CheckpointError(
                f"gives the added token {token.content!r} another id than tokenizer.json",
                file=files.directory / "tokenizer_config.json",
                found=f"{token_id} in added_tokens_decoder",
                expected=found,
                hint="the two files do not belong together; download both again",
            )
    missing = [token for token in named if tokenizer.token_to_id(token) is None]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in missing])


def _surroundings(
    tokenizer: tokenizers.Tokenizer, path: Path
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    with panics_explained(lambda error: _unreadable(path, error)):
        bare = tokenizer.encode("a", add_special_tokens=False).ids
        full = tokenizer.encode("a", add_special_tokens=True).ids
    start = next(
        (i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare),
        len(full),
    )
    return tuple(full[:start]), tuple(full[start + len(bare) :])


def _model_vocab_size(checkpoint: Checkpoint) -> int:
    size = checkpoint.metadata.get("vocab_size")
    if not isinstance(size, int):
        raise CheckpointError(
            "has neither a tokenizer nor the size of its vocabulary",
            file=checkpoint.path,
            found=f"vocab_size {size!r} in config.json",
            expected="tokenizer.json, tokenizer.model, or a number for vocab_size",
            hint="download the tokenizer files of the checkpoint too",
        )
    return size


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(entry["content"], **{flag: bool(entry.get(flag)) for flag in flags})


def _id_list(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int]


def _template_source(entry: object) -> str | None:
    """A chat_template entry: the text, {name: text}, or a list of {"name", "template"}."""
    if isinstance(entry, list):
        entry = {item["name"]: item["template"] for item in entry}
    if isinstance(entry, Mapping):
        entry = choose_template(entry)
    if entry is None or isinstance(entry, str):
        return entry
    raise TypeError(f"a template is a text, not {type(entry).__name__}")
