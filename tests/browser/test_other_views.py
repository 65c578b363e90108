"""Overview, head and comparison: opened, clicked, pointed at, zoomed; their pixels are those of the recorded maps."""

from __future__ import annotations

import numpy as np
import pytest
from tests.browser.recordings import WORDS, sentence

LONG = [f" w{at % 29}" for at in range(139)]


def strongest(opened, selector: str) -> tuple[float, float]:
    """Where the darkest pixel of a canvas is, as shares of its height and width."""
    y, x = opened.page.eval_on_selector(
        selector,
        """canvas => {
          const { width, height } = canvas, data = canvas.getContext('2d').getImageData(0, 0, width, height).data;
          let best = 1e9, at = 0;
          for (let i = 0; i < data.length; i += 4) {
            const sum = data[i] + data[i + 1] + data[i + 2];
            if (data[i + 3] === 255 && sum < best) { best = sum; at = i / 4; }
          }
          return [Math.floor(at / width) / height, (at % width) / width];
        }""",
    )
    return y, x


def test_the_overview_has_a_map_of_every_head_whose_darkest_cell_is_the_largest_weight(open_page) -> None:
    recording = sentence()
    opened = open_page(recording)
    opened.view("overview")
    assert opened.page.evaluate("document.querySelectorAll('.cell').length") == 12
    for layer, head in [(0, 0), (1, 2), (2, 3)]:
        weights = recording[layer, head].map.numpy()
        y, x = strongest(opened, f'.cell[data-place="{layer},{head}"] canvas')
        row, column = np.unravel_index(weights.argmax(), weights.shape)
        assert (round(y * weights.shape[0]), round(x * weights.shape[1])) == (row, column)


def test_heads_are_sorted_and_filtered_by_what_was_measured(open_page) -> None:
    recording = sentence(LONG, causal=True)
    opened = open_page(recording)
    opened.view("overview")
    opened.page.select_option(".overview select", "entropy")
    opened.settle()
    shown = opened.page.eval_on_selector_all(".cell .tag", "all => all.map(one => Number(one.textContent))")
    assert shown == sorted(shown, reverse=True) and len(shown) == 12
    expected = max(float(recording[layer, head].entropy.mean()) for layer in range(3) for head in range(4))
    assert shown[0] == pytest.approx(expected, abs=0.006)
    chips = opened.page.eval_on_selector_all(
        ".overview .bar .chip .count", "all => all.map(one => Number(one.textContent))"
    )
    opened.page.click(".overview .bar .chips .chip:nth-child(2)")
    opened.settle()
    assert opened.page.evaluate("document.querySelectorAll('.cell').length") == chips[1]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_twelve_heads_stand_in_one_line_and_no_name_is_cut(open_page, lang: str) -> None:
    opened = open_page(sentence(layers=1, heads=12), lang=lang)
    opened.view("overview")
    tops = opened.page.eval_on_selector_all(".cell", "all => all.map(one => one.getBoundingClientRect().top)")
    assert len(set(tops)) == 1  # the heads of a layer stand in one line
    opened.page.click("summary")
    cut = opened.page.evaluate(
        """() => [...document.querySelectorAll('.rules b')].map(one => one.textContent).filter(name => {
          const tag = document.querySelector('[data-place="0,11"] .tag');
          tag.textContent = name;
          return tag.scrollWidth > tag.clientWidth;
        })"""
    )
    assert cut == []


def test_the_thresholds_are_printed(open_page) -> None:
    opened = open_page(sentence())
    opened.view("overview")
    opened.page.click("summary")
    said = opened.page.inner_text(".rules")
    assert said.count("\n") >= 8  # one line for each name
    assert all(least in said for least in ("30 %", "50 %", "80 %"))


def test_a_head_opens_from_the_overview_and_a_cell_says_query_key_and_weight(open_page) -> None:
    recording = sentence()
    opened = open_page(recording)
    opened.view("overview")
    opened.page.click('.cell[data-place="1,2"]')
    opened.settle()
    assert opened.page.inner_text(".head-view h2") == "Layer 1, head 2"
    weights = recording[1, 2].map.numpy()
    assert opened.page.inner_text(".scale").split()[-2:] == [f"{100 * weights.max():.1f}", "%"]  # what the colours mean
    box = opened.page.locator(".map canvas").bounding_box()
    frame = map_box(opened, len(WORDS), len(WORDS))
    for row, column in [(0, 0), (7, 1), (len(WORDS) - 1, 3)]:
        x = box["x"] + frame["left"] + (column + 0.5) / len(WORDS) * frame["width"]
        y = box["y"] + frame["top"] + (row + 0.5) / len(WORDS) * frame["height"]
        opened.page.mouse.move(x, y)
        opened.settle()
        said = opened.page.inner_text(".tip").split()
        assert said[:2] == [WORDS[row], str(row)] and said[3:5] == [WORDS[column], str(column)]
        assert float(said[-2]) / 100 == pytest.approx(float(weights[row, column]), abs=6e-4)
    opened.page.mouse.click(x, y)
    opened.view("text")
    assert opened.page.get_attribute(".t.chosen", "data-at") == str(len(WORDS) - 1)


