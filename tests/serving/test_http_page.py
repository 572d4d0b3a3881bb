"""The page, in a real headless browser: what it shows is what the cache holds."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from typing import Any

import chromium
import numpy as np
import pytest
from serving_client import generated, running, until

from kvjax import catalogue, metrics
from kvjax.engine.batch import RunningBatch
from kvjax.engine.compiler import WORKERS

BROWSER = chromium.find_browser()

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here: apt-get install chromium, or KVJAX_CHROMIUM=FILE"
)

PROMPT = "The quick brown fox jumps over the lazy dog, and nobody minds. "
POLICIES = ("full", "window(16) + sinks(4)")
NEW = 12
CONTROL = 2


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[chromium.Tab]:
    """One browser for all tests."""
    assert BROWSER is not None
    with chromium.tab(BROWSER, tmp_path_factory.mktemp("browser")) as browser_tab:
        yield browser_tab


@pytest.fixture(scope="module")
def written(server, tab) -> chromium.Tab:
    """The page after two texts, asked for by keyboard alone."""
    tab.size(1280, 1000)
    tab.open(server.url + "/")
    tab.until("document.getElementById('server').textContent.includes('512 positions')")
    for name, text in {
        "prompt": PROMPT,
        "policy-a": POLICIES[0],
        "policy-b": POLICIES[1],
        "tokens": str(NEW),
    }.items():
        tab.run(f"(document.getElementById('{name}').focus(), document.getElementById('{name}').select())")
        tab.type(text)
    tab.key("Enter", 13, modifiers=CONTROL)
    tab.until("!document.getElementById('steps').hidden")
    tab.until("document.getElementById('stop').disabled", 120)
    return tab


def side(tab: chromium.Tab, at: int, what: str) -> Any:
    """An expression of one side: ``answer`` is its answer, ``side`` its cache."""
    elements = f"answer = document.querySelectorAll('.answer')[{at}]"
    elements += f", side = document.querySelectorAll('.side')[{at}]"
    return tab.run(f"(() => {{ const {elements}; return {what}; }})()")


def present(folder: Any, policy: str) -> np.ndarray:
    """Bool [L, K, C] of the library's own state after the same text."""
    _, _, state = generated(folder, policy, PROMPT, NEW)
    return np.asarray(metrics.present(state))[:, 0]


@pytest.mark.parametrize("at", [0, 1])
def test_tokens_are_coloured_by_what_the_library_holds(written, tiny_folder, at):
    text, tokens, _ = generated(tiny_folder, POLICIES[at], PROMPT, NEW)
    assert side(written, at, "answer.querySelector('.text').textContent") == text
    held = present(tiny_folder, POLICIES[at])
    seen = len(PROMPT) + 1 + len(tokens) - 1
    shown = side(
        written, at, "[...side.querySelectorAll('.tokens span')].map(s => [+s.dataset.exact, s.className])"
    )
    assert [count for count, _ in shown] == held.sum((0, 1))[:seen].tolist()
    new = [name for _, name in shown[len(PROMPT) + 1 :]]
    assert all("new" in name for name in new)
    assert ["nowhere" in name for _, name in shown] == (held.sum((0, 1))[:seen] == 0).tolist()
    grid = side(
        written, at, "[...side.querySelectorAll('.grid td:not(:empty)')].map(cell => +cell.textContent)"
    )
    assert grid == held.sum(-1).ravel().tolist()


def test_the_slider_goes_back_and_stays_there(written):
    steps = written.run("+document.getElementById('step').max")
    assert steps >= 1, "only one look at the cache"
    written.run("document.getElementById('step').focus()")
    whole = side(written, 1, "side.querySelectorAll('.tokens span').length")
    written.key("Home", 36)
    fed = [side(written, at, "side.querySelectorAll('.tokens span').length") for at in (0, 1)]
    assert len(PROMPT) < min(fed) < whole
    named = written.run("document.getElementById('step-name').textContent")
    assert named == f"token {min(fed) - len(PROMPT)} of {NEW}"
    written.key("End", 35)
    assert side(written, 1, "side.querySelectorAll('.tokens span').length") == whole
    assert written.run("document.getElementById('step-name').textContent") == f"token {NEW} of {NEW}"


