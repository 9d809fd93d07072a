"""The HTML report: complete, escaped, and without a fetch.

A browser opens the report where one is installed. The real record is made by the suite itself;
what no real target does (hostile names, NaN, waivers) is built through the record's own functions.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_kit import BAD, GOOD, HOSTILE, MANIFEST, SHAPE, answered, built, checks, hostile, invoke

from portattn.conformance import record
from portattn.conformance.case import Case, Outcome
from portattn.conformance.checks import CATALOGUE
from portattn.conformance.checks.memory import io_bytes
from portattn.conformance.levels import LEVELS
from portattn.conformance.manifest import FEATURES
from portattn.conformance.reference import Attention
from portattn.conformance.report import facts, plots
from portattn.conformance.report.markup import Markup, element, text
from portattn.conformance.report.page import page
from portattn.conformance.verdicts import Verdict
from portattn.conformance.waivers import Waiver

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
REAL_CHECKS = "F01,H04,H12,K02,K06,B01,R01"


def rendered(*records: Mapping[str, Any]) -> str:
    """The page of records."""
    return page([facts.read(made) for made in records])


class Page(HTMLParser):
    """Elements, attributes and text of a page, as a browser would see them."""

    def __init__(self, source: str):
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.raw: dict[str, str] = {}
        self.text = ""
        self._open: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag in ("script", "style"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag == self._open[-1]:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open:
            self.raw[self._open[-1]] = self.raw.get(self._open[-1], "") + data
        else:
            self.text += data

    def values(self, name: str) -> list[str]:
        """All values of an attribute."""
        return [value or "" for _, its_name, value in self.attributes if its_name == name]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record that the suite made of the NumPy backend, a few checks at the smoke tier."""
    folder = tmp_path_factory.mktemp("record")
    command = [
        sys.executable, "-m", "portattn", "conformance", "run", "--target", "numpy", "--tier",
        "smoke", "--checks", REAL_CHECKS, "-o", str(folder),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT
    )
    assert done.returncode in (0, 1), done.stderr
    return folder / "numpy.json"