def map_box(opened, queries: int, keys: int) -> dict[str, float]:
    """Where the cells of a map lie on its canvas, as the page computes it."""
    width, height = opened.page.eval_on_selector(".map", "one => [one.clientWidth, one.clientHeight]")
    left, top, strip = (62, 56, 26) if width < 420 else (104, 84, 26)
    scale = min((width - left - strip) / keys, (height - top - strip) / queries)
    return {"left": left, "top": top, "width": keys * scale, "height": queries * scale}


def test_zooming_shows_single_weights_of_a_long_text(open_page) -> None:
    recording = sentence(LONG, causal=True)
    opened = open_page(recording, layer=1, head=0)
    opened.view("head")
    before = opened.pixels(".map canvas")
    for _ in range(5):
        opened.page.click('.head-view .bar [aria-label="Zoom in"]')
    opened.settle()
    after = opened.pixels(".map canvas")
    assert before != after
    box = opened.page.locator(".map canvas").bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.5)
    opened.settle()
    words = opened.page.inner_text(".tip").split()
    query, key = int(words[1]), int(words[4])
    assert words[0] == LONG[query].strip() and words[3] == LONG[key].strip()
    opened.page.click('.head-view .bar [aria-label="Whole map"]')
    opened.page.mouse.move(5, 5)
    opened.settle()
    assert opened.pixels(".map canvas")[:3] == before[:3]


def test_fingers_tap_words_and_pinch_the_map(open_page) -> None:
    recording = sentence()
    opened = open_page(recording, layer=0, head=1, size=(390, 844), touch=True)
    opened.page.tap('.t[data-at="13"]')
    opened.settle()
    one = recording[0, 1]
    assert opened.listed()[0] == (int(one.top_keys[13, 0]), pytest.approx(float(one.top_weights[13, 0]), abs=2e-5))
    opened.page.tap("[data-view=head]")
    opened.settle()
    box = opened.page.locator(".map canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    fingers = opened.page.context.new_cdp_session(opened.page)

    def touch(kind: str, *apart: int) -> None:
        points = [{"x": x + sign * far, "y": y, "id": at} for far in apart for at, sign in enumerate((-1, 1))]
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        opened.settle()

    whole = opened.pixels(".map canvas")
    touch("touchStart", 20)
    touch("touchMove", 60)
    touch("touchMove", 100)
    touch("touchEnd")
    near = opened.pixels(".map canvas")
    assert near != whole
    opened.page.tap('[aria-label="Whole map"]')
    opened.page.mouse.move(1, 1)
    opened.settle()
    assert opened.pixels(".map canvas") != near


def test_a_cell_that_is_among_the_largest_is_exact_and_another_is_said_to_be_a_mean(open_page) -> None:
    recording = sentence(LONG, causal=True)
    opened = open_page(recording, layer=1, head=0)
    opened.view("head")
    opened.page.focus(".map canvas")
    one = recording[1, 0]
    target = int(one.top_keys[100, 0])
    for _ in range(100):
        opened.page.keyboard.press("ArrowDown")
    for _ in range(target):
        opened.page.keyboard.press("ArrowRight")
    opened.settle()
    said = opened.page.inner_text(".tip")
    assert f"{LONG[100].strip()} 100" in said
    assert float(said.split()[-2]) / 100 == pytest.approx(float(one.top_weights[100, 0]), abs=6e-4)
    assert set(range(101)) - set(one.top_keys[100].tolist())
    step = "ArrowLeft" if target else "ArrowRight"
    while int(opened.page.inner_text(".tip .place >> nth=1")) in one.top_keys[100].tolist():
        opened.page.keyboard.press(step)
    assert "mean of" in opened.page.inner_text(".tip")


def test_two_recordings_are_compared_and_the_head_that_changed_most_is_first(open_page) -> None:
    before, after = sentence(title="before"), sentence(title="after")
    changed = sentence(seed=5).calls[1]
    for name, part in after.calls[1].parts.items():
        part[:, 2] = changed.parts[name][:, 2]
    opened = open_page(before, against=after, layer=1, head=2)
    opened.view("compare")
    assert "before" in opened.page.inner_text(".three section:nth-child(1) h2")
    assert "after" in opened.page.inner_text(".three section:nth-child(2) h2")
    first = opened.page.inner_text(".compare-view .looks li:first-child")
    assert "Layer 1, head 2" in first
    maps = before[1, 2].map.numpy() - after[1, 2].map.numpy()
    expected = 50 * np.abs(maps).sum() / len(WORDS)
    assert float(first.split()[-2]) == pytest.approx(expected, abs=0.06)
    rest = opened.page.eval_on_selector_all(
        ".compare-view .looks li", "all => all.map(one => Number(one.dataset.weight))"
    )
    assert rest[1:] == [0] * (len(rest) - 1)
    blue = [c for c in opened.pixels(".three section:nth-child(3) canvas") if c[2] > c[0] + 60]
    orange = [c for c in opened.pixels(".three section:nth-child(3) canvas") if c[0] > c[2] + 60]
    assert blue and orange
    # all three maps have one size, so that a place of one is the same place in the others
    pointed = set()
    for section in (1, 2, 3):
        box = opened.page.locator(f".three section:nth-child({section}) canvas").bounding_box()
        opened.page.mouse.move(box["x"] + 335, box["y"] + 200)
        opened.settle()
        pointed.add(opened.page.inner_text(f".three section:nth-child({section}) .tip").split("\n")[0])
    assert len(pointed) == 1


def test_a_longer_text_is_compared_at_the_same_head_and_its_end_can_be_clicked(open_page) -> None:
    opened = open_page(sentence(["only"], title="short"), against=sentence(title="long"), layer=1, head=2)
    opened.view("compare")
    longer = opened.page.locator(".three section:nth-child(2) canvas")
    box = longer.bounding_box()
    longer.click(position={"x": box["width"] / 2, "y": box["height"] * 0.7})
    opened.page.select_option('[aria-label="B Recording"]', "0,0")
    assert "Layer 1, head 2 · short" in opened.page.inner_text(".three section:nth-child(2) h2")
    opened.view("text")
    assert opened.page.inner_text(".pane.query .t") == "only"


def test_equal_heads_have_no_difference(open_page) -> None:
    opened = open_page(sentence(title="a"), against=sentence(title="b"), layer=0, head=1)
    opened.view("compare")
    colours = opened.pixels(".three section:nth-child(3) canvas")
    assert not [c for c in colours if abs(c[2] - c[0]) > 60 and c[3] == 255]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["wide", "narrow"])
