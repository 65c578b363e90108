"""A vision model: the picture, its patches, and what each looks at."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.browser.recordings import call_of, recording_of
from tests.browser.test_text_view import close

SIDE = 5


def seen(first: int = 1):
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, 2, SIDE**2 + first, SIDE**2 + first, generator=draw, dtype=torch.float64)
    return recording_of([call_of(logits, 0), call_of(logits.flip(-1), 1)], [])


def drawn() -> np.ndarray:
    """A picture whose patches each have one colour."""
    ramp = np.linspace(30, 250, SIDE).astype(np.uint8)
    small = np.stack(
        [np.repeat(ramp[:, None], SIDE, 1), np.repeat(ramp[None], SIDE, 0), np.full((SIDE, SIDE), 90, np.uint8)], -1
    )
    return small.repeat(16, 0).repeat(16, 1)


def test_a_patch_that_is_clicked_shows_what_it_looks_at(open_page) -> None:
    recording = seen()
    opened = open_page(recording, picture=drawn(), layer=0, head=1)
    opened.wait_until("document.querySelector('.picture canvas').width > 200")
    box = opened.page.locator(".picture canvas").bounding_box()
    row, column = 2, 3
    opened.page.mouse.click(
        box["x"] + (column + 0.5) / SIDE * box["width"], box["y"] + (row + 0.5) / SIDE * box["height"]
    )
    opened.page.mouse.move(5, 5)
    opened.settle()
    token = 1 + row * SIDE + column
    assert opened.page.inner_text(".panel h2").split() == ["2,3", str(token)]
    one = recording[0, 1]
    close(opened.listed(), one.top_keys[token].numpy(), one.top_weights[token].numpy())
    # the patch that gets most is the brightest part of the darkened picture
    strongest = next(at for at, _ in opened.listed() if at >= 1) - 1
    light = opened.page.eval_on_selector(
        ".picture canvas",
        f"""canvas => {{
          const context = canvas.getContext('2d'), w = canvas.width / {SIDE}, h = canvas.height / {SIDE};
          return Array.from({{ length: {SIDE**2} }}, (_, at) => {{
            const x = (at % {SIDE}) * w + w / 2, y = Math.floor(at / {SIDE}) * h + h / 2;
            const [r, g, b] = context.getImageData(x, y, 1, 1).data;
            return r + g + b;
          }});
        }}""",
    )
    plain = drawn()[8::16, 8::16].astype(int).sum(-1).reshape(-1)
    assert int(np.argmax(np.array(light) / plain)) == strongest
    opened.page.focus(".scroller")
    opened.page.keyboard.press("ArrowDown")
    assert opened.page.inner_text(".panel h2").split()[0] == "3,3"
    opened.page.click(".picture .t")
    assert opened.page.inner_text(".panel h2").split() == ["[CLS]", "0"]


@pytest.mark.parametrize("first", [0, 1])
def test_a_picture_opens_at_what_stands_for_all_of_it_or_at_its_middle(open_page, first: int) -> None:
    opened = open_page(seen(first), picture=drawn())
    assert opened.page.inner_text(".panel h2").split() == (["[CLS]", "0"] if first else ["2,2", "12"])
    assert opened.page.get_attribute('[data-pick="layer1"]', "aria-pressed") == "true"
    assert "patch" in opened.page.inner_text(".bar .help")


@pytest.mark.parametrize(
    ("picture", "patches", "said"),
    [
        (np.zeros((3, 4, 5, 6)), None, "picture must be"),
        (np.full((8, 8, 3), 7.0), None, "expected 0 to 1"),
        (np.zeros((8, 8, 3)), (9, 9), "expected \\(rows, columns\\)"),
    ],
)
def test_a_picture_that_cannot_be_shown_is_refused(picture, patches, said) -> None:
    with pytest.raises(ValueError, match=said):
        seen().to_html(picture=picture, patches=patches)


def test_pictures_of_every_layout_are_taken() -> None:
    recording = seen(0)
    for picture in (
        torch.rand(3, 40, 40),
        torch.rand(1, 3, 40, 40),
        np.zeros((40, 40), np.uint8),
        np.zeros((2000, 900, 4), np.uint8),
    ):
        assert len(recording.to_html(picture=picture)) < 700_000
