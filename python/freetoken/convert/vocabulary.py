"""A Hugging Face tokenizer as GGUF keys.

Whatever is written is read back with our own GGUF tokenizer and compared with the original on
texts of many kinds: a vocabulary that GGUF cannot express is refused, not approximated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf

from freetoken.checkpoints.base import Checkpoint
from freetoken.errors import CheckpointError
from freetoken.models import read_spec
from freetoken.tokenizer import Tokenizer, load_tokenizer
from freetoken.tokenizer.gguf import tokenizer_of_metadata
from freetoken.tokenizer.hf import TokenizerFiles
from freetoken.tokenizer.pretokenizers import PRE_TOKENIZERS
from freetoken.tokenizer.sentencepiece import byte_of_token
from freetoken.tokenizer.spm_model import TokenType, read_sentencepiece_model
from freetoken.tokenizer.stream import check_ids

_LAST_CHOICE = "default"
_PROBES = (
    "Hello, world! It's 2024-05-17, 12345 and 3.14159; we'll SEE what THEY'RE doing.",
    "  leading spaces,\ttabs\n\n\nand   newlines\r\n  ",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2, 3]}  # comment\n",
    "Der Fluß fließt über Ägypten. L'été à la crème brûlée. Привет, мир!",
    "日本語の文章です。中文句子。 नमस्ते दुनिया مرحبا 한국어",
    "XMLHttpRequest camelCase snake_case /usr/local/bin http://a.b/c?d=e&f=g",
    "😀👍🏽 ½ ² Ⅻ \u00a0\u2003x",
    "aaaaaaaa bbbb   cccc 1 22 333 4444 55555",
    "",
    " ",
)


@dataclass
class _Vocabulary:
    """Keys without "tokenizer.ggml."; what `tokenizer_of_metadata` reads and GGUFWriter writes."""

    model: str
    tokens: list[str]
    types: list[TokenType]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    pre: str | None = None
    flags: dict[str, bool] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)

    def metadata(self) -> dict[str, Any]:
        keys: dict[str, Any] = {
            "model": self.model,
            "tokens": self.tokens,
            "token_type": [int(kind) for kind in self.types],
            **self.flags,
            **self.ids,
        }
        if self.pre is not None:
            keys["pre"] = self.pre
        if self.model == "gpt2":
            keys["merges"] = self.merges
        else:
            keys["scores"] = self.scores
        return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def write_vocabulary(checkpoint: Checkpoint, writer: gguf.GGUFWriter) -> None:
    """The tokenizer beside a Hugging Face checkpoint; model `none` if it has none.

    Raises CheckpointError for one that GGUF cannot express.
    """
    original = load_tokenizer(checkpoint)
    directory = checkpoint.path
    if not original.has_text:
        writer.add_tokenizer_model("none")
        for token_id in sorted(original.eos_ids)[:1]:
            writer.add_eos_token_id(token_id)
        return
    files = TokenizerFiles.of(checkpoint)
    vocabulary = _read(directory, files, original)
    rows = read_spec(checkpoint).vocab
    _name_ids(vocabulary, files, original)
    _pad(vocabulary, rows, directory)
    if vocabulary.model == "gpt2":
        vocabulary.pre = _choose_pre(vocabulary, directory, original)
    _check(vocabulary, directory, original)
    _write(vocabulary, writer)
    template = files.chat_template()
    if template is not None:
        writer.add_chat_template(template.source)


def _read(directory: Path, files: TokenizerFiles, original: Tokenizer) -> _Vocabulary:
    described = directory / "tokenizer.json"
    if not described.is_file():
        return _from_sentencepiece(directory / "tokenizer.model", files)
    content = json.loads(described.read_text(encoding="utf-8"))
    model = content["model"]
    if model.get("type") != "BPE":
        raise _inexpressible(directory, f"a {model.get('type')} model", "a BPE model")
    added = {entry["id"]: entry for entry in content.get("added_tokens", [])}
    if not _is_byte_level(content):
        if (directory / "tokenizer.model").is_file():
            return _from_sentencepiece(directory / "tokenizer.model", files)
        return _from_ranks(model, added, described)
    tokens = _table(model["vocab"], added, described)
    types = [_added_type(added.get(i)) for i in range(len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return _Vocabulary("gpt2", tokens, types, merges=merges)


def _is_byte_level(content: Mapping[str, Any]) -> bool:
    return any(step.get("type") == "ByteLevel" for step in _steps(content.get("pre_tokenizer")))


def _steps(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A pre-tokenizer or normaliser, or those of a sequence."""
    if step is None:
        return
    if step.get("type") == "Sequence":
        for inner in step.get("pretokenizers", step.get("normalizers", [])):
            yield from _steps(inner)
    else:
        yield step


def _table(
    vocab: Mapping[str, int], added: Mapping[int, Mapping[str, Any]], file: Path
) -> list[str]:
    """Tokens by id; ids that nobody has become padding."""
    by_id = {token_id: token for token, token_id in vocab.items()}
    by_id.update({token_id: entry["content"] for token_id, entry in added.items()})
    check_ids(by_id.keys(), file)
    return [by_id.get(i, _padding(i)) for i in range(max(by_id) + 1)]