def test_every_view_fits_its_window(open_page, size, dark) -> None:
    opened = open_page(sentence(), size=size, dark=dark)
    for view in ("text", "overview", "head", "compare", "walk", "cost"):
        opened.view(view)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= size[0]
        ground = opened.page.eval_on_selector(".regard", "one => getComputedStyle(one).backgroundColor")
        assert ground == ("rgb(20, 22, 27)" if dark else "rgb(255, 255, 255)")


def test_the_page_speaks_chinese_and_its_theme_can_be_changed(open_page) -> None:
    opened = open_page(sentence(), lang="zh")
    assert opened.page.inner_text("[role=tab] >> nth=0") == "文本"
    assert opened.page.get_attribute(".regard", "lang") == "zh-CN"
    opened.page.click(".tools .chip:nth-child(1)")
    assert opened.page.inner_text("[role=tab] >> nth=0") == "Text"
    opened.page.click(".tools .chip:nth-child(2)")
    assert opened.page.get_attribute(".regard", "data-theme") == "dark"


def test_a_cell_between_two_of_the_map_belongs_to_the_one_that_holds_its_pair(open_page) -> None:
    recording = sentence([f"w{n}" for n in range(100)], layers=1, heads=1, size=64)
    one = recording[0, 0]
    first = [row * 100 // 64 for row in range(65)]

    def cell(at: int) -> int:
        return max(row for row in range(64) if first[row] <= at)

    at = next(at for at in range(100) if cell(at) != int((at + 0.5) * 64 / 100))  # rounding would take its neighbour
    key = next(key for key in range(100) if key not in one.top_keys[at].tolist())
    opened = open_page(recording, layer=0, head=0)
    opened.view("head")
    opened.page.focus(".map canvas")
    for _ in range(at):
        opened.page.keyboard.press("ArrowDown")
    for _ in range(key):
        opened.page.keyboard.press("ArrowRight")
    opened.settle()
    said = opened.page.inner_text(".tip b")
    row, column = cell(at), cell(key)
    pairs = (first[row + 1] - first[row]) * (first[column + 1] - first[column])
    assert f"mean of {pairs} weights" in said
    # eight bits of the square root
    assert float(said.split()[-2]) / 100 == pytest.approx(float(one.map[row, column]), abs=4e-3 * float(one.map.max()))


def test_compared_maps_have_scales_with_the_largest_weight_and_the_largest_difference(open_page) -> None:
    recording = sentence(layers=1)
    opened = open_page(recording, layer=0, head=1)
    opened.view("compare")
    a, b = recording[0, 1].map, recording[0, 2].map
    scales = opened.page.eval_on_selector_all(".three .scale", "all => all.map(one => one.textContent)")
    top, most = 100 * max(float(a.max()), float(b.max())), 100 * float((a - b).abs().max())
    assert scales == [f"weight 0 %{top:.1f} %"] * 2 + [f"−{most:.1f} points+{most:.1f} points"]
    # colours go with square roots, and the scale's numbers evenly: nearly half of the colours lie below a quarter
    for nth, place in ((0, (8 / 17) ** 2), (2, (1 - (1 / 17) ** 2) / 2)):
        ground = opened.page.evaluate(f"document.querySelectorAll('.three .scale i')[{nth}].style.background")
        assert float(ground.split("rgb")[9].split(")")[1].strip(" ,%")) == pytest.approx(100 * place, abs=0.01)


def test_the_difference_of_two_shares_is_in_percentage_points(open_page) -> None:
    opened = open_page(sentence(layers=1), layer=0, head=1)
    opened.view("compare")
    rows = opened.page.eval_on_selector_all(
        ".compare-view .stats tbody tr", "all => all.map(row => [...row.children].map(cell => cell.textContent))"
    )
    by_name = {name: cells for name, *cells in rows}
    a, b, change = by_name["on the first token"]
    assert a.endswith(" %") and b.endswith(" %") and change.endswith(" points")
    number = float(change.removesuffix(" points").replace("−", "-"))
    assert number == pytest.approx(float(a.removesuffix(" %")) - float(b.removesuffix(" %")), abs=0.1)
    assert "points" not in by_name["entropy"][2]
    assert rows[0][0] == "name"


def test_a_difference_of_nearly_nothing_says_so(open_page) -> None:
    before, after = sentence(layers=1, title="a"), sentence(layers=1, title="b")
    after.calls[0].parts["map"] = after.calls[0].parts["map"] + 3e-5
    opened = open_page(before, against=after, layer=0, head=1)
    opened.view("compare")
    assert opened.page.inner_text(".three section:nth-child(3) .scale").split("\n") in (
        ["< 0.01 points", "< 0.01 points"],
        ["< 0.01 points < 0.01 points"],
    )


@pytest.mark.parametrize("words", [["a", "b", "c"], [f"{n}WWWWWWWWWWWW" for n in range(24)]], ids=["short", "long"])
def test_the_strip_of_entropies_is_named_beside_it_and_not_across_the_labels_of_keys(open_page, words) -> None:
    opened = open_page(sentence(words, layers=1), layer=0, head=0)
    opened.view("compare")
    inked = """canvas => {
      const ratio = canvas.width / canvas.clientWidth, width = canvas.clientWidth, height = canvas.clientHeight;
      const left = width < 420 ? 62 : 104, top = width < 420 ? 56 : 84;
      const size = Math.min(width - left - 38, height - top - 26), right = left + size;
      const ink = (x, y, w, h) => canvas.getContext('2d').getImageData(x * ratio, y * ratio, w * ratio, h * ratio).data
        .filter((value, at) => at % 4 === 3 && value > 0).length;
      return [ink(right + 26, top - 12, 12, 11), ink(right + 26, top, 12, 45), ink(right + 2, top - 45, 34, 40)];
    }"""
    between, beside, above = opened.page.eval_on_selector(".three section:nth-child(1) canvas", inked)
    assert between == 0 and beside > 0  # a long label goes on above the name, and does not touch it
    assert (above == 0) == (words[0] == "a")


def test_the_overview_says_what_its_strongest_colour_is(open_page) -> None:
    opened = open_page(sentence())
    opened.view("overview")
    assert "up to that head's largest" in opened.page.inner_text(".overview .help")


@pytest.mark.parametrize("view", ["walk", "overview"])
def test_print_has_all_of_a_view_not_its_first_screen(open_page, view) -> None:
    opened = open_page(sentence(layers=9), size=(900, 500))
    opened.view(view)
    opened.page.emulate_media(media="print")
    opened.settle()
    last = opened.page.evaluate("[...document.querySelectorAll('.step, .cell')].at(-1).getBoundingClientRect().bottom")
    assert last > 900
    assert opened.page.evaluate("document.documentElement.scrollHeight") >= last
    clipped = opened.page.evaluate("""[...document.querySelectorAll('.regard, main, main *')].filter(one =>
      one.scrollHeight > one.clientHeight + 1 && /auto|hidden|scroll/.test(getComputedStyle(one).overflowY)
      && one.querySelector('.step, .cell')).length""")
    assert clipped == 0