def test_a_token_says_where_it_is_held(written):
    written.run("document.querySelectorAll('.tokens')[1].focus()")
    written.key("Home", 36)
    facts = "side.querySelector('.token-facts').textContent"
    assert side(written, 1, facts).startswith("Token 0 “<bos>”: held by 4 of 4 heads (layer 0: head 0 (")
    for _ in range(5):
        written.key("ArrowRight", 39)
    assert side(written, 1, facts) == "Token 5 “q”: held by 0 of 4 heads."
    assert side(written, 1, "side.querySelectorAll('[aria-selected=true]').length") == 1
    assert written.run("document.activeElement.className") == "tokens"


def test_every_control_has_a_name_and_can_be_reached(written):
    nameless = """[...document.querySelectorAll('input, textarea, select')]
        .filter(e => !e.labels.length).map(e => e.id)"""
    assert written.run(nameless) == []
    written.run("document.getElementById('prompt').focus()")
    reached = []
    for _ in range(16):
        reached.append(written.run("document.activeElement.id || document.activeElement.className"))
        written.key("Tab", 9)
    order = ["policy-a", "policy-b", "mode", "tokens", "temperature", "go", "link", "step"]
    assert [name for name in dict.fromkeys(reached) if name in order] == order


CONTRAST = """(() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => { for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)|transparent|color/.test(colour)) return colour; }
    return 'rgb(255,255,255)'; };
  return [...document.querySelectorAll('h1, h2, h3, label, p, output, th, td, button, .tokens .nowhere')]
    .filter(e => e.checkVisibility() && !e.disabled && e.textContent.trim()).map(e => {
      const [a, b] = [light(getComputedStyle(e).color), light(ground(e))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      return [ratio, e.tagName + '.' + e.className, e.textContent.slice(0, 20)];
    }).filter(([ratio]) => ratio < 4.5);
})()"""


