"""The site's sources are complete: every public name and method has a page, and links lead somewhere."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import kvjax
from docs.site import api, methods, pages, text
from kvjax import catalogue
from kvjax.eval.report.front import Point

POINT = Point(
    policy="snapkv(32) + uniform(154)",
    name="snapkv(32) + uniform(154)",
    family="",
    weights="",
    kept=0.2,
    share=0.2,
    score=15.0,
    low=9.0,
    high=21.0,
    tasks=5,
)


@pytest.fixture(scope="module")
def site() -> dict[str, str]:
    return pages.pages([POINT])


def test_every_part_and_preset_has_a_page(site):
    for name, kind in catalogue.parts().items():
        page = site[f"methods/{name}.md"]
        assert f"Place: {'wrapper' if 'Wrapper' in str(kind.__mro__) else kind.place}" in page
        assert f"]({name}.md)" in site["methods/README.md"]
    everything = "".join(site[f"methods/{name}.md"] for name in [*catalogue.parts(), "full"])
    assert [preset for preset in catalogue.PRESETS if f"| `{preset}` |" not in everything] == ["full"]


def test_a_method_s_page_says_what_its_part_declares(site):
    page = site["methods/snapkv.md"]
    assert "| `window` | `int` | `32` | a whole number, 1 or more" in page
    assert "| `adakv` | `snapkv + ada(0.25)` |" in page
    assert "<https://arxiv.org/abs/2404.14469>" in page
    assert page.count('class="own"') == 1
    assert "| `snapkv(32) + uniform(154)` | 20.0 % | 15.0 (9.0 … 21.0) |" in page
    assert "do not have this part" in site["methods/kivi.md"]
    refused = "knorm + critical + uniform(0.5, every_step)"
    assert f"* `{refused}`: " in site["methods/critical.md"]
    with pytest.raises(kvjax.PolicyError):
        kvjax.policy(refused)


def test_two_columns_of_a_docstring_are_a_list():
    made = text.listed(
        "Reads.\n\n  one, two   what is *here*\n  three      the rest\n\nArgs:\n  x: a  b\n  y: c"
    )
    assert made.splitlines()[2:4] == ["* `one, two`: what is *here*", "* `three`: the rest"]
    assert made.endswith("\n\nArgs:\n  x: a  b\n  y: c")
    table = "A table.\n\n| a   | b   |\n| c   | d   |"
    assert text.listed(table) == table
    assert "* `read_chunk`: many tokens" in text.listed(kvjax.decode.__doc__)


def test_every_public_name_has_its_place_in_the_reference(site):
    found = api.modules()
    assert set(kvjax.__all__) == set(found["kvjax"])
    for module in ("kvjax.algebra", "kvjax.decode", "kvjax.saving", "kvjax.weights"):
        assert set(importlib.import_module(module).__all__) == set(found[module])
    assert "SnapKV" in found["kvjax.policies.snapkv"]
    assert not [module for module in found if "._" in module]
    for module, names in found.items():
        page = site[f"api/{'.'.join(module.split('.')[:2])}.md"]
        block = page.partition(f"::: {module}\n")[2].partition(":::")[0]
        assert [name for name in names if f"        - {name}\n" not in block + "\n"] == []


def test_every_page_is_in_the_menu_once(site):
    menus = [entry for part in pages.nav(site) for entries in part.values() for entry in entries]
    listed = [page for entry in menus for page in entry.values()]
    assert sorted(listed) == sorted(site)


def test_links_lead_to_pages_or_files_and_outward_ones_are_well_formed(site):
    assert pages.broken(site) == []
    assert text.malformed(target for page in site.values() for target in text.links(page)) == []
    bad = ["https://arxiv.org/abs/1;", "http://example.org", "https://nowhere", "ftp://a.b/c"]
    assert text.malformed([*bad, "https://arxiv.org/abs/1", "http://127.0.0.1:8000", "docs/a.md"]) == bad
    assert pages.broken({"a/b.md": "[x](c.md) [y](https://a.b) [z](#here)"}) == ["a/b.md: c.md"]


def test_a_section_ends_at_the_next_heading_and_its_links_move():
    policies = text.section("README.md", "Policies", "guide/concepts.md")
    assert policies.startswith("## Policies\n")
    assert "(../kvjax/DESIGN.md)" in policies
    assert "\n## A method in one file" not in policies
    with pytest.raises(ValueError, match="has 0 headings"):
        text.section("README.md", "Policy", "x.md")


def test_the_sources_are_made_without_the_docs_extra():
    program = "import sys; sys.modules['mkdocs'] = sys.modules['griffe'] = None; import docs.site.pages"
    subprocess.run([sys.executable, "-c", program], cwd=text.ROOT, check=True)


def test_methods_pages_do_not_depend_on_the_measurements():
    assert set(methods.pages([])) == set(methods.pages([POINT]))
