"""The page as notebooks run it: a widget inside a shadow root, and a frame."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from tests.browser.conftest import Opened
from tests.browser.recordings import sentence
from tests.browser.test_text_view import close

from regard._page import script
from regard._page._pack import pack

RENDER = """async ([code, data]) => {
  const page = await import('data:text/javascript;base64,' + code);
  const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0));
  const model = { get: name => name === 'data' ? new DataView(bytes.buffer) : null };
  page.default.render({ model, el: document.getElementById('cell') });
}"""


@pytest.mark.parametrize("light", ["true", "false"])
def test_a_widget_lives_in_a_shadow_root_and_follows_the_theme_of_its_notebook(browser: Any, light: str) -> None:
    recording = sentence()
    context = browser.new_context(viewport={"width": 1000, "height": 700})
    opened = Opened(context.new_page())
    opened.page.set_content(
        f'<body data-jp-theme-light="{light}"><style>button {{ color: red }}</style><div id="cell"></div></body>'
    )
    data = pack([recording], None, {"open": {"layer": 1, "head": 2}})
    opened.page.evaluate(RENDER, [base64.b64encode(script().encode()).decode(), base64.b64encode(data).decode()])
    opened.page.wait_for_selector(".regard .t")  # Playwright looks into open shadow roots
    assert opened.page.evaluate("document.querySelector('.regard')") is None
    assert opened.page.get_attribute(".regard", "data-theme") == ("light" if light == "true" else "dark")
    opened.page.focus(".scroller")
    opened.page.keyboard.press("Escape")
    opened.word(4)
    one = recording[1, 2]
    close(opened.listed(), one.top_keys[4].numpy(), one.top_weights[4].numpy())
    colour = opened.page.eval_on_selector("[data-pick=layer0]", "one => getComputedStyle(one).color")
    assert colour != "rgb(255, 0, 0)"  # the notebook's styles stay outside
    assert opened.said == []
    context.close()


def test_the_html_of_a_notebook_is_the_page_in_a_frame(browser: Any) -> None:
    recording = sentence()
    context = browser.new_context(viewport={"width": 1000, "height": 700})
    opened = Opened(context.new_page())
    opened.page.set_content(recording._repr_mimebundle_()["text/html"])
    frame = opened.page.frame_locator("iframe")
    frame.locator(".regard.cell .t").first.wait_for()
    frame.locator('.t[data-at="3"]').click()
    assert frame.locator(".panel h2").inner_text().split()[0] == "on"
    picture = opened.page.locator("img").bounding_box()
    assert picture is not None and picture["height"] < 620  # all of it lies under the frame
    assert opened.said == []
    context.close()
