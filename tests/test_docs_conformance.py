"""docs/conformance.md and docs/new-hardware.md against the program: what they name exists, what
they count is counted here, and the target that they show runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from portattn.__main__ import cli
from portattn.conformance import waivers
from portattn.conformance.case import GROUPS
from portattn.conformance.checks import CATALOGUE
from portattn.conformance.levels import LEVELS
from portattn.conformance.manifest import CHOICES, FEATURES, OPTIONAL, REQUIRED, Manifest
from portattn.conformance.targets import SHIPPED
from portattn.conformance.verdicts import GATES, Verdict

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("conformance.md", "new-hardware.md")


def page(name: str = "conformance.md") -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    """The code blocks of a language, all fences paired in their order."""
    pairs = re.findall(r"^```(\w*)\n(.*?)^```$", page(name), re.DOTALL | re.MULTILINE)
    return [text for found, text in pairs if found == language]


def section(title: str) -> str:
    text = page()
    start = re.search(rf"^#+ {re.escape(title)}$", text, re.MULTILINE)
    assert start, title
    end = re.search(r"^#+ ", text[start.end() :], re.MULTILINE)
    return text[start.end() : start.end() + end.start()] if end else text[start.end() :]


def rows(title: str) -> list[list[str]]:
    """The body rows of the table in a section."""
    table = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every portattn command in a block of the two pages, and inline in text."""
    found = []
    for name in PAGES:
        lines = [line for block in blocks(name, "") for line in block.splitlines()]
        lines += re.findall(r"`(portattn [^`]+)`", page(name))
        for line in lines:
            words = shlex.split(line, comments=True)
            if words and words[0] == "portattn":
                found.append((name, words[1:]))
    return found


@pytest.mark.parametrize(
    ("name", "words"), commands(), ids=lambda x: " ".join(x) if isinstance(x, list) else x
)
def test_commands_and_options_exist(name: str, words: list[str]) -> None:
    """Each is parsed by the command that it names, without being run."""
    command: click.Command = cli
    context, path = click.Context(cli), list[str]()
    while isinstance(command, click.Group):
        assert len(words) > len(path), f"{name}: portattn {' '.join(path)} alone is no command"
        found = command.get_command(context, words[len(path)])
        assert found is not None, f"{name}: no command {words[len(path)]!r}"
        command = found
        path.append(words[len(path)])
    known = {option for param in command.params for option in param.opts}
    used = {word for word in words if word.startswith("-")}
    assert used <= known, f"{name}: {' '.join(path)} has no {sorted(used - known)}"
    told = CliRunner().invoke(cli, [*path, "--help"], prog_name="portattn")
    assert told.exit_code == 0, told.output
    assert told.output.startswith(f"Usage: portattn {' '.join(path)}")


def test_the_pages_name_commands() -> None:
    assert {words[1] for _, words in commands() if words[0] == "conformance"} >= {
        "run", "list", "verify", "diff", "replay", "report", "merge", "mutants", "onnx",
    }  # fmt: skip


def test_links_lead_somewhere() -> None:
    for name in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page(name).replace("\n", "")):
            if target.startswith("http"):
                continue
            path, _, anchor = target.partition("#")
            file = (DOCS / path).resolve() if path else DOCS / name
            assert file.exists(), f"{name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
                assert anchor in slugs, f"{name}: {target}"


def test_catalogue_table() -> None:
    """One row a group: how many checks, and how many rest below each level."""
    wanted = []
    for letter, title in [*GROUPS.items(), ("", "all")]:
        levels = Counter(c.level for c in CATALOGUE.values() if letter in ("", c.group))
        counts = [str(levels[n] or "") for n in (*range(len(LEVELS)), None)]
        wanted.append([f"{letter} {title}".strip(), str(levels.total()), *counts])
    lines = "\n".join("| " + " | ".join(row) + " |" for row in wanted)
    assert rows("The catalogue") == wanted, f"the table should be:\n{lines}"


def test_verdict_table() -> None:
    named = [name.strip() for row in rows("Verdicts") for name in row[0].split(",")]
    assert sorted(named) == sorted(Verdict)


