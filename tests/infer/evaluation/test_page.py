"""What the page says of every round, that no text can break it, and that a browser shows it."""

import dataclasses
import html.parser
import re
import shutil
import subprocess

import pytest

from infer.evaluation import page
from infer.evaluation.page import Round, Text, fate, pieces, render, rounds
from tests.infer.evaluation.conftest import completion

WORDS = {
    0: "a",
    1: "<b>",
    2: "</script><script>document.title='broken'</script>",
    3: "\"&'",
    4: "\n",
    5: " x",
    6: "\x1b\N{RIGHT-TO-LEFT OVERRIDE}",
    7: "",
}
PROMPT = "</pre></section><img src=x onerror=alert(1)>"


def decode(ids):
    return "".join(WORDS[i] for i in ids)


def made():
    """Rounds of each kind: a rejection, a bonus, a threshold, and a cut behind the second token."""
    return completion(
        [(2, 3, 1), (4, 3, 3), (2, 1, 1), (1, 1, 0), (2, 3, 3)],
        confidences=[
            [0.9, 0.8, 0.7], [0.5, 0.5, 0.5], [0.9, 0.1, 0.1], [0.6, 0.2, 0.2], [1.0, 1.0, 1.0],
        ],
        drafts=[[1, 3, 5], [2, 0, 4], [5, 6, 7], [2, 2, 2], [3, 5, 0]],
        token_ids=[0, 1, 2, 2, 0, 4, 6, 5, 7, 1, 3, 5],
    )  # fmt: skip


TEXT = Text('gsm8k <1>: "ours"', PROMPT, made())


class Parsed(html.parser.HTMLParser):
    """Elements with their attributes and the text in each, of a page that closes all of them."""

    VOID = ("meta",)

    def __init__(self, text):
        super().__init__()
        self.open, self.found = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), []))
        if tag not in self.VOID:
            self.open.append(self.found[-1])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, _, texts in self.open:
            texts.append(data)

    def all(self, tag, css=""):
        """Attributes and text of elements of a class."""
        return [
            (attrs, "".join(texts))
            for name, attrs, texts in self.found
            if name == tag and set(css.split()) <= set((attrs.get("class") or "").split())
        ]


@pytest.fixture(scope="module")
def parsed():
    return Parsed(render([TEXT, TEXT], ["python <command> & more"], decode))


def test_fates():
    def block(emitted, verified, accepted):
        return [fate(k, emitted=emitted, verified=verified, accepted=accepted) for k in range(3)]

    assert block(2, 3, 1) == ["accepted", "rejected", "vain"]
    assert block(1, 2, 0) == ["rejected", "vain", "unverified"]
    assert block(4, 3, 3) == ["accepted"] * 3
    assert block(2, 1, 1) == ["accepted", "unverified", "unverified"]
    assert block(1, 0, 0) == ["unverified"] * 3
    assert block(2, 3, 3) == ["accepted", "accepted", "end"]
    assert block(1, 3, 1) == ["accepted", "end", "end"]
    assert block(1, 2, 2) == ["accepted", "end", "unverified"]


def test_rounds():
    first, second, third, fourth, last = rounds(made())
    assert first == Round([(1, "accepted"), (3, "rejected"), (5, "vain")], (2, "corrected"))
    assert second.token == (6, "bonus")
    assert third == Round([(5, "accepted"), (6, "unverified"), (7, "unverified")], (7, "bonus"))
    assert fourth.token == (1, "corrected")
    assert last == Round([(3, "accepted"), (5, "accepted"), (0, "end")], None)
    emitted = [token for r in rounds(made()) for token, _ in r.emitted]
    assert emitted == made().token_ids[1:]


def test_a_character_of_several_tokens_is_that_of_the_last():
    tokens = dict(enumerate("a\N{EURO SIGN}b".encode()))

    def decode(ids):
        return bytes(tokens[i] for i in ids).decode(errors="replace")

    assert list(pieces([0, 1, 2, 3, 4], decode)) == ["a", "", "", "\N{EURO SIGN}", "b"]
    assert list(pieces([3, 0], decode)) == ["", "\N{REPLACEMENT CHARACTER}a"]


def test_cells_say_what_became_of_each_token(parsed):
    cells = parsed.all("td", "mark")
    assert len(cells) == 2 * (5 * 3 + 4)
    attrs, text = cells[1]
    said = "rejected draft; confidence 0.800, with those before it 0.720; token 3"
    assert text == WORDS[3] + "0.80 " + said
    assert attrs["class"] == "mark rejected"
    attrs, text = cells[3]
    assert "corrected" in attrs["class"]
    assert text == WORDS[2] + " target's token in place of a rejected draft; token 2"
    shown = [text for _, text in cells]
    assert shown[6].startswith("↵")
    assert shown[2].startswith("␣x")
    assert shown[7].startswith("\N{REPLACEMENT CHARACTER}" * 2)
    assert shown[10].startswith("#7")


def test_counts(parsed):
    counts = [text for attrs, text in parsed.all("ul", "counts")]
    legend, first, second = counts
    assert first == second
    assert legend.strip().splitlines() == list(page.MARKS.values())
    assert first.strip().splitlines() == [
        "7 accepted draft",
        "2 rejected draft",
        "1 draft verified in vain, behind a rejection",
        "4 draft never verified",
        "1 draft behind the end of the text",
        "2 target's token in place of a rejected draft",
        "2 target's token behind accepted drafts",
    ]
    sentence = "12 tokens in 5 rounds, accepted length 2.25 tokens a round."
    assert [text for _, text in parsed.all("p")].count(sentence) == 2