@pytest.fixture(scope="session")
def reported(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its report, through the command."""
    output = tmp_path_factory.mktemp("report") / "report.html"
    done = invoke("report", real, "-o", output)
    assert done.exit_code == 0, done.output
    return output


# ---- what it says --------------------------------------------------------------------------------
def test_a_real_record_is_shown_whole(real: Path, reported: Path) -> None:
    made = record.read(real)
    seen = Page(reported.read_text("utf-8"))
    ids = [case_id for check in made["checks"].values() for case_id in check["cases"]]
    assert ids
    for case_id in ids:
        assert case_id.partition("/")[2] in seen.text
    for check in made["checks"].values():
        assert check["title"] in seen.text
    for value in (made["digest"], made["fingerprint"]["numpy"], made["target"]["manifest"]["name"]):
        assert value in seen.text
    assert all(f"{name} {meaning}" in seen.text for name, meaning in LEVELS.items())
    assert made["levels"]["L0"][0] in seen.text
    assert "portattn conformance replay" in seen.text


def test_memory_over_length_is_drawn_beside_its_guides(real: Path, reported: Path) -> None:
    source = reported.read_text("utf-8")
    (series,) = facts.memory(facts.read(record.read(real)))  # R01
    assert source.count("<figure>") == 1
    assert len(series.points) >= 3
    for n, value in series.points:
        assert f"N = {n:,}: {plots.size(value)}" in source
    for kind in ("measured", "linear", "quadratic"):
        assert f'class="curve {kind}"' in source


def test_failures_come_first_with_their_replay_commands() -> None:
    made = built(*BAD)
    seen = Page(rendered(made))
    for case in (c for c, _ in BAD):
        assert record.replay_command(made, case.id) in seen.text
    assert "out[0] is 3, must be 1" in seen.text
    assert "index [0,1], got 3, want 1" in seen.text
    order = [seen.text.index(f"{case_id} ") for case_id in ("H04/b", "F01/a", "K06/c")]
    assert order == sorted(order)  # a crash before a failure, NaN before infinity


def test_the_level_and_why_not_the_next() -> None:
    good = Page(rendered(built(*GOOD))).text
    assert "Level granted: L5 – traffic" in good  # nothing in this catalogue denies it
    assert "is not granted" not in good
    only = checks(("F01", "normal input", 0), ("H04", "head dim 256", 1))
    text_ = Page(rendered(built(*BAD[:1], GOOD[1], catalogue=only))).text
    assert "Level granted: no level" in text_
    assert "L0 (core forward) is not granted: F01 FAIL" in text_
    text_ = Page(rendered(built(GOOD[0], BAD[1], catalogue=only))).text
    assert "Level granted: L0 – core forward" in text_
    assert "L1 (head dim 256) is not granted: H04 CRASH" in text_


def test_a_waived_failure_names_its_waiver() -> None:
    waiver = Waiver("F01", "https://example.org/1", date(2999, 1, 1), "*", "known")
    seen = Page(rendered(built(*BAD[:1], waivers=(waiver,))))
    assert "waived: " in seen.text
    assert "url https://example.org/1" in seen.text
    assert not any("example.org" in value for value in seen.values("href"))


def test_a_record_that_was_edited_says_so(real: Path, tmp_path: Path) -> None:
    made = record.read(real)
    case = next(iter(made["checks"]["F01"]["cases"].values()))
    case["numbers"]["e1_prob"], case["numbers"]["e1_det"] = 9.0, 9.0
    record.write(made, tmp_path / "edited.json")
    done = invoke("report", tmp_path / "edited.json", "-o", tmp_path / "r.html")
    assert done.exit_code == 0
    seen = Page((tmp_path / "r.html").read_text("utf-8")).text
    assert "Verification says:" in seen
    assert "edited: the digest is" in seen
    assert "says PASS, its numbers say FAIL" in seen
    unedited = record.read(real)
    assert "Verification says:" not in Page(rendered(unedited)).text


def test_several_records_stand_side_by_side(real: Path, tmp_path: Path) -> None:
    record.write(built(*GOOD), tmp_path / "good.json")
    record.write(built(*BAD), tmp_path / "bad.json")
    done = invoke(
        "report", tmp_path / "good.json", tmp_path / "bad.json", real, "-o", tmp_path / "r.html"
    )
    assert done.exit_code == 0, done.output
    source = (tmp_path / "r.html").read_text("utf-8")
    seen = Page(source)
    assert seen.tags["article"] == 4
    for name in ("A kernel 1.0", "B kernel 1.0", "C numpy"):
        assert name in seen.text
    same = seen.values("data-same")
    rows = re.findall(r"<tr[^>]*>(?:(?!</tr>).)*differs</td></tr>", source, re.S)
    assert any(">F01<" in row for row in rows)
    assert 0 < len(same) < seen.tags["tr"]


def test_the_page_follows_from_the_record_alone(real: Path) -> None:
    made = record.read(real)
    assert rendered(made) == rendered(json.loads(json.dumps(made)))


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("{", "not a complete JSON document"),
        ("[]", "not a conformance record"),
        ('{"schema": "portattn-conformance/1"}', "the record lacks"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: str, wanted: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    done = invoke("report", path, "-o", tmp_path / "r.html")
    assert done.exit_code == 2
    assert str(path) in done.output and wanted in done.output
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("key", ["checks", "levels", "target", "fingerprint", "suite", "waivers"])
def test_a_record_of_the_wrong_shape_ends_without_a_traceback(
    real: Path, tmp_path: Path, key: str
) -> None:
    for value in (None, [], {}, "text", {"F01": 3}):
        made = record.read(real)
        if made[key] == value:
            continue
        made[key] = value
        record.write(made, tmp_path / "x.json")
        done = invoke("report", tmp_path / "x.json", "-o", tmp_path / "r.html")
        assert done.exit_code in (0, 2)
        if done.exit_code == 0:
            assert "Verification says:" in (tmp_path / "r.html").read_text("utf-8")


# ---- what it never does --------------------------------------------------------------------------
def test_every_text_of_a_record_is_escaped() -> None:
    made = hostile()
    for source in (rendered(made), rendered(made, built(*GOOD), made)):
        seen = Page(source)
        assert seen.tags["script"] == seen.tags["style"] == 1
        assert "img" not in seen.tags
        assert not [name for _, name, _ in seen.attributes if name.startswith("on")]
        assert "alert" not in seen.raw["script"]
        assert seen.text.count(HOSTILE) > 10
        assert not re.search("[\0\x1b\u202e]", source)
        source.encode("utf-8")  # no lone surrogate


def test_nothing_is_fetched(reported: Path) -> None:
    for source in (reported.read_text("utf-8"), rendered(hostile(), built(*GOOD))):
        seen = Page(source)
        for name in ("src", "srcset", "poster", "action", "xlink:href", "data", "background"):
            assert not seen.values(name)
        assert all(value.startswith("#") or value == "data:," for value in seen.values("href"))
        anchors = {value.removeprefix("#") for value in seen.values("href")} - {"data:,"}
        assert anchors <= set(seen.values("id"))
        assert not seen.tags.keys() & {
            "iframe",
            "object",
            "embed",
            "video",
            "audio",
            "base",
            "image",
        }
        assert not re.search(r"url\(|@import|expression\(", seen.raw["style"])
        assert not re.search(
            r"fetch\(|XMLHttp|WebSocket|EventSource|sendBeacon|import\(|\bimport\b|https?:",
            seen.raw["script"],
        )
        assert not seen.values("style")  # the policy would refuse it


def test_the_policy_allows_this_script_and_this_style_alone(reported: Path) -> None:
    seen = Page(reported.read_text("utf-8"))
    policy = next(v for v in seen.values("content") if "default-src" in v)
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(seen.raw[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_markup_escapes_what_it_did_not_build() -> None:
    assert element("p", "<b>", element("i", '"'), title='"><x') == (
        '<p title="&quot;&gt;&lt;x">&lt;b&gt;<i>&quot;</i></p>'
    )
    assert element("input", hidden=True, checked=False, data_x=None) == "<input hidden>"
    assert text("\ud800\0") == "\ufffd\ufffd"
    assert text(Markup("<hr>")) == "<hr>"


def test_a_whole_run_stays_below_a_megabyte() -> None:
    numbers = {"e1_prob": 0.412, "e1_det": 0.412, "e2": 0.77, "e3": 0.1, "lse.e1_prob": 0.03,
               "lse.e1_det": 0.03, "visible.different_bad": 0}  # fmt: skip
    answers = [
        answered(check_id, f"bfloat16-b1h2n{n}m203d64-bottom_right", Outcome(numbers), n=n)
        for check_id in CATALOGUE
        for n in range(13)
    ]
    assert len(answers) > 1400
    assert len(rendered(built(*answers, catalogue=CATALOGUE)).encode()) < 1 << 20


# ---- what it counts ------------------------------------------------------------------------------
def test_the_matrix_has_a_verdict_and_the_worst_error_per_cell() -> None:
    more = (
        answered("F01", "z", Outcome({"e1_prob": 0.75, "e1_det": 0.7}), causal=True, hk=1),
        answered("K06", "y", Outcome({"e1_prob": 3.0, "e1_det": 2.0})),
    )
    found = facts.matrix(facts.read(built(*GOOD, *more)))
    assert set(found) == {("float16", 64), ("float32", 64), ("float32", 256)}
    row = found["float32", 64]
    assert set(row) == {"forward", "causal", "gqa", "mask"}
    assert (row["forward"].verdict, row["forward"].error, row["forward"].cases) == ("PASS", 0.25, 1)
    assert row["causal"].error == row["gqa"].error == 0.75
    assert (row["mask"].verdict, row["mask"].error, row["mask"].worst) == ("FAIL", 3.0, "K06/y")
    assert set(found["float16", 64]) == {"backward"}
    # a head dim that was rightly refused, and bytes over a limit, are no cell
    assert all(dim != 320 for _, dim in found)


def test_a_refused_option_does_not_spoil_a_cell() -> None:
    refused = Case("F01", "r", SHAPE, optional=True), Outcome.not_supported("no")
    ok = answered("F01", "a", Outcome({"e1_prob": 0.5, "e1_det": 0.5}))
    cell = facts.matrix(facts.read(built(refused, ok)))["float32", 64]["forward"]
    assert (cell.verdict, cell.cases) == (Verdict.PASS, 2)
    cell = facts.matrix(facts.read(built(refused)))["float32", 64]["forward"]
    assert cell.verdict is Verdict.NOT_SUPPORTED


def test_features_are_those_of_the_manifest_and_checks_those_of_the_catalogue() -> None:
    assert set(facts.FEATURES) - {"forward"} <= set(FEATURES)
    named = set(facts.CHECK_FEATURES) | facts.BACKWARD | facts.REFUSALS
    assert named <= set(CATALOGUE)
    given = {feature for several in facts.CHECK_FEATURES.values() for feature in several}
    from_params = {"forward", "causal", "window", "softcap", "gqa", "value_head_dim", "backward"}
    assert given | from_params == set(facts.FEATURES)


def test_every_kind_of_limit_counts() -> None:
    assert facts.over_limit({"e1_prob": 0.5, "e1_det": 0.9, "e2": 0.3, "x_bad": 7}) == 0.5
    assert facts.over_limit({"e2": 1.2, "e3": 0.4}) == 1.2 / 1.5
    assert facts.over_limit({"dq.e1_prob": 0.1, "e3": 0.4}) == 0.4
    assert facts.over_limit({"share_over": 2.5, "peak_bytes": 1e9}) == 2.5
    assert facts.over_limit({"x_bad": 0, "peak_bytes": 1e9}) is None


def test_worse_than_any_number_is_no_number() -> None:
    nan = float("nan")
    assert facts.largest([1.0, None, 3.0]) == 3.0
    assert facts.largest([]) is None
    assert np.isnan(facts.largest([1.0, nan, float("inf")]) or 0.0)
    scale = plots.scale_of([0.1, 50.0, float("inf"), nan], 1e-3, 10.0)
    assert (scale.low, scale.high) == (1e-3, 100.0)
    right = scale.percent(100.0)
    assert scale.percent(nan) == scale.percent(float("inf")) == right
    assert scale.percent(0.0) == scale.percent(1e-3) < scale.percent(0.1) < right
    assert plots.scale_of([], 1e-3, 10.0).high == 10.0


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_guide_of_memory_is_the_io_that_the_checks_count(dtype: str, backward: bool) -> None:
    params = {"b": 2, "h": 4, "hk": 2, "d": 64, "dv": 64, "dtype": dtype}
    q, k, v = (np.zeros((2, h, 33, 64), dtype) for h in (4, 2, 2))
    extra = 2 * q.nbytes + k.nbytes + v.nbytes if backward else 0
    assert facts.io_bytes(params, 33, backward) == io_bytes(Attention(q, k, v)) + extra


def test_memory_series_come_from_the_numbers() -> None:
    (series,) = facts.memory(facts.read(built(*GOOD)))
    assert series.points == ((1024, 1e5), (2048, 2e5))
    io = [facts.io_bytes(SHAPE, n, False) for n in (1024, 2048)]
    assert series.guide == (0.25 * io[0], 0.25 * io[1])
    assert "0.25 × IO, ∝ N" in rendered(built(*GOOD))
    (series,) = facts.memory(facts.read(built(*GOOD, manifest={**MANIFEST, "kappa": None})))
    assert series.guide == tuple(io)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, ""), (0.0, "0"), (0.41237, "0.412"), (0.9999, "<1"), (1.0, "1"), (2e-4, "2.0e-4"),
     (1234.5, "1234"), (1e6, "1.0e6"), (float("inf"), "∞"), (float("nan"), "NaN")],
)  # fmt: skip
def test_numbers_are_short_and_never_round_up_to_the_bound(value: float | None, shown: str) -> None:
    assert plots.number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 B"), (1000, "1000 B"), (1536, "1.5 KiB"), (1 << 20, "1 MiB"), (5 << 30, "5 GiB")],
)
def test_bytes_have_the_unit_that_suits_them(value: int, shown: str) -> None:
    assert plots.size(value) == shown


# ---- in a browser --------------------------------------------------------------------------------
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--disable-extensions", "--hide-scrollbars",
)  # fmt: skip
Opened = Callable[..., tuple[str, str, list[str]]]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """``browser(page, *flags)``: the DOM after its scripts ran, the console's lines, and the
    addresses that the page asked for (what a browser asks for on its own is not the page's);
    with an empty profile."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")

    def opened(path: Path, *flags: str) -> tuple[str, str, list[str]]:
        profile = tmp_path_factory.mktemp("profile")
        log = profile / "net.json"
        done = subprocess.run(
            [program, *QUIET, f"--user-data-dir={profile}", f"--log-net-log={log}",
             "--enable-logging=stderr", "--dump-dom", *flags, path.as_uri()],
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert "</html>" in done.stdout, done.stderr
        console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
        asked = [
            found[1]
            for line in log.read_text(errors="replace").splitlines()
            if '"network_isolation_key":"file:' in line
            and (found := re.search(r'"url":"((?:https?|wss?)://[^"]*)"', line))
        ]
        shutil.rmtree(profile, ignore_errors=True)
        return done.stdout, console, asked

    yield opened


def test_the_browser_would_tell(browser: Opened, tmp_path: Path) -> None:
    """The tests below can fail: a page that errs and fetches is seen to do so."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><img src='http://127.0.0.1:9/a.png'><script>console.error('oh')</script>"
    )
    _, console, asked = browser(bad)
    assert "oh" in console
    assert any("127.0.0.1:9" in address for address in asked)


def test_a_browser_runs_nothing_of_a_hostile_record(browser: Opened, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(rendered(hostile(), built(*BAD)), encoding="utf-8")
    dom, console, asked = browser(path)
    assert (console, asked) == ("", [])
    assert "img" not in Page(dom).tags


def first_pixel(png: bytes) -> tuple[int, ...]:
    """Red, green, blue of the upper left corner: with nothing before it no filter changes it."""
    at, data = 8, b""
    while at < len(png):
        size, kind = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        data += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += 12 + size
    return tuple(zlib.decompress(data)[1:4])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_a_browser_shows_it_without_an_error_or_a_request(
    browser: Opened, reported: Path, tmp_path: Path, scheme: str, width: int
) -> None:
    shot = tmp_path / "shot.png"
    dom, console, asked = browser(
        reported,
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
        f"--window-size={width},900",
        f"--screenshot={shot}",
    )
    assert (console, asked) == ("", [])
    count = len(CATALOGUE)
    assert f"{count} of {count} checks" in Page(dom).text  # the script ran: the policy allows it
    assert re.search(r"<form[^>]*data-filter[^>]*>", dom)
    assert not re.search(r"<form[^>]*data-filter[^>]*hidden", dom)
    pixel = first_pixel(shot.read_bytes())
    assert min(pixel) > 230 if scheme == "light" else max(pixel) < 40


@pytest.mark.parametrize("width", [360, 1400])
def test_no_width_makes_the_page_scroll_sideways_and_the_filter_filters(
    browser: Opened, reported: Path, tmp_path: Path, width: int
) -> None:
    probe = (
        "<script>for (const d of document.querySelectorAll('details')) d.open = true;"
        "const e = document.documentElement;"
        "const size = `${innerWidth} ${e.scrollWidth} ${e.scrollHeight}`;"
        "const form = document.querySelector('form[data-filter]');"
        "form.elements.find.value = 'H04 FLOAT16'; form.dispatchEvent(new Event('input'));"
        "const left = [...document.querySelectorAll('.check, .check tbody tr')]"
        ".filter((x) => x.offsetParent).length;"
        "parent.postMessage(`probe ${size} ${left}`, '*')</script>"
    )
    source = reported.read_text("utf-8")
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", source)
    (tmp_path / "probe.html").write_text(free.replace("</body>", f"{probe}</body>"), "utf-8")
    # in a frame, for a window has a least width
    path = tmp_path / "frame.html"
    path.write_text(
        "<!doctype html><script>onmessage = (e) => (document.title = e.data)</script>"
        f"<iframe src='probe.html' width={width} height=900 frameborder=0></iframe>"
    )
    dom, _, _ = browser(path, "--virtual-time-budget=20000")
    found = re.search(r"<title>probe (\d+) (\d+) (\d+) (\d+)</title>", dom)
    assert found is not None
    inner, scroll, height, left = map(int, found.groups())
    assert (inner, scroll) == (width, width)
    assert height > 2000
    assert left == 3  # the check, and its cases in float16 and bfloat16


def test_every_committed_record_can_be_reported() -> None:
    for path in sorted(EVIDENCE.rglob("*.json")):
        if json.loads(path.read_text("utf-8")).get("schema") != record.SCHEMA:
            continue
        source = rendered(record.read(path))
        assert len(source.encode()) < 1 << 20, path
        assert record.read(path)["digest"] in source