COLOURS = """async (png) => {
  const image = new Image();
  image.src = 'data:image/png;base64,' + png;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height), pen = canvas.getContext('2d');
  pen.drawImage(image, 0, 0);
  const all = pen.getImageData(0, 0, image.width, image.height).data, found = {};
  for (let i = 0; i < all.length; i += 4) {
    const colour = all.slice(i, i + 3).join(',');
    found[colour] = (found[colour] ?? 0) + 1;
  }
  return [found, image.width, image.height];
}"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_reads_well_on_a_phone_and_in_the_dark(written, tmp_path, dark, width):
    written.size(width, 844, dark)
    assert written.run("document.documentElement.scrollWidth") <= width
    assert written.run(CONTRAST) == []
    small = written.run(
        "[...document.querySelectorAll('button, input, select')].filter(e => e.checkVisibility() "
        "&& e.type != 'range' && e.getBoundingClientRect().height < 40).map(e => e.id)"
    )
    assert small == [], "too small for a thumb"
    # What a person sees: the picture has the colour of what is held, and the ground of the theme.
    picture = base64.b64encode(written.screenshot(tmp_path / "page.png")).decode()
    colours, wide, high = written.run(f"({COLOURS})('{picture}')")
    assert width - 20 < wide <= width  # a scroll bar
    assert high > 900
    exact, ground = ("91,155,255", "20,23,27") if dark else ("42,111,214", "251,251,249")
    assert colours.get(exact, 0) > 500, "nothing is marked as held"
    assert colours.get(ground, 0) > 0.1 * wide * high


def test_nothing_is_loaded_from_elsewhere_and_nothing_fails(written, server):
    assert written.errors == []
    strange = [u for u in written.requested if not u.startswith((server.url, "data:", "about:"))]
    assert strange == []


def bytes_of(tab: chromium.Tab, at: int, kind: str) -> list[tuple[float, float]]:
    """Points of a curve; 420 wide, 100 high, (0, 0) is the upper left corner."""
    path = side(tab, at, f"answer.querySelector('.bytes path.{kind}').getAttribute('d')")
    return [tuple(map(float, point.split())) for point in path[1:].split("L")]


def test_bytes_are_drawn_on_the_scale_of_what_is_held(written, tiny_folder):
    """Not of what the batch has allocated, which flattens them; both sides have one scale."""
    for at, policy in enumerate(POLICIES):
        _, _, state = generated(tiny_folder, policy, PROMPT, NEW)
        live, full = bytes_of(written, at, "live"), bytes_of(written, at, "full")
        assert live[0][0] == full[0][0] == 0
        assert live[-1][0] == full[-1][0] == 420
        held = float(metrics.live_slots(state).sum()) / (4 * int(state.length[0]))  # of all layers and heads
        assert (100 - live[-1][1]) / (100 - full[-1][1]) == pytest.approx(held, rel=0.15)
    highest = min(y for at in (0, 1) for kind in ("live", "full") for _, y in bytes_of(written, at, kind))
    assert highest == 0
    assert "on the device" in side(written, 1, "side.querySelector('.allocated').textContent")
    facts = side(written, 1, "answer.querySelector('.bytes-facts').textContent")
    assert f"token 1 to {NEW}" in facts


def test_every_look_is_a_point_of_the_line(written):
    drawn = """import('/page/answer.js').then(({Answer}) => {
      const root = document.getElementById('answer').content.firstElementChild.cloneNode(true);
      const answer = new Answer(root, 'planted');
      for (const [seen, live] of [[30, 300], [10, 100], [20, 150]]) answer.took(seen, live, 10 * seen);
      answer.end();
      answer.draw(300, 30, 30);
      return root.querySelector('path.live').getAttribute('d');
    })"""
    assert written.run(drawn) == "M0.0 66.7L210.0 50.0L420.0 0.0"


def test_no_head_is_cut_on_a_phone(written):
    written.size(390, 844)
    eight = "{ring: [0, 90], pages: [], codes: []}"
    drawn = f"""import('/page/draw.js').then(({{Side}}) => {{
      const root = document.getElementById('side').content.firstElementChild.cloneNode(true);
      document.getElementById('sides').append(root);
      const side = new Side(root, 'eight heads');
      side.add({{seen: 90, tokens: Array(90).fill('a'), completed: [false], bytes: {{}},
        streams: [Array(8).fill({eight})]}});
      side.show(90);
      const box = root.querySelector('.scroll').getBoundingClientRect();
      const last = [...root.querySelectorAll('td, th')].map(e => e.getBoundingClientRect().right);
      root.remove();
      return [last.length, Math.max(...last) - box.right];
    }})"""
    cells, beyond = written.run(drawn)
    assert cells == 2 * 9
    assert beyond <= 1


def test_codes_and_phi_are_told_apart(written):
    cache = """{seen: 4, completed: [true, false], tokens: [], streams: [
        [{ring: [3, 1], pages: [0, 1], codes: []}, {ring: [3, 1], pages: [], codes: [1, 2]}],
        [{ring: [3, 1], pages: [], codes: []}, {ring: [], pages: [], codes: [0, 4]}]]}"""
    holders = written.run(f"import('/page/cache.js').then(m => m.holders({cache}))")
    assert holders == {"exact": [1, 0, 0, 3], "codes": [1, 2, 2, 1], "phi": [1, 1, 1, 0], "streams": 4}


def test_a_refusal_is_shown(written):
    written.run("document.getElementById('policy-b').value = 'snapkw'")
    written.run("document.getElementById('go').click()")
    written.until("!document.querySelectorAll('.error')[1].hidden")
    assert "Did you mean 'snapkv'?" in side(written, 1, "answer.querySelector('.error').textContent")
    written.until("document.getElementById('stop').disabled", 60)
    assert side(written, 0, "answer.querySelector('.text').textContent") != ""
    # Nothing else is there of a text that did not come: no heading over nothing, no sign of work.
    shown = "[...answer.children, side].filter(e => e.checkVisibility()).map(e => e.className || e.tagName)"
    assert side(written, 1, shown) == ["H2", "error"]
    written.errors.clear()  # the browser notes every 400


def test_presets_have_a_line_each(written):
    written.size(1280, 1000)
    written.run("document.querySelectorAll('.presets')[1].click()")
    items = written.run("[...document.querySelectorAll('#menu li')].map(e => e.innerText.split('\\n'))")
    assert {item[0] for item in items} == set(catalogue.PRESETS)
    assert {item[0]: item[-1] for item in items} == catalogue.summaries()
    assert written.run("document.activeElement.id") == "find"
    written.type("snapkv vote")
    written.until("document.querySelectorAll('#menu li:not([hidden])').length < 10")
    found = "[...document.querySelectorAll('#menu li:not([hidden]) b')].map(e => e.textContent)"
    assert written.run(found) == ["snapkv"]
    written.run("document.querySelector('#menu li:not([hidden]) button').click()")
    assert written.run("document.getElementById('policy-b').value") == catalogue.PRESETS["snapkv"]
    assert written.run("document.getElementById('menu').open") is False


def test_a_link_holds_prompt_and_policies(written, server):
    odd = "One & two = 3? #5 + é\n100 % “so”"
    written.run(
        f"(document.getElementById('prompt').value = {odd!r}, document.getElementById('link').click())"
    )
    link = written.run("location.href")
    filled = """Object.fromEntries('prompt policy-a policy-b mode tokens temperature'.split(' ')
        .map(name => [name, document.getElementById(name).value]))"""
    before = written.run(filled)
    assert before["prompt"] == odd
    written.open(server.url + "/version")
    written.open(link)
    written.until("document.getElementById('server').textContent.includes('512 positions')")
    assert written.run(filled) == before
    assert "key" not in link
    assert not any("#" in url or "%C3%A9" in url for url in written.requested if url != link)


def test_it_says_what_it_waits_for_and_a_phone_shows_it(tab, server):
    free = threading.Event()
    tab.size(390, 844)
    tab.open(server.url + "/")
    tab.until("document.getElementById('server').textContent.includes('512 positions')")
    for _ in range(WORKERS):
        server.service.engine._scheduler.compiler._pool.submit(free.wait, 300)
    try:
        for name, value in {"policy-a": "window(11)", "policy-b": "full", "tokens": "9"}.items():
            tab.run(f"(document.getElementById({name!r}).value = {value!r})")
        tab.run("document.getElementById('go').click()")
        tab.until("document.querySelector('.stage')?.textContent.startsWith('Compiles programs')")
        assert side(tab, 0, "answer.querySelector('.status').checkVisibility()")
        passed = side(tab, 0, "answer.querySelector('.seconds').textContent")
        tab.until(f"document.querySelector('.seconds').textContent != {passed!r}")
    finally:
        free.set()
    tab.until("document.getElementById('stop').disabled", 120)
    assert side(tab, 0, "answer.querySelector('.status').checkVisibility()") is False
    for at in (0, 1):
        top, bottom = side(tab, at, "(box => [box.top, box.bottom])(answer.getBoundingClientRect())")
        assert 0 <= top < bottom <= 844, "an answer is not on the screen"


def test_stop_frees_the_row(written, server, monkeypatch):
    step = RunningBatch.step

    def slow(self, *steps):
        """A text that is not over before the key is down."""
        step(self, *steps)
        time.sleep(0.2)

    monkeypatch.setattr(RunningBatch, "step", slow)
    for name, value in {"prompt": PROMPT, "policy-b": "", "tokens": "400"}.items():
        written.run(f"document.getElementById({name!r}).value = {value!r}")
    written.run("document.getElementById('go').click()")
    assert until(lambda: server.service.engine.metrics().running == 1, 120), "the text was never begun"
    written.key("Escape", 27)
    assert server.idle()
    assert server.service.engine.metrics().requests["cancelled"] >= 1


def test_the_page_asks_for_a_key(tab, tiny_folder):
    with running(tiny_folder, keys=("sesame",)) as server:
        tab.open(server.url + "/")
        tab.until("!document.getElementById('key-field').hidden")
        assert "no key" in tab.run("document.getElementById('server').textContent")
        assert tab.run("document.activeElement.id") == "key"
        tab.type("sesame")
        tab.key("Tab", 9)
        tab.until("document.getElementById('server').textContent.includes('512 positions')")