def test_the_text_as_a_whole(parsed):
    (_, text), _ = parsed.all("pre", "text")
    hidden = "\N{REPLACEMENT CHARACTER}" * 2
    wanted = decode(made().token_ids).replace(WORDS[6], hidden)
    assert text == wanted


def test_no_text_is_part_of_the_page(parsed):
    assert len(parsed.all("script")) == 1
    assert parsed.all("img") == []
    assert PROMPT in [text for _, text in parsed.all("pre")]
    assert TEXT.title in [text for _, text in parsed.all("h2")]
    assert "python <command> & more" in [text for _, text in parsed.all("p")]


def test_nothing_is_fetched(parsed):
    names = {name for _, attrs, _ in parsed.found for name in attrs}
    assert not names & {"src", "srcset", "action", "style", "onclick"}
    assert all(attrs["href"].startswith("#") for attrs, _ in parsed.all("a"))
    policy = next(a["content"] for a, _ in parsed.all("meta") if "content" in a)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_for_keyboard_and_screen_reader(parsed):
    assert parsed.all("html")[0][0]["lang"] == "en"
    ids = [attrs["id"] for _, attrs, _ in parsed.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    for table, _ in parsed.all("table"):
        assert table["role"] == "grid"
        assert table["aria-labelledby"] in ids
    assert {attrs["scope"] for attrs, _ in parsed.all("th")} == {"row", "col"}
    assert [text for _, text in parsed.all("th")][:5] == [
        *("round", "draft 1", "draft 2", "draft 3"),
        "target",
    ]
    assert all(attrs["href"][1:] in ids for attrs, _ in parsed.all("a"))


def test_without_a_confidence_head():
    plain = dataclasses.replace(made(), confidences=None, confidence_logits=None)
    found = Parsed(render([Text("a", "b", plain)], [], decode))
    assert found.all("td", "mark")[0][1] == "<b> accepted draft; token 1"
    assert found.all("small") == []


# --- In a browser ------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PRESS = """
const grid = document.querySelector("table");
const seen = [];
const press = (key) => {
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const cell = document.activeElement;
  seen.push(cell.parentNode.rowIndex + "," + cell.cellIndex);
};
grid.querySelector("td[tabindex='0']").focus();
for (const key of ["ArrowRight", "ArrowDown", "End", "ArrowRight", "Home", "ArrowUp", "ArrowUp"])
  press(key);
seen.push(document.querySelectorAll("td[tabindex='0']").length);
setTimeout(() => {  // when the page has scrolled
  const tip = document.getElementById("tip");
  const box = tip.getBoundingClientRect();
  seen.push(tip.hidden ? "hidden" : tip.textContent);
  seen.push(box.left >= 0 && box.top >= 0 && box.right <= innerWidth && box.bottom <= innerHeight);
  seen.push(document.documentElement.scrollWidth <= innerWidth);
  document.body.dataset.seen = JSON.stringify(seen);
}, 500);
"""
DEAF = """
for (const kind of ["focusin", "focusout"])
  window.addEventListener(kind, (event) => event.stopImmediatePropagation(), { capture: true });
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """`browser(html, *flags)`: the document of a page that a browser without a window has run."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)}")

    def run(text):
        folder = tmp_path_factory.mktemp("page")
        (folder / "page.html").write_text(text)
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync")
        found = subprocess.run(
            [
                program, *flags, "--disable-background-networking", "--disable-component-update",
                f"--user-data-dir={folder / 'profile'}", "--window-size=800,600",
                "--virtual-time-budget=3000", "--dump-dom", f"file://{folder / 'page.html'}",
            ],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return found.stdout

    return run


def test_a_browser_runs_our_script_and_no_other(browser):
    """A cell of each table can be reached with Tab only once the script has run."""
    text = render([TEXT, TEXT], [], decode)
    dom = Parsed(browser(text.replace("</body>", "<script>document.title = 'bad'</script></body>")))
    assert [text for _, text in dom.all("title")] == ["Rounds of speculative decoding"]
    reached = [attrs for attrs, _ in dom.all("td", "mark") if attrs["tabindex"] == "0"]
    assert len(reached) == 2


@pytest.mark.parametrize("in_front", [True, False])
def test_a_browser_moves_by_keys(browser, in_front):
    """Also in a window that hears of no focus, since another is in front of it."""
    script = PRESS if in_front else DEAF + PRESS
    text = re.sub(r"<meta http-equiv[^>]*>", "", render([TEXT], [], decode))
    dom = Parsed(browser(text.replace("</body>", f"<script>{{{script}}}</script></body>")))
    seen = dom.all("body")[0][0]["data-seen"]
    cells = ["1,2", "2,2", "2,4", "2,4", "2,1", "1,1", "1,1"]
    tip = " accepted draft; confidence 0.900, with those before it 0.900; token 1"
    assert seen == ("[" + ",".join(f'"{cell}"' for cell in cells) + f',1,"{tip}",true,true]')
