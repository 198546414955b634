"""One page of HTML on which a person sees every round of a text.

A table has a row for each round: its drafts, each with what became of it and its confidence, and
the token that the target itself added. The page needs no network, and runs no script but its own.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import hashlib
import html
import string
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from dspark_jax.request import Completion

Mark = Literal["accepted", "rejected", "vain", "unverified", "end", "corrected", "bonus"]
MARKS: dict[Mark, str] = {
    "accepted": "accepted draft",
    "rejected": "rejected draft",
    "vain": "draft verified in vain, behind a rejection",
    "unverified": "draft never verified",
    "end": "draft behind the end of the text",
    "corrected": "target's token in place of a rejected draft",
    "bonus": "target's token behind accepted drafts",
}
"""In the words of the legend."""
SIGNS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})
"""For white space, which one could not see in a table."""
TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
"""Kinds of characters that change the direction of text, the page's own as well."""
MOST_BYTES = 4
"""Of a character: as many tokens may share one."""
Decode = Callable[[Sequence[int]], str]


@dataclasses.dataclass(frozen=True)
class Text:
    """A completion with a trace, and what it is of."""

    title: str
    prompt: str
    completion: Completion


@dataclasses.dataclass(frozen=True)
class Round:
    """A round as it is shown."""

    drafts: Sequence[tuple[int, Mark]]
    """Tokens of the block, and what became of each."""
    token: tuple[int, Mark] | None
    """The target's own; None where the text ended before it."""

    @property
    def emitted(self) -> list[tuple[int, Mark]]:
        accepted = [draft for draft in self.drafts if draft[1] == "accepted"]
        return accepted if self.token is None else [*accepted, self.token]


def rounds(completion: Completion) -> Iterator[Round]:
    """The rounds of a completion that has a trace."""
    place = 1  # the first token is the prefill's
    for block, emitted, verified, accepted in zip(
        completion.drafts or (),
        completion.accepted_lengths,
        completion.verified_lengths,
        completion.accepted_drafts,
        strict=True,
    ):
        drafts = [
            (token, fate(k, emitted=emitted, verified=verified, accepted=accepted))
            for k, token in enumerate(block)
        ]
        place += emitted
        own: tuple[int, Mark] | None = None
        if emitted > accepted:
            own = completion.token_ids[place - 1], "corrected" if accepted < verified else "bonus"
        yield Round(drafts, own)


def fate(k: int, *, emitted: int, verified: int, accepted: int) -> Mark:
    """What became of draft k, counted from 0, of a round."""
    if k < min(accepted, emitted):
        return "accepted"
    if k >= verified:
        return "unverified"
    if emitted <= accepted:
        return "end"
    return "rejected" if k == accepted else "vain"


def render(texts: Sequence[Text], lines: Sequence[str], decode: Decode) -> str:
    """The page.

    Args:
      lines: that say above the texts how they were made.
      decode: text of token ids.
    """
    here = Path(__file__)
    script, style = (here.with_name(f"page.{kind}").read_text("utf-8") for kind in ("js", "css"))
    template = string.Template(here.with_name("page.html").read_text("utf-8"))
    return template.substitute(
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
        lines="\n".join(f"<p>{html.escape(line)}</p>" for line in lines),
        legend="\n".join(
            f'<li><span class="mark {m}">{said}</span></li>' for m, said in MARKS.items()
        ),
        contents="\n".join(
            f'<li><a href="#text{n}">{html.escape(text.title)}</a></li>'
            for n, text in enumerate(texts, start=1)
        ),
        texts="\n".join(_section(n, text, decode) for n, text in enumerate(texts, start=1)),
    )


def _hash(source: str) -> str:
    """By which a content security policy knows it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def _section(number: int, text: Text, decode: Decode) -> str:
    own = list(rounds(text.completion))
    count = collections.Counter(mark for r in own for _, mark in r.drafts)
    count.update(r.token[1] for r in own if r.token is not None)
    figures = "\n".join(
        f'<li><span class="mark {mark}">{count[mark]:,}</span> {said}</li>'
        for mark, said in MARKS.items()
        if count[mark]
    )
    c = text.completion
    mean = f"{np.mean(c.full_rounds):.2f}" if c.full_rounds else "-"
    return f"""<section aria-labelledby="text{number}">
