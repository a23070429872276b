"""Many clients, slow clients and strange addresses: the server answers everyone, and its memory stays bounded."""

from __future__ import annotations

import http.client
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial

import numpy as np
import pytest
import torch
from benchmarks.measure import added_memory
from hypothesis import given, settings
from hypothesis import strategies as st

import regard as rg
from pages import reading, served, translation
from regard.maps.reductions import averaged, cells
from regard.viewer import Sheet
from regard.viewer.answers import TILE, Answers, NoAnswer, cells_of_tile, levels
from regard.viewer.server import AT_ONCE
from regard.viewer.sheet import READY

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

ASKING = 1.0  # seconds for a request, in place of ten


@pytest.fixture(scope="module")
def sheets():
    return [Sheet.of(reading(length=150, mask=rg.causal())), Sheet.of(translation())]


@pytest.fixture(scope="module")
def place(sheets):
    with served(sheets, asking=ASKING) as address:
        yield address.split("/")[2]


def ask(place, path):
    with closing(http.client.HTTPConnection(place, timeout=60)) as connection:
        connection.request("GET", path)
        with connection.getresponse() as answer:
            return answer.status, answer.read()


def sent(place, content):
    """A connection that has sent this."""
    host, port = place.split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(content)
    return connection


# Many


def test_two_hundred_requests_at_once_are_all_answered(place, sheets):
    maps = sheets[0].maps
    paths = [f"rows/0/{n % 2}/{n % 150}" for n in range(100)] + [f"tile/0/0/{n % 3}/0/0/0/mean" for n in range(50)]
    paths += ["text/0", "texts", "tile/0/0/0/99/0/0/mean", "nothing", "columns/0/0/3"] * 10
    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda path: ask(place, f"/ask/{path}"), paths))
    for path, (status, content) in zip(paths, answers, strict=True):
        assert status == (404 if "99" in path.split("/")[4:5] or path == "nothing" else 200), path
        if path.startswith("rows"):
            layer, query = map(int, path.split("/")[2:])
            expected = maps[layer].tile(0, None, query, None)[0, :, 0].numpy()
            np.testing.assert_allclose(np.frombuffer(content, "<f4").reshape(3, 150), expected, rtol=1e-5, atol=1e-7)


# Slow

