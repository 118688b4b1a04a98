"""The page is whole, stands alone, escapes everything, sums to 100 % and stays small."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.observe.report import RunReport, render_report, rounded_percent

SHARES = {
    "import": 0.05,
    "compile": 0.1,
    "data_wait": 0.02,
    "step": 0.7,
    "eval": 0.08,
    "checkpoint": 0.05,
    "other": 0.0,
}


def records(count, **more):
    return [
        {
            "step": s,
            "loss": 4 - s / count,
            "learning_rate": 1e-3,
            "grad_norm": 0.5,
            "num_tokens": 512,
            "tokens_per_s": 5e3,
        }
        | {"step_s": 0.099, "data_wait_s": 0.001}
        | ({"eval_loss": 3.5} if s % 5 == 0 else {})
        | more
        for s in range(1, count + 1)
    ]


def page(**changes):
    fields = {
        "title": "tiny",
        "facts": {"parameters": "0.8 M"},
        "records": records(20),
        "clock_shares": SHARES,
        "events": ["Step 7: spike; rewound to step 4."],
        "rows": [[("To", 1), (" be", 1), ("Hi", 2), ("", 0), ("", 0)]],
    }
    return render_report(RunReport(**{**fields, **changes}))


class Page(HTMLParser):
    """Checks that tags nest, and keeps tags with their attributes and all text."""

    EMPTY = ("meta", "path", "circle")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def test_the_page_shows_every_part():
    read = Page(page())
    for text in (
        "last eval loss",
        "loss, nats",
        "learning rate",
        "global norm before clipping",
        "tokens/s",
        "Not input-bound: 1.0% of the step time was spent waiting for data.",
        "Step 7: spike; rewound to step 4.",
        "parameters",
        "0.8 M",
        "2 × padding",
        "data wait 2.0%",
    ):
        assert text in read.text, text
    assert sum(tag == "svg" for tag, _ in read.tags) == 4


def test_the_page_stands_alone_and_can_run_no_script():
    text = page()
    tags = Page(text).tags
    assert not {"script", "link", "img", "iframe", "object", "base"} & {tag for tag, _ in tags}
    assert not [a for _, attrs in tags for a in attrs if a in ("src", "href") or a.startswith("on")]
    assert not re.search(r"https?:|//|@import|url\(", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text


def test_every_style_class_on_the_page_is_defined_and_every_defined_one_used():
    text = page(clock_shares={f"kind{i}": 1.0 for i in range(8)}, rows=[[("x", i) for i in range(5)]], events=[])
    style, body = text.split("</style>")
    used = {name for names in re.findall(r'class="([^"]*)"', body) for name in names.split()}
    assert used == set(re.findall(r"\.([a-z]\w*)(?=[\s{.,])", style))


HOSTILE = "</td><script>alert('1')</script>&\"\x00\x1b\ud800"


def test_texts_from_outside_are_escaped_everywhere():
    text = page(
        title=HOSTILE,
        facts={HOSTILE: HOSTILE},
        events=[HOSTILE],
        rows=[[(HOSTILE, 1)]],
        clock_shares={HOSTILE: 1.0},
        records=records(5, **{HOSTILE: 1.0}),
        samples=[(HOSTILE, HOSTILE)],
        commands=[(HOSTILE, HOSTILE)],
    )
    tags = Page(text).tags
    assert "script" not in {tag for tag, _ in tags}
    assert text.encode("utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)
    # Title and heading, 2 of the table, event, row, 2 of the bar, last value, 2 of the sample, 2 of the command.
    assert text.count("&lt;script&gt;") == 13


@given(st.text())
def test_any_text_keeps_the_page_well_formed(text):
    Page(page(title=text, rows=[[(text, 1)]], records=[])).text.encode()


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=9))
def test_percents_sum_to_exactly_one_hundred_and_are_within_a_tenth(shares):
    percent = rounded_percent(shares)
    total = sum(shares.values())
    if total == 0:
        assert percent == {}
        return
    assert sum(round(value * 10) for value in percent.values()) == 1000
    for kind, value in percent.items():
        assert value == pytest.approx(100 * shares[kind] / total, abs=0.1 + 1e-9)


def test_the_bar_fills_its_width():
    widths = [float(value) for value in re.findall(r'style="width:([\d.]+)%"', page())]
    assert sum(round(10 * width) for width in widths) == 1000


def test_adjacent_tokens_of_a_document_share_a_colour_and_neighbours_differ():
    spans = re.findall(r'<span class="(\w+)"><sup>(\d+)</sup>([^<]*)', page())
    assert spans == [("s0", "1", "To be"), ("s1", "2", "Hi")]


def test_line_ends_in_a_row_are_visible():
    assert "a↵b" in page(rows=[[("a\nb", 1)]])


def test_samples_keep_their_line_ends_and_tell_the_prompt_from_the_answer():
    text = page(samples=[("ROMEO:", "\nAy me.\n  Nay."), ("", "Enter")])
    assert "<b>ROMEO:</b>\nAy me.\n  Nay.</p>" in text
    assert "<b></b>Enter</p>" in text
    assert re.search(r"\.row \{[^}]*white-space: pre-wrap", text)


def test_commands_are_shown_as_they_are_to_be_typed():
    text = page(commands=[("Serve it", "jaxml serve 'runs/a b'"), ("Describe it", "jaxml inspect runs/a")])
    assert "Serve it: jaxml serve 'runs/a b'" in Page(text).text
    assert text.index("jaxml serve") < text.index("<code>jaxml inspect runs/a</code>")


def test_a_run_without_samples_says_how_to_get_some():
    read = Page(page()).text
    assert "None were asked for (train with --sample PROMPT)." in read
    assert "Nothing was said." in read


def test_steps_with_nonfinite_values_are_events():
    run = records(12)
    for record in run[:10]:
        record.update(loss=None, nonfinite=["loss"])
    text = Page(page(records=run)).text
    assert "Infinite or NaN values at step 1, 2, 3, 4, 5, 6, 7, 8 and 2 more." in text


def test_a_run_without_anything_still_has_a_page():
    text = Page(page(records=[], facts={}, clock_shares={}, events=[], rows=[])).text
    for part in ("Loss: nothing was recorded", "No time was recorded", "Nothing out of the ordinary", "No rows"):
        assert part in text


def test_the_page_stays_small_for_thirty_thousand_steps():
    assert len(page(records=records(30_000))) < 70_000


def test_the_newest_value_of_each_number_is_listed_with_its_step():
    text = Page(page()).text
    assert "eval_loss3.5 (step 20)" in text
    assert "num_tokens512 (step 20)" in text