<h2 id="text{number}">{html.escape(text.title)}</h2>
<p>{len(c.token_ids):,} tokens in {len(own):,} rounds, accepted length {mean} tokens a round.</p>
<ul class="counts">
{figures}
</ul>
<details><summary>Prompt, {c.prompt_tokens:,} tokens</summary>
<pre>{_visible(text.prompt)}</pre></details>
<h3>Text</h3>
<pre class="text">{_coloured(c, own, decode)}</pre>
<h3>Rounds</h3>
{_table(number, text, own, decode)}
</section>"""


def _coloured(completion: Completion, own: Sequence[Round], decode: Decode) -> str:
    """The text, each token marked by who made it, each round apart from the next."""
    texts = pieces(completion.token_ids, decode)
    first = f'<span class="first">{_visible(next(texts))}</span>'
    parts = []
    for each in own:
        tokens = "".join(
            f'<span class="mark {mark}">{_visible(next(texts))}</span>' for _, mark in each.emitted
        )
        parts.append(f'<span class="round">{tokens}</span>')
    return first + "".join(parts)


def pieces(token_ids: Sequence[int], decode: Decode) -> Iterator[str]:
    """Texts of tokens, one after the other; that of a character goes to the last of its tokens."""
    held: list[int] = []
    for token in token_ids:
        held.append(token)
        text = decode(held)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(held) < MOST_BYTES:
            yield ""
        else:
            held = []
            yield text


def _table(number: int, text: Text, own: Sequence[Round], decode: Decode) -> str:
    size = max((len(r.drafts) for r in own), default=0)
    titles = "".join(f'<th scope="col">draft {k}</th>' for k in range(1, size + 1))
    confidences = text.completion.confidences
    body = []
    for n, each in enumerate(own):
        chances: Sequence[float | None] = [None] * len(each.drafts)
        if confidences is not None:
            chances = confidences[n]
        survival = np.cumprod([1.0 if c is None else c for c in chances])
        cells = [
            _cell(token, mark, decode, chance, float(a))
            for (token, mark), chance, a in zip(each.drafts, chances, survival, strict=True)
        ]
        cells += ["<td></td>"] * (size - len(cells))
        last = "<td></td>" if each.token is None else _cell(*each.token, decode)
        body.append(f'<tr><th scope="row">{n + 1}</th>{"".join(cells)}{last}</tr>')
    rows = "\n".join(body)
    return f"""<div class="wide"><table role="grid" aria-labelledby="text{number}">
<thead><tr><th scope="col">round</th>{titles}<th scope="col">target</th></tr></thead>
<tbody>
{rows}
</tbody>
</table></div>"""


def _cell(
    token: int,
    mark: Mark,
    decode: Decode,
    confidence: float | None = None,
    survival: float | None = None,
) -> str:
    shown = decode([token]).translate(SIGNS) or f"#{token}"
    said = [MARKS[mark], f"token {token}"]
    small = ""
    if confidence is not None:
        said.insert(1, f"confidence {confidence:.3f}, with those before it {survival:.3f}")
        small = f"<small>{confidence:.2f}</small>"
    return (
        f'<td class="mark {mark}" tabindex="-1"><span>{_visible(shown)}</span>{small}'
        f'<span class="heard"> {html.escape("; ".join(said))}</span></td>'
    )


def _visible(text: str) -> str:
    """As HTML; control characters, and those that turn the text around them, are shown as one."""
    kept = (c if c in "\n\t" or not _harmful(c) else "\N{REPLACEMENT CHARACTER}" for c in text)
    return html.escape("".join(kept))


def _harmful(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cs") or unicodedata.bidirectional(c) in TURNING