HALVES = [b"", b"GET /as", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-", b"\x16\x03\x01\x02\x00"]


def test_clients_with_half_a_request_block_nobody_and_are_disconnected(place):
    with ExitStack() as stack:
        waiting = [stack.enter_context(closing(sent(place, half))) for _ in range(20) for half in HALVES]
        start = time.perf_counter()
        assert ask(place, "/ask/texts")[0] == 200
        assert time.perf_counter() - start < ASKING, "before the others are disconnected"
        for connection in waiting:
            content = disconnected(connection)
            assert content == b"" or content.startswith(b"HTTP/1.1 400"), content


def disconnected(connection):
    """What the server said before it closed the connection; it does close it."""
    content = b""
    try:
        while part := connection.recv(4096):
            content += part
    except ConnectionResetError:
        pass
    return content


def test_one_byte_after_another_gives_no_more_time(place):
    with closing(sent(place, b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: ")) as connection:
        start = time.perf_counter()
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while time.perf_counter() - start < 20 * ASKING:
                connection.sendall(b"a")
                time.sleep(ASKING / 10)
        assert time.perf_counter() - start < 10 * ASKING


def test_a_second_request_on_a_connection_has_its_own_time(place):
    with closing(http.client.HTTPConnection(place, timeout=60)) as connection:
        for _ in range(3):
            connection.request("GET", "/ask/texts")
            assert connection.getresponse().read()
            time.sleep(0.4 * ASKING)


def test_a_client_that_hangs_up_leaves_the_others_alone(place):
    for _ in range(20):
        sent(place, b"GET /ask/rows/0/0/0 HTTP/1.1\r\nHost: localhost\r\n\r\n").close()
    assert ask(place, "/ask/texts")[0] == 200


def test_a_client_that_reads_nothing_blocks_nobody(place):
    request = b"GET /ask/text/0 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(2 * AT_ONCE + 2):
            stack.enter_context(closing(sent(place, 5 * request)))
        start = time.perf_counter()
        assert ask(place, "/ask/texts")[0] == 200
        assert time.perf_counter() - start < 10


# Strange

NUMBER = st.one_of(
    st.integers(0, 160),
    st.sampled_from(["-1", "", "00", "1e3", "٣", "0x1", "9" * 40, "nan", "4294967296", "..", "%2e%2e", "+1", "1 "]),
).map(str)
NAME = st.sampled_from(["tile", "rows", "columns", "pair", "text", "texts", "manifest.json", "", "TILE", "ask"])
POOL = st.sampled_from(["mean", "max", "median", ""])
TILES = st.tuples(*(st.integers(-1, most).map(str) for most in (2, 2, 3, 9, 2, 2)), POOL).map(
    lambda parts: "/".join(("tile", *parts))
)
PATHS = st.one_of(
    TILES,
    st.tuples(NAME, st.lists(NUMBER, max_size=7), POOL).map(lambda drawn: "/".join((drawn[0], *drawn[1], drawn[2]))),
    st.text(max_size=60),
)


@pytest.fixture(scope="module")
def answers(sheets):
    return Answers(sheets)


@settings(max_examples=200, deadline=None)
@given(path=PATHS)
def test_any_path_has_an_answer_or_words(answers, path):
    try:
        assert isinstance(answers.answer(path), bytes)
    except NoAnswer as reason:
        assert len(str(reason)) > 10


@settings(max_examples=120, deadline=None)
@given(
    text=st.integers(0, 1), layer=st.integers(0, 1), head=st.integers(0, 2), level=st.integers(0, 9),
    row=st.integers(0, 1), col=st.integers(0, 1), pool=st.sampled_from(["mean", "max"]),
)  # fmt: skip
def test_a_drawn_tile_has_its_shape_and_its_weights_or_there_is_none(
    answers, sheets, text, layer, head, level, row, col, pool
):
    path, maps = f"tile/{text}/{layer}/{head}/{level}/{row}/{col}/{pool}", sheets[text].maps
    size = 1 << level
    if layer >= len(maps) or head >= maps[layer].shape[1]:
        exists = False
    else:
        _, _, I, J = maps[layer].shape
        exists = level < levels(I, J) and row * TILE * size < I and col * TILE * size < J
    if not exists:
        with pytest.raises(NoAnswer, match="there are"):
            answers.answer(path)
        return
    part = maps[layer].dense()[0, head, row * TILE * size :, col * TILE * size :][: TILE * size, : TILE * size]
    sums, greatest = cells(part, size)
    expected = greatest if pool == "max" else averaged(sums, size, I, row * TILE)
    found = np.frombuffer(answers.answer(path), "<f2" if level else "<f4").reshape(expected.shape)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(path=st.one_of(PATHS, st.binary(max_size=80).map(lambda content: content.decode("latin-1"))))
def test_any_address_is_answered_with_200_or_4xx(place, path):
    """Over a real connection, with whatever bytes: never 500, and the server stays up."""
    target = "".join(c if c.isascii() and c.isprintable() and c != " " else f"%{ord(c) % 256:02x}" for c in path)
    status, content = ask(place, f"/ask/{target}")
    assert status == 200 or 400 <= status < 500, (status, content)


@settings(max_examples=60, deadline=None)
@given(content=st.binary(min_size=1, max_size=200))
def test_any_bytes_leave_the_server_up(place, content):
    with closing(sent(place, content + b"\r\n\r\n")) as connection:
        connection.shutdown(socket.SHUT_WR)
        said = disconnected(connection)
    assert said == b"" or said.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200")), said


# Memory

LENGTH, HEADS = 32_768, 1


def ask_for_much(sheet):
    """The largest answers, and the paths that once took gigabytes, from as many threads as the server has."""
    answers = Answers([sheet])
    paths = [f"tile/0/0/0/{n % 16}/0/0/{'max' if n % 2 else 'mean'}" for n in range(32)]
    paths += [f"{line}/0/0/{997 * n % LENGTH}" for n in range(6) for line in ("rows", "columns")]
    paths += [f"tile/0/0/0/{level}/0/0/mean" for level in range(16, 30)] + ["text/0", "pair/0/0/0/5/7"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        sizes = list(pool.map(lambda path: _size(answers, path), paths))
    assert max(sizes) >= 4 * HEADS * LENGTH and sizes.count(0) == 30 - levels(LENGTH, LENGTH)
    return sizes


def _size(answers, path):
    try:
        return len(answers.answer(path))
    except NoAnswer:
        return 0


def prepare_long_text():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = rg.Attention(mask=rg.causal())(*torch.randn(3, 1, HEADS, LENGTH, 4)).weights
    weights.row_statistic  # noqa: B018 - computed at the first look
    about = {"title": "Long", "tokens": [f"t{n}" for n in range(LENGTH)]}
    return partial(ask_for_much, Sheet(about, [weights], [tuple(torch.rand(HEADS, READY, READY).half() for _ in "ab")]))


@pytest.mark.slow
def test_memory_is_bounded_whatever_is_asked():
    assert added_memory(prepare_long_text) < 500


def test_levels_above_the_cells_are_not_computed_from_all_weights(sheets):
    """A text without its cells: the whole map at once would take 4 bytes a weight."""
    weights = rg.Attention()(*torch.randn(3, 1, 1, 1_100, 2)).weights
    answers = Answers([Sheet({"title": ""}, [weights])])
    assert len(answers.answer("tile/0/0/0/4/0/0/mean")) == 2 * 69 * 69
    with pytest.raises(NoAnswer, match="no cells"):
        answers.answer("tile/0/0/0/5/0/0/mean")


def test_cells_from_strips_are_those_of_the_whole(sheets, monkeypatch):
    monkeypatch.setattr("regard.viewer.answers.STRIP", 3_000)
    weights = sheets[0].maps[1]
    for size, place in ((1, (0, 0)), (1, (1, 0)), (2, (0, 0)), (32, (0, 0))):
        side = TILE * size
        part = weights.dense()[0, 2][place[0] * side :, place[1] * side :][:side, :side]
        for found, expected in zip(cells_of_tile(weights, 2, place, size), cells(part, size), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