def test_level_table() -> None:
    assert [row[:2] for row in rows("Levels")] == [[name, text] for name, text in LEVELS.items()]
    page_levels = re.findall(r"^\| (L\d) \|", page("new-hardware.md"), re.MULTILINE)
    assert page_levels == list(LEVELS)


def test_what_rests_on_a_level() -> None:
    """The table's last column, as far as it names groups."""
    groups = {n: {c.group for c in CATALOGUE.values() if c.level == n} for n in range(len(LEVELS))}
    assert groups[0] == set("FXKEMDCPH")
    assert groups[1] == {"H"}
    assert groups[2] == {"R"}
    assert {"B", "R"} <= groups[3]
    assert groups[4] <= {"M", "D", "R"}
    assert groups[5] == {"T"}


def test_manifest_table() -> None:
    keys: dict[str, str] = {}
    text: dict[str, str] = {}
    for names, value, default in rows("The manifest"):
        for name in re.findall(r"`(\w+)`", names):
            keys[name], text[name] = default, value
    # The suite alone writes unasked_dtypes; the page tells of it apart.
    assert set(keys) == {*REQUIRED, *OPTIONAL} - {"unasked_dtypes"}
    assert "`unasked_dtypes`" in section("The manifest")
    assert {name for name, default in keys.items() if default == "needed"} == set(REQUIRED)
    plain = {field.name: field.default for field in fields(Manifest)}
    shown = {
        name: default.strip('"')
        for name, default in keys.items()
        if default not in ("needed", "one of the two", "both")
    }
    said = {name: list(x) if isinstance(x, tuple) else x for name, x in plain.items()}
    defaults = {name: "null" if said[name] is None else str(said[name]) for name in shown}
    assert shown == defaults
    for name, choices in CHOICES.items():
        assert all(f'"{choice}"' in text[name] for choice in choices), name


def test_features_and_targets_are_all_named() -> None:
    listed = re.search(r"^Features: (.*?)\n\n", page(), re.DOTALL | re.MULTILINE)
    assert listed
    assert tuple(re.findall(r"`(\w+)`", listed[1])) == FEATURES
    listed = re.search(r"^Targets that ship: (.*?)\. ", page(), re.DOTALL | re.MULTILINE)
    assert listed
    assert tuple(re.findall(r"`([\w-]+)`", listed[1])) == tuple(SHIPPED)
    named = set(re.findall(r"`([\w-]+)`", page("new-hardware.md"))) & {*SHIPPED, "torch"}
    assert {"torch-flash", "flex"} <= named


def test_gates_are_those_of_the_program() -> None:
    text = section("Exactness: E1 to E4")
    assert f"Above {GATES['e2'].warn}: QUALITY_WARNING; above {GATES['e2'].fail:g}: FAIL" in text
    assert GATES["e1_prob"].warn == GATES["e1_det"].fail == GATES["e3"].fail == 1


def test_waiver_example(tmp_path: Path) -> None:
    (text,) = blocks("conformance.md", "toml")
    assert tomllib.loads(text)
    file = tmp_path / "waivers.toml"
    file.write_text(text)
    (waiver,) = waivers.read(file)
    assert waiver.covers("F04/float32", "NVIDIA H200")


def test_the_target_of_the_page_runs(tmp_path: Path) -> None:
    """As a reader would: saved as mine.py, run from its folder."""
    (text,) = blocks("conformance.md", "python")
    (tmp_path / "mine.py").write_text(text)
    env = {**os.environ, "PORTATTN_DATA_DIR": str(tmp_path / "data")}
    ran = subprocess.run(
        [
            sys.executable, "-m", "portattn", "conformance", "run", "--target", "mine:Mine",
            "--tier", "smoke", "--checks", "F01,F13,X02,H04,K01,K02,K03,E01,E06,M09,C02,C03,P05",
        ],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "FAIL" not in ran.stdout
    assert ran.stdout.count(" PASS ") == 13, ran.stdout
