"""What the HTTP server is made of, piece by piece: laws and oracles that need no server."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

pytest.importorskip("fastapi", reason="pip install 'kvjax[serve]'")

from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.cli import InputError
from kvjax.engine import Event, QueueFull
from kvjax.serve.http import command
from kvjax.serve.http.arguments import parse
from kvjax.serve.http.command import check_access
from kvjax.serve.http.detokenizer import Detokenizer, StopStrings, TokenText
from kvjax.serve.http.errors import as_api_error
from kvjax.serve.http.metrics import runs
from kvjax.serve.http.middleware import Keys, is_local, read_keys, without_port

# --- stop strings --------------------------------------------------------------------------------

letters = st.text("abc", max_size=30)
words = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Letter by letter: the text before the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(letters, words, st.lists(st.integers(1, 5), min_size=30, max_size=30))
def test_stop_strings_cut_as_if_the_text_came_letter_by_letter(text, stops, sizes):
    reader, out, at = StopStrings(stops), "", 0
    for size in sizes:
        out += reader.feed(text[at : at + size])
        at += size
        assert cut(text, stops)[0].startswith(out), "text was given out that is not certain"
    out += reader.finish()
    assert (out, reader.hit) == cut(text, stops)


@given(letters, words)
def test_no_more_is_held_back_than_must_be(text, stops):
    reader, out = StopStrings(stops), ""
    for letter in text:
        out += reader.feed(letter)
        if reader.hit:
            return
    held = text[len(out) :]
    assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


# --- the detokenizer ------------------------------------------------------------------------------


def written(folder, ids: list[int], stops: list[str] = (), **more) -> list:
    text = kvjax.load(folder).text
    settings = {"after": (), "echo": "", "stops": stops, "end_tokens": text.eos, "logprobs": True} | more
    detokenizer, deltas = Detokenizer(text, **settings), []
    for at, token in enumerate(ids):
        finish = None if at < len(ids) - 1 else "stop" if token in text.eos else "length"
        deltas.append(detokenizer.step(Event(token, -1.0, ((token, -1.0),), finish)))
        if detokenizer.done:
            break
    return deltas


def test_a_character_of_several_tokens_comes_whole(tiny_folder):
    ids = kvjax.load(tiny_folder).text.encode("é…x", bos=False)
    pieces = written(tiny_folder, ids)
    assert [piece.text for piece in pieces] == ["", "é", "", "", "…", "x"]
    assert [piece.tokens[0].offset for piece in pieces] == [0, 0, 1, 1, 1, 2]


def test_tokens_of_an_echoed_prompt_have_their_place_in_it(tiny_folder):
    text = kvjax.load(tiny_folder).text
    settings = {"after": (), "stops": (), "end_tokens": text.eos, "logprobs": True}
    detokenizer = Detokenizer(text, echo="aéx", **settings)
    events = [Event(token, -1.0, prompt=True) for token in text.encode("aéx", bos=False)]
    events += [Event(token, -1.0) for token in text.encode("yz", bos=False)]
    assert [detokenizer.step(event).tokens[0].offset for event in events] == [0, 1, 1, 2, 3, 4]


def test_a_stop_string_ends_a_text_within_a_token_and_across_tokens(tiny_folder):
    ids = kvjax.load(tiny_folder).text.encode("one, two, three", bos=False)
    pieces = written(tiny_folder, ids, [", t", "zzz"])
    assert "".join(piece.text for piece in pieces) == "one"
    assert (pieces[-1].finish, pieces[-1].stop_reason) == ("stop", ", t")
    assert len(pieces) == 6, "it went on after the stop string"


def test_what_might_begin_a_stop_string_is_shown_at_the_end(tiny_folder):
    ids = kvjax.load(tiny_folder).text.encode("one, ", bos=False)
    pieces = written(tiny_folder, ids, [", t"])
    assert "".join(piece.text for piece in pieces) == "one, "
    assert (pieces[-1].finish, pieces[-1].stop_reason) == ("length", None)


def test_an_unfinished_character_shows_at_the_end(tiny_folder):
    ids = kvjax.load(tiny_folder).text.encode("a…", bos=False)[:-1]
    assert "".join(piece.text for piece in written(tiny_folder, ids)) == "a\ufffd"


def test_an_end_token_is_counted_and_not_shown(tiny_folder):
    text = kvjax.load(tiny_folder).text
    eos = text.eos[0]
    pieces = written(tiny_folder, [*text.encode("a", bos=False), eos])
    assert (pieces[-1].text, pieces[-1].finish, pieces[-1].stop_reason) == ("", "stop", None)
    assert pieces[-1].tokens[0].token == eos


# --- single tokens as text -----------------------------------------------------------------------


def test_every_byte_is_written_differently(tiny_folder):
    token_text = TokenText(kvjax.load(tiny_folder).text)
    assert sorted(token_text.bytes(token) for token in range(256)) == sorted(
        bytes([byte]) for byte in range(256)
    )
    assert len({token_text(token) for token in range(258)}) == 258
    assert token_text(256) == "<bos>"
    assert token_text(kvjax.load(tiny_folder).text.encode("é", bos=False)[0]) == "bytes:\\xc3"


def test_bytes_of_tokens_joined_are_the_text():
    model = kvjax.load()
    token_text = TokenText(model.text)

    @settings(deadline=None)
    @given(st.text(max_size=40))
    def law(text):
        ids = model.text.encode(text, bos=False)
        assert b"".join(token_text.bytes(i) for i in ids).decode() == text

    law()


@given(st.sets(st.integers(0, 60)))
def test_runs_give_positions_back(positions):
    flat = runs(np.asarray(sorted(positions)))
    pairs = list(zip(flat[::2], flat[1::2]))
    assert [p for first, count in pairs for p in range(first, first + count)] == sorted(positions)
    assert all(a + n < b for (a, n), (b, _) in zip(pairs, pairs[1:])), "neighbours are one run"


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "retry_after"), [(0.2, "1"), (2.4, "2"), (60.0, "60")])
def test_a_full_queue_is_a_429_that_says_when_to_ask_again(seconds, retry_after):
    answer = as_api_error(QueueFull(3, seconds)).response()
    assert (answer.status_code, answer.headers["retry-after"]) == (429, retry_after)


# --- who is let in -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "let_in"),
    [
        ("Bearer secret", True),
        ("bearer other", True),
        ("Bearer secre", False),
        ("Bearer secret2", False),
        ("Basic secret", False),
        ("secret", False),
        ("", False),
        ("Bearer", False),
    ],
)
def test_a_key_is_let_in_and_nothing_else(header, let_in):
    assert Keys(["secret", "other"]).admit(header) is let_in
    assert Keys().admit(header)


def test_no_part_of_a_key_is_compared_for_all_of_it():
    keys = Keys(["sesame", "open"])
    assert not any(keys.admit(f"Bearer {number}") for number in range(4096))


def test_keys_come_from_file_and_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of Ann\nalpha\n\n  beta \n")
    keys = read_keys(file, {"KVJAX_API_KEY": "gamma, delta"})
    assert len(keys) == 4
    assert all(keys.admit(f"Bearer {key}") for key in ("alpha", "beta", "gamma", "delta"))
    assert not keys.admit("Bearer # of Ann")
    file.write_text("# nobody\n")
    with pytest.raises(InputError, match="holds no key"):
        read_keys(file, {})
    with pytest.raises(InputError, match="cannot be read"):
        read_keys(tmp_path / "none", {})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "::1", "[::1]"])
def test_this_machine_needs_no_key(host):
    assert is_local(host)
    check_access(parse(["--host", host]), Keys())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "127.0.0.1.example.org", ""])
def test_other_addresses_need_a_key_or_a_word(host):
    assert not is_local(host)
    with pytest.raises(InputError, match="KVJAX_API_KEY"):
        check_access(parse(["--host", host]), Keys())
    check_access(parse(["--host", host]), Keys(["secret"]))
    check_access(parse(["--host", host, "--without-key"]), Keys())


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ([], 0),
        (["--client-structures", "3"], 3),
        (["--host", "0.0.0.0"], command.NEW_STRUCTURES),
        (["--host", "0.0.0.0", "--client-structures", "0"], 0),
    ],
)
def test_new_structures_are_bounded_where_others_can_ask(words, most):
    assert command.client_limit(parse(words), "structures", command.NEW_STRUCTURES) == most


@pytest.mark.parametrize(
    ("mesh", "processes", "message"),
    [
        ([], 2, "serve http runs in one process, and these are 2. Start it without"),
        (["--mesh", "data=2,tensor=2"], 1, "--mesh data=2,tensor=2: a server takes rows one by one"),
        (["--mesh", "rows=2"], 1, "'rows' is not an axis"),
    ],
)
def test_a_server_that_cannot_be_there_is_refused_before_anything_loads(
    monkeypatch, mesh, processes, message
):
    monkeypatch.setattr(command, "load_model", None)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: processes > 1)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    with pytest.raises(ValueError, match=re.escape(message)):
        command.run(parse([*mesh, "--port", "0", "--log", "off"]))


@pytest.mark.parametrize(
    ("host", "name"),
    [("localhost:8000", "localhost"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("127.0.0.1", "127.0.0.1")],
)
def test_a_host_is_told_from_its_port(host, name):
    assert without_port(host) == name
    assert is_local(name)


# --- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port 70000 is out of range"),
        (["--kv-memory", "8GB"], "--kv-memory 8GB is no size. Write it as 512KiB"),
        (["--max-body", "0MiB"], "--max-body 0MiB is no size"),
        (["--max-rows", "0"], "--max-rows 0 is out of range"),
        (["--drain", "inf"], "--drain inf is out of range"),
        (["--allow-policies", "full; snapkw"], "no 'snapkw'"),
        (["--prompt", "x"], "See python -m kvjax.serve http --help"),
    ],
)
def test_words_are_refused_before_a_model_is_read(arguments, message, capsys):
    from kvjax.serve.__main__ import main

    assert main(["http", "--model", "/nowhere", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: .*\n", err)
    assert message in err


def test_a_port_that_is_taken_is_told(tiny_folder, capsys):
    import socket

    from kvjax.serve.__main__ import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["http", "--model", str(tiny_folder), "--port", port]) == 2
    assert "cannot be listened on" in capsys.readouterr().err
