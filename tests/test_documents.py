"""What the documents name is there: tests, files, commands' flags."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_are_named_exist(document):
    for name, test in re.findall(r"`((?:gpu/)?test_\w+\.py)::(\w+)`", document.read_text()):
        assert test in functions(ROOT / "tests" / name), f"{document.name}: {name}::{test}"


def test_every_case_names_a_test():
    text = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
    cases = re.split(r"^(\d+)\. \*\*", text, flags=re.MULTILINE)[1:]
    numbers, bodies = [int(number) for number in cases[::2]], cases[1::2]
    assert numbers == list(range(1, 29))
    for number, body in zip(numbers, bodies, strict=True):
        assert re.search(r"`(?:gpu/)?test_\w+\.py", body), f"case {number}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_results_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (document.parent / target).exists(), f"{document.name}: {target}"
    for result in re.findall(r"`(benchmarks/results/[\w.-]+\.json)`", text):
        assert (ROOT / result).is_file(), f"{document.name}: {result}"


def test_flags_of_the_command_exist():
    """Of every `trtllm-treewy COMMAND` line in a block of code."""
    from trtllm_treewy.cli import arguments

    (commands,) = arguments._parser()._subparsers._group_actions
    seen = 0
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^[^#\n|`]*\btrtllm-treewy (.+)$", text, flags=re.MULTILINE):
            words = line.split(" #")[0].split()
            parser = commands.choices.get(words[0])
            if parser is None:
                continue  # prose
            if words[0] == "bench":
                (inner,) = parser._subparsers._group_actions
                parser = inner.choices[words[1]]
            for word in words:
                if re.fullmatch(r"--[a-z][a-z-]+", word):
                    assert word in parser._option_string_actions, f"{document.name}: {line}"
                    seen += 1
    assert seen > 10
