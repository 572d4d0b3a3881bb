"""The parts of the page that touch no page, run by Node."""

from __future__ import annotations

import base64
import importlib.resources
import json
import shutil
import subprocess
from typing import Any

import pytest

NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="no Node here: apt-get install nodejs")

PAGE = importlib.resources.files("kvjax.serve.http") / "page"


def found(module: str, expression: str) -> Any:
    """The value of an expression, in which ``it`` is a module of the page."""
    assert NODE is not None
    script = f"const it = await import({json.dumps(data_url(module))}); "
    script += f"console.log(JSON.stringify(await ({expression})));"
    words = [NODE, "--input-type=module", "-e", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def data_url(module: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode((PAGE / module).read_bytes()).decode()


def test_a_link_gives_the_form_back_and_nothing_else():
    form = {
        "prompt": "a&b=c #1 + é\n%",
        "a": "full",
        "b": "",
        "mode": "chat",
        "tokens": "24",
        "temperature": "0.7",
    }
    link = found("link.js", f"it.written({json.dumps(form | {'key': 'sesame'})})")
    assert "sesame" not in link
    assert found("link.js", f"it.read('#' + {json.dumps(link)})") == form
    assert found("link.js", "it.read('#tokens=3&key=x')") == {"tokens": "3"}
    assert found("link.js", "it.read('')") == {}


@pytest.mark.parametrize("width", [1, 7, 1000])
def test_events_come_out_of_pieces_and_comments_are_none(width):
    """A comment keeps a connection open while a policy compiles."""
    stream = (
        ': still at work\n\ndata: {"id": "é"}\n\n: still at work\n\ndata: {"id": "b"}\n\ndata: [DONE]\n\n'
    )
    expression = f"""(async () => {{
      const bytes = new TextEncoder().encode({json.dumps(stream)}), width = {width}, read = [];
      const body = new ReadableStream({{start(to) {{
        for (let at = 0; at < bytes.length; at += width) to.enqueue(bytes.slice(at, at + width));
        to.close();
      }}}});
      for await (const event of it.events({{body}})) read.push(event.id);
      return read;
    }})()"""
    assert found("ask.js", expression) == ["é", "b"]


def test_an_error_in_a_stream_is_raised():
    stream = json.dumps('data: {"error": {"message": "no room"}}\n\n')
    expression = f"""(async () => {{
      try {{ for await (const event of it.events(new Response({stream}))) return event; }}
      catch (error) {{ return [error.constructor.name, error.message]; }}
    }})()"""
    assert found("ask.js", expression) == ["Refused", "no room"]
