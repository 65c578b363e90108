"""The text of the page: what a click shows is what was recorded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests import forced
from tests.browser.recordings import WORDS, call_of, generated, recording_of, sentence, translation

import regard
from regard import models

NASTY = [
    "</title><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><style>*{display:none}",
    "<!--",
    "]]>",
    "javascript:alert(1)",
    "\x00\x1b[31m",
    "\udc80",
    "\u202eevil\u2066",
    "{{7*7}}${7*7}",
    "x" * 10_000,
    "العربية",
    "中文",
    "",
    " ",
    "##",
    "&lt;",
]


def close(found: list[tuple[int, float]], keys: np.ndarray, weights: np.ndarray, within: float = 2e-5) -> None:
    """The list shows these keys and weights; ties may stand in any order, and what rounds to nothing may be absent."""
    keys, weights = keys[weights > 1e-4], weights[weights > 1e-4]
    assert len(found) >= len(keys) > 0
    np.testing.assert_allclose([weight for _, weight in found[: len(keys)]], weights, atol=within)
    for (at, weight), key, expected in zip(found, keys, weights, strict=False):
        assert at == key or abs(weight - expected) < within


def test_the_sentence_stands_there_word_by_word(open_page) -> None:
    opened = open_page(sentence())
    assert opened.page.eval_on_selector_all(".t", "all => all.map(one => one.textContent)") == WORDS
    assert opened.page.title() == "a model"


@pytest.mark.parametrize(
    "tokens", [WORDS, [f" w{at % 23}" for at in range(131)]], ids=["every weight", "largest weights"]
)
def test_a_click_shows_the_recorded_top_keys_and_weights_of_the_head(open_page, tokens) -> None:
    recording = sentence(tokens)
    opened = open_page(recording, layer=0, head=0)
    for layer, head, at in [(0, 0, 3), (2, 1, 7), (1, 3, 11)]:
        opened.pick(f"layer{layer}")
        if opened.page.get_attribute(f'[data-pick="head{head}"]', "aria-pressed") != "true":
            opened.pick(f"head{head}")
        if opened.page.get_attribute(f'.t[data-at="{at}"]', "class") != "t chosen":
            opened.word(at)
        one = recording[layer, head]
        close(opened.listed(), one.top_keys[at].numpy(), one.top_weights[at].numpy())
        shown = opened.page.inner_text(".looks.out li:first-child .amount")
        assert abs(float(shown.rstrip("% ")) / 100 - float(one.top_weights[at, 0])) < 6e-4


def test_several_heads_and_the_mean_add_up(open_page) -> None:
    recording = sentence()
    opened = open_page(recording, layer=1)
    opened.page.keyboard.press("Escape")
    opened.pick("mean")
    opened.word(5) if not opened.page.query_selector('.t.chosen[data-at="5"]') else None
    weights = recording.calls[1].map[0].numpy()[:, 5]
    mean = weights.mean(0)
    close(opened.listed(), np.argsort(-mean)[:8], np.sort(mean)[::-1][:8])
    opened.pick("several")
    opened.pick("head1")
    opened.pick("head3")
    two = weights[[1, 3]].mean(0)
    close(opened.listed(), np.argsort(-two)[:8], np.sort(two)[::-1][:8])
    bars = opened.page.eval_on_selector_all(".looks.out li:first-child .bar-of i", "all => all.length")
    assert bars == 2


def test_who_looks_at_a_word(open_page) -> None:
    recording = sentence()
    opened = open_page(recording, layer=2, head=0)
    opened.page.click(".text-view .bar .chip:nth-child(2)")
    opened.word(9) if not opened.page.query_selector('.t.chosen[data-at="9"]') else None
    column = recording[2, 0].map.numpy()[:, 9]
    close(opened.listed("in"), np.argsort(-column)[:8], np.sort(column)[::-1][:8])


def test_who_looks_at_a_word_in_a_long_text_is_found_among_the_largest_weights(open_page) -> None:
    recording = sentence([f" w{at}" for at in range(131)], causal=True)
    opened = open_page(recording, layer=1, head=2)
    opened.page.click(".text-view .bar .chip:nth-child(3)")
    opened.word(6) if not opened.page.query_selector('.t.chosen[data-at="6"]') else None
    one = recording[1, 2]
    queries, slots = np.nonzero(one.top_keys.numpy() == 6)
    weights = one.top_weights.numpy()[queries, slots]
    order = np.argsort(-weights)[:8]
    close(opened.listed("in"), queries[order], weights[order])


def test_pointing_previews_and_leaving_returns_to_what_was_clicked(open_page) -> None:
    opened = open_page(sentence(), layer=0, head=0)
    opened.page.keyboard.press("Escape")
    opened.word(2) if not opened.page.query_selector('.t.chosen[data-at="2"]') else None
    before = opened.listed()
    opened.page.hover('.t[data-at="8"]')
    opened.settle()
    assert opened.listed() != before
    assert opened.page.inner_text(".panel h2").split() == ["was", "8"]
    opened.page.mouse.move(5, 5)
    opened.settle()
    assert opened.listed() == before


def test_the_keyboard_walks_through_words_and_layers(open_page) -> None:
    opened = open_page(sentence(), layer=0, head=0)
    opened.page.focus(".scroller")
    opened.page.keyboard.press("Escape")
    for key, expected in [("ArrowRight", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)]:
        opened.page.keyboard.press(key)
        assert opened.page.get_attribute(".t.chosen", "data-at") == str(expected)
    opened.page.keyboard.press("ArrowUp")
    assert opened.page.get_attribute('[data-pick="layer1"]', "aria-pressed") == "true"
    assert "looks at" in opened.page.inner_text("[aria-live]")
    opened.page.click("text=is looked at by")
    assert "is looked at by" in opened.page.inner_text("[aria-live]")
    opened.page.focus(".scroller")
    opened.page.keyboard.press("Escape")
    assert opened.page.query_selector(".t.chosen") is None


def test_lines_are_drawn_in_the_colour_of_the_head_and_go_with_the_selection(open_page) -> None:
    opened = open_page(sentence(), layer=0, head=0)
    opened.page.focus(".scroller")
    opened.page.keyboard.press("Escape")
    opened.settle()
    assert [colour[:4] for colour in opened.pixels("canvas.lines")] == [[0, 0, 0, 0]]
    opened.word(4)
    strong = [colour for colour in opened.pixels("canvas.lines") if colour[3] > 120]
    assert sum(colour[4] for colour in strong) > 100
    for red, green, blue, _, _ in strong:  # the first head's blue, #0072b2
        assert abs(red - 0) < 12 and abs(green - 114) < 12 and abs(blue - 178) < 12
    strongest = opened.listed()[0][0]
    shade = opened.page.eval_on_selector(f'.t[data-at="{strongest}"]', "one => getComputedStyle(one).backgroundColor")
    assert shade not in ("rgba(0, 0, 0, 0)", "transparent")


def test_cross_attention_shows_two_texts_with_lines_between_them(open_page) -> None:
    source, target = (
        ["Die", "Katze", "schläft", "auf", "der", "Matte"],
        ["The", "cat", "sleeps", "on", "the", "mat", "today"],
    )
    recording = translation(source, target)
    opened = open_page(recording, layer=2, head=1)
    opened.page.focus(".scroller")
    opened.page.keyboard.press("Escape")  # no word is chosen yet
    assert opened.page.eval_on_selector_all(".pane.query .t", "all => all.map(one => one.textContent)") == target
    assert opened.page.eval_on_selector_all(".pane.key .t", "all => all.map(one => one.textContent)") == source
    opened.word(1)
    # side by side, one word under the other: no line crosses a word, and nothing needs to be scrolled
    assert opened.page.evaluate("document.querySelectorAll('.pane.column').length") == 2
    low, high = (opened.page.locator(f".pane.{side} .t >> nth=-1").bounding_box() for side in ("query", "key"))
    stage = opened.page.locator(".stage").bounding_box()
    assert low is not None and high is not None and stage is not None
    assert max(low["y"], high["y"]) + 20 < stage["y"] + stage["height"]
    # the first word of the other text is a word as any other, and no resting place
    assert opened.page.evaluate("document.querySelectorAll('.every-grid .resting').length") == 0
    one = recording[2, 1]
    close(opened.listed(), one.top_keys[1].numpy()[:6], one.top_weights[1].numpy()[:6])
    assert sum(colour[4] for colour in opened.pixels("canvas.lines") if colour[3] > 60) > 100
    opened.word(3, "key")
    column = one.map.numpy()[:, 3]
    close(opened.listed("in"), np.argsort(-column)[:5], np.sort(column)[::-1][:5])


def test_the_layers_of_our_own_translator_are_told_apart_and_each_has_its_text(open_page) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 21, "embed_dim": 16, "num_heads": 2, "num_layers": 1, "ff_dim": 31}
    model = models.Transformer(models.TransformerConfig(**sizes)).eval()
    source, target = ["Die", "Katze", "schläft", "gut", "."], ["<s>", "The", "cat", "sleeps", "well"]  # of one length
    with torch.no_grad(), regard.watch(model) as recording:
        model(torch.arange(5)[None], torch.arange(5)[None])
    recording.tokens, recording.source_tokens = target, source
    opened = open_page(recording)
    assert opened.page.eval_on_selector_all(".group", "all => all.map(one => one.textContent)") == [
        "encoder",
        "decoder",
        "cross",
    ]
    for layer, words in (("layer0", source), ("layer1", target), ("layer2", target)):
        opened.pick(layer)
        assert opened.page.eval_on_selector_all(".pane.query .t", "all => all.map(one => one.textContent)") == words


def test_generation_is_one_text_and_its_last_token_looks_at_all_before_it(open_page) -> None:
    recording, weights = generated(5, WORDS[:9])
    opened = open_page(recording, layer=1, head=2)
    assert opened.page.eval_on_selector_all(".t", "all => all.map(one => one.textContent)") == WORDS[:9]
    # what was generated is underlined, and the page says so
    assert opened.page.eval_on_selector_all(".generated", "all => all.map(one => one.dataset.at)") == list("5678")
    assert "underlined" in opened.page.inner_text(".about")
    for at in (2, 6, 8):
        if not opened.page.query_selector(f'.t.chosen[data-at="{at}"]'):
            opened.word(at)
        row = weights[1, 2, at]
        close(opened.listed(), np.argsort(-row)[: min(8, at + 1)], np.sort(row)[::-1][: min(8, at + 1)])


def test_the_item_of_a_batch_can_be_chosen(open_page) -> None:
    recording = sentence(WORDS, batch=3)
    recording.tokens = [WORDS, [word.upper() for word in WORDS], [word[::-1] for word in WORDS]]
    opened = open_page(recording, layer=0, head=1)
    opened.page.select_option('[data-pick="scene"]', "0,2")
    opened.settle()
    assert opened.page.inner_text('.t[data-at="1"]') == "tac"
    if not opened.page.query_selector('.t.chosen[data-at="4"]'):
        opened.word(4)
    call = recording.calls[0]
    close(opened.listed(), call.top_keys[2, 1, 4].numpy(), call.top_weights[2, 1, 4].numpy())


def test_hostile_tokens_change_no_element_and_run_nothing(open_page) -> None:
    tree = """root => [...root.querySelectorAll('*')]
      .map(one => one.tagName + '.' + [...one.attributes].map(a => a.name).join()).join(' ')"""
    plain = open_page(sentence(WORDS), layer=0, head=0)
    nasty = open_page(sentence(NASTY), layer=0, head=0)
    for opened in (plain, nasty):
        opened.page.focus(".scroller")
        opened.page.keyboard.press("Escape")
        opened.word(4)
    assert plain.page.eval_on_selector(".tokens", tree) == nasty.page.eval_on_selector(".tokens", tree)
    names = set(nasty.page.evaluate("[...document.querySelectorAll('*')].map(one => one.tagName)"))
    assert names.isdisjoint({"IMG", "IFRAME", "OBJECT", "A", "FORM"})
    assert nasty.page.evaluate("document.querySelectorAll('script').length") == 2
    shown = nasty.page.eval_on_selector_all(".t", "all => all.map(one => one.textContent)")
    assert "script" in shown[0] and "\u202e" not in shown[8] and len(shown[10]) < 60
    for view in ("overview", "head", "compare"):
        nasty.view(view)
    assert nasty.page.evaluate("document.querySelectorAll('script').length") == 2


def test_a_long_text_has_elements_only_near_the_window_and_scrolls_to_any_token(open_page) -> None:
    tokens = [f" w{at}" for at in range(1301)]
    opened = open_page(sentence(tokens, layers=1, heads=2, causal=True), layer=0, head=0)
    assert opened.page.evaluate("document.querySelectorAll('.t').length") < 1250
    assert "w1299" in opened.page.inner_text(".tokens") or "w1299" in opened.page.eval_on_selector(
        ".tokens", "one => one.textContent"
    )
    opened.page.eval_on_selector(".scroller", "one => { one.scrollTop = one.scrollHeight }")
    opened.page.wait_for_selector('.t[data-at="1295"]')
    opened.page.wait_for_timeout(300)  # what comes near the window gets its true height
    assert opened.page.evaluate("document.querySelectorAll('.t').length") < 1250
    opened.word(1295)
    assert opened.page.inner_text(".panel h2").split() == ["w1295", "1295"]
    opened.page.click(".looks.out li:first-child button")
    opened.settle()
    first = int(opened.page.get_attribute(".t.chosen", "data-at"))
    box = opened.page.locator(".t.chosen").bounding_box()
    assert first != 1295 and box is not None and 0 < box["y"] < 900


def test_columns_join_the_text_with_itself(open_page) -> None:
    recording = sentence()
    opened = open_page(recording, layer=0, head=0)
    opened.page.click(".text-view .bar .chips:nth-child(2) .chip:nth-child(2)")
    opened.settle()
    assert opened.page.evaluate("document.querySelectorAll('.pane.column').length") == 2
    opened.page.focus(".pane.query .scroller")
    opened.page.keyboard.press("Escape")
    opened.word(3)
    assert sum(colour[4] for colour in opened.pixels("canvas.lines") if colour[3] > 60) > 100
    one = recording[0, 0]
    close(opened.listed(), one.top_keys[3].numpy(), one.top_weights[3].numpy())
    opened.word(3, "key")  # on the right: who looks at it, and nothing else
    column = one.map.numpy()[:, 3]
    close(opened.listed("in"), np.argsort(-column)[:12], np.sort(column)[::-1][:12])
    assert opened.listed() == []
    assert not opened.page.query_selector("[aria-label=Show]")  # the side says which direction


def test_the_grid_says_where_every_head_looks(open_page) -> None:
    recording = sentence()
    opened = open_page(recording, layer=0, head=0)
    opened.page.focus(".scroller")
    opened.page.keyboard.press("Escape")
    opened.word(7)
    said = opened.page.eval_on_selector_all(".every-grid button", "all => all.map(one => one.textContent)")
    expected = [WORDS[int(recording[layer, head].top_keys[7, 0])] for layer in range(3) for head in range(4)]
    assert said == expected
    opened.page.click(".every-grid button >> nth=6")
    assert opened.page.get_attribute('[data-pick="layer1"]', "aria-pressed") == "true"
    assert opened.page.get_attribute('[data-pick="head2"]', "aria-pressed") == "true"


@pytest.mark.parametrize("size", [(1240, 700), (390, 844)])
def test_a_text_that_fits_is_whole_and_the_grid_below_shows_the_head_that_is_chosen(open_page, size) -> None:
    tokens = [word + "\n" if at == 3 else word for at, word in enumerate(WORDS[:12])]
    opened = open_page(sentence(tokens, layers=31, heads=9), size=size, layer=22, head=8)
    assert opened.page.eval_on_selector(".scroller", "one => one.scrollHeight - one.clientHeight") <= 0
    chosen = opened.page.locator('.every-grid [aria-pressed="true"]').bounding_box()
    grid = opened.page.locator(".every-grid").bounding_box()
    head = opened.page.locator(".every-grid .top >> nth=8").bounding_box()
    assert chosen is not None and grid is not None and head is not None
    assert head["y"] + head["height"] <= chosen["y"] and abs(head["x"] - chosen["x"]) < 2  # its number stays above it
    assert chosen["y"] + chosen["height"] <= grid["y"] + grid["height"] + 1
    assert chosen["x"] >= grid["x"] and chosen["x"] + chosen["width"] <= grid["x"] + grid["width"] + 1


def test_columns_of_a_right_to_left_text_face_each_other(open_page) -> None:
    opened = open_page(sentence(["القط", "جلس", "على", "الحصيرة"]), layer=0, head=0)
    opened.page.click("text=as columns")
    opened.settle()
    left, right = (opened.page.locator(f".pane.{side} .t >> nth=0").bounding_box() for side in ("query", "key"))
    stage = opened.page.locator(".stage").bounding_box()
    assert left is not None and right is not None and stage is not None
    assert right["x"] - left["x"] - left["width"] < stage["width"] / 2


def test_a_right_to_left_text_runs_from_right_to_left(open_page) -> None:
    opened = open_page(sentence(["القط", "جلس", "على", "الحصيرة", "لأنه", "كان", "متعبا"]), layer=0, head=0)
    first, second = (opened.page.locator(f'.t[data-at="{at}"]').bounding_box() for at in (0, 1))
    assert first is not None and second is not None and first["x"] > second["x"]
    opened.page.focus(".scroller")
    opened.page.keyboard.press("Escape")
    opened.page.keyboard.press("ArrowLeft")
    opened.page.keyboard.press("ArrowLeft")
    assert (
        opened.page.get_attribute(".t.chosen", "data-at") == "0"
        or opened.page.get_attribute(".t.chosen", "data-at") == "1"
    )


def test_what_a_long_text_receives_is_said_of_runs_of_tokens_not_of_single_ones(open_page) -> None:
    recording = sentence([f" w{at % 23}" for at in range(1100)], layers=1, heads=1)
    opened = open_page(recording, layer=0, head=0)
    opened.page.focus(".pane .scroller")
    opened.page.keyboard.press("Escape")
    opened.settle()
    mass = recording[0, 0].key_mass.double()
    rows = opened.page.eval_on_selector_all(
        ".looks li[data-at]",
        "all => all.map(li => [li.querySelector('bdi').textContent, li.querySelector('.place').textContent, "
        "Number(li.dataset.at), Number(li.dataset.weight)])",
    )
    assert len(rows) == 12
    for words, place, at, weight in rows:
        start, end = (int(part) for part in place.split("–"))
        assert start == at and end - start in (1, 2)
        assert weight == pytest.approx(float(mass[start : end + 1].sum() / mass.sum()), rel=1e-3)
        assert words == " ".join(f"w{n % 23}" for n in range(start, end + 1))
    assert "runs of about 2 tokens" in opened.page.inner_text(".panel")


def test_a_short_text_says_what_each_token_receives(open_page) -> None:
    recording = sentence(layers=1, heads=1)
    opened = open_page(recording, layer=0, head=0)
    opened.page.focus(".pane .scroller")
    opened.page.keyboard.press("Escape")
    opened.settle()
    mass = recording[0, 0].key_mass
    rows = opened.page.eval_on_selector_all(
        ".looks li[data-at]", "all => all.map(li => [Number(li.dataset.at), Number(li.dataset.weight)])"
    )
    for at, weight in rows:
        assert weight == pytest.approx(float(mass[at] / mass.sum()), rel=1e-3)
    assert "runs of" not in opened.page.inner_text(".panel")


def test_weights_that_were_rounded_to_save_room_are_not_called_exact(open_page, monkeypatch) -> None:
    recording = sentence([f" w{at % 23}" for at in range(301)], layers=2, heads=4)
    opened = open_page(recording, layer=0, head=0)
    assert "They are exact." in opened.page.inner_text(".panel .note")
    forced.sizes(monkeypatch, bytes_of_a_page=45_000)
    opened = open_page(recording, layer=0, head=0)
    opened.word(7)
    note = opened.page.inner_text(".panel .note")
    assert "rounded, by up to 0.4 percentage points" in note and "exact" not in note
    one = recording[0, 0]
    known = dict(zip(one.top_keys[7].tolist(), one.top_weights[7].tolist(), strict=True))
    found = opened.listed()
    assert found and max(abs(known[at] - weight) for at, weight in found) <= 0.004


@pytest.mark.parametrize(("tokens", "listed"), [(12, 12), (13, 13), (14, 12)])
def test_a_list_does_not_say_and_one_more_where_that_one_would_fit(open_page, tokens: int, listed: int) -> None:
    even = call_of(torch.zeros(1, 1, tokens, tokens, dtype=torch.float64), 0)
    opened = open_page(recording_of([even], [f"w{n}" for n in range(tokens)]), layer=0, head=0)
    opened.word(3)
    assert len(opened.listed()) == listed
    rest = opened.page.eval_on_selector_all(".looks .rest", "all => all.map(one => one.textContent)")
    assert rest == ([] if listed == tokens else ["and 2 more"])


@pytest.mark.parametrize("at", [311, 1709, 2991])
def test_a_token_far_down_stays_in_sight_as_columns(open_page, at: int) -> None:
    opened = open_page(sentence([f" w{n}" for n in range(3000)], layers=1, heads=1, causal=True), layer=0, head=0)

    def in_sight(side: str, place: int) -> bool:
        for _ in range(30):  # what is far from the window is laid out after it was reached
            opened.settle()
        return opened.page.evaluate(f"""(() => {{
          const pane = document.querySelector('.pane.{side} .scroller'), frame = pane.getBoundingClientRect();
          const box = pane.querySelector('.t[data-at="{place}"]')?.getBoundingClientRect();
          return !!box && box.top >= frame.top && box.bottom <= frame.bottom;
        }})()""")

    opened.page.eval_on_selector(".scroller", f"one => {{ one.scrollTop = {at} / 3000 * one.scrollHeight }}")
    for _ in range(30):
        opened.settle()
    opened.word(at)
    opened.page.click("text=as columns")
    assert in_sight("query", at)
    key = opened.listed()[0][0]
    opened.page.click(".looks.out li:nth-child(1) button")
    assert in_sight("key", key)


@pytest.mark.parametrize("layout", ["as text", "as columns"])
def test_on_a_phone_a_long_text_scrolls_in_its_own_window_and_the_weights_stand_below_it(open_page, layout) -> None:
    recording = sentence([f" w{n}" for n in range(1000)], layers=1, heads=1, causal=True)
    opened = open_page(recording, layer=0, head=0, size=(390, 844))
    opened.page.click(f"text={layout}")
    opened.settle()
    heights = opened.page.evaluate("""['.stage', '.scroller'].map(name => {
      const one = document.querySelector(name);
      return [one.clientHeight, one.scrollHeight];
    })""")
    assert heights[0][0] < 500 and heights[1][0] < 500 < heights[1][1]
    place = "document.querySelector('.panel').offsetTop - document.querySelector('.split').offsetTop"
    top = opened.page.evaluate(place)
    assert top < 844