def _added_type(entry: Mapping[str, Any] | None) -> TokenType:
    if entry is None:
        return TokenType.NORMAL
    return TokenType.CONTROL if entry["special"] else TokenType.USER_DEFINED


def _from_ranks(
    model: Mapping[str, Any], added: Mapping[int, Mapping[str, Any]], file: Path
) -> _Vocabulary:
    """SentencePiece's BPE as the tokenizers library keeps it: the order of merges is what the order
    of scores was."""
    tokens = _table(model["vocab"], added, file)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    scores = [-float(ranks.get(token, len(ranks))) for token in tokens]
    types = [
        TokenType.BYTE
        if i not in added and byte_of_token(token) is not None
        else _added_type(added.get(i))
        for i, token in enumerate(tokens)
    ]
    unknown = model.get("unk_token")
    ids = {} if unknown is None else {"unknown_token_id": int(model["vocab"][unknown])}
    if unknown is not None:
        types[ids["unknown_token_id"]] = TokenType.UNKNOWN
    return _Vocabulary("llama", tokens, types, scores=scores, ids=ids)


def _from_sentencepiece(path: Path, files: TokenizerFiles) -> _Vocabulary:
    model = read_sentencepiece_model(path)
    tokens, types, scores = list(model.pieces), list(model.types), list(model.scores)
    for token_id, token in sorted(files.added_tokens().items()):
        while len(tokens) <= token_id:
            tokens.append(_padding(len(tokens)))
            types.append(TokenType.UNUSED)
            scores.append(0.0)
        if types[token_id] in (TokenType.NORMAL, TokenType.UNUSED):
            types[token_id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
            tokens[token_id] = token.content
    return _Vocabulary(
        "llama",
        tokens,
        types,
        scores=scores,
        flags={"add_space_prefix": model.add_dummy_prefix},
        ids={"unknown_token_id": model.unk_id} if model.unk_id >= 0 else {},
    )


def _name_ids(vocabulary: _Vocabulary, files: TokenizerFiles, original: Tokenizer) -> None:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = files.named_tokens().get(f"{name}_token")
        if token in ids:
            vocabulary.ids[f"{key}_token_id"] = ids[token]
    if original.bos_id is not None:
        vocabulary.ids["bos_token_id"] = original.bos_id
    ends = sorted(original.eos_ids)
    if ends:
        vocabulary.ids.setdefault("eos_token_id", ends[0])
        others = [end for end in ends if end != vocabulary.ids["eos_token_id"]]
        for key, end in zip(("eot_token_id", "eom_token_id"), others, strict=False):
            vocabulary.ids[key] = end
    bare, full = original.encode("a", add_special=False), original.encode("a")
    vocabulary.flags["add_bos_token"] = len(full) > len(bare) and full[0] == original.bos_id
    vocabulary.flags["add_eos_token"] = full[-1:] == [vocabulary.ids.get("eos_token_id")]


def _pad(vocabulary: _Vocabulary, rows: int, directory: Path) -> None:
    """One token for each row of the embedding: other programs insist on it."""
    if len(vocabulary.tokens) > rows:
        raise _inexpressible(
            directory, f"{len(vocabulary.tokens)} tokens", f"at most the embedding's {rows} rows"
        )
    for i in range(len(vocabulary.tokens), rows):
        vocabulary.tokens.append(_padding(i))
        vocabulary.types.append(TokenType.UNUSED)
        if vocabulary.model == "llama":
            vocabulary.scores.append(-1e6)


def _padding(token_id: int) -> str:
    return f"[PAD{token_id}]"


def _choose_pre(vocabulary: _Vocabulary, directory: Path, original: Tokenizer) -> str:
    """The name of a way to cut words that gives the original's ids on all probes."""
    names = sorted(PRE_TOKENIZERS, key=lambda name: name == _LAST_CHOICE)
    for name in names:
        vocabulary.pre = name
        if not _differences(vocabulary, directory, original):
            return name
    raise _inexpressible(
        directory,
        "a way to cut words that GGUF has no name for",
        f"one that acts as {', '.join(PRE_TOKENIZERS)}",
    )


def _check(vocabulary: _Vocabulary, directory: Path, original: Tokenizer) -> None:
    differences = _differences(vocabulary, directory, original)
    if differences:
        raise _inexpressible(
            directory,
            f"other ids in GGUF's form for {differences[0]!r}",
            "the same ids for every text",
        )


def _differences(vocabulary: _Vocabulary, directory: Path, original: Tokenizer) -> list[str]:
    """Probes that the GGUF form of the vocabulary gives other ids."""
    written = tokenizer_of_metadata(directory, vocabulary.metadata())
    return [text for text in _PROBES if written.encode(text) != original.encode(text)]


def _write(vocabulary: _Vocabulary, writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre or _LAST_CHOICE)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types([int(kind) for kind in vocabulary.types])
    if vocabulary.model == "gpt2":
        writer.add_token_merges(vocabulary.merges)
    else:
        writer.add_token_scores(vocabulary.scores)
    for key, flag in vocabulary.flags.items():
        writer.add_bool(f"tokenizer.ggml.{key}", flag)
    for key, token_id in vocabulary.ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", token_id)


def _inexpressible(directory: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "the tokenizer cannot be written as GGUF",
        file=directory,
        found=found,
        expected=expected,
        hint="use the checkpoint as it is, or a GGUF file of it as the source",
    )
