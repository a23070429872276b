"""The server: what is not asked well is refused with 4xx, and it stays up."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import closing

import numpy as np
import pytest

from pages import HOSTILE, reading, served
from regard.base.errors import RegardError
from regard.viewer import Sheet

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def ask(address, path, method="GET", host=None, **headers):
    place = address.split("/")[2]
    with closing(http.client.HTTPConnection(place, timeout=300)) as connection:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", place if host is None else host)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        with connection.getresponse() as answer:
            return answer.status, answer.read(), dict(answer.getheaders())


@pytest.fixture(scope="module")
def text():
    return reading(HOSTILE + ["word"] * 12)


@pytest.fixture(scope="module")
def address(text):
    with served([Sheet.of(text)]) as found:
        yield found


def test_the_page_and_its_answers(address, text):
    status, page, headers = ask(address, "/")
    assert status == 200 and b'{"live":true}' in page and b"connect-src 'self'" in page
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert json.loads(ask(address, "/ask/text/0")[1])["tokens"][: len(HOSTILE)] == HOSTILE
    tile = np.frombuffer(ask(address, "/ask/tile/0/1/2/0/0/0/mean")[1], "<f4").reshape(20, 20)
    np.testing.assert_allclose(tile, text.maps["layer.1"].dense()[0, 2].numpy(), rtol=1e-5)


BAD = [
    "/ask/tile/0/0/9/0/0/0/mean",
    "/ask/tile/0/9/0/0/0/0/mean",
    "/ask/tile/9/0/0/0/0/0/mean",
    "/ask/tile/0/0/0/0/9/0/mean",
    "/ask/tile/0/0/0/-1/0/0/mean",
    "/ask/tile/0/0/0/0/0/0/median",
    "/ask/tile/0/0/0/0/0",
    "/ask/tile/0/0/0/0/0/0/mean/0",
    "/ask/rows/0/0/20",
    "/ask/rows/0/0/99999999999999999999",
    "/ask/columns/0/0/1e3",
    "/ask/pair/0/0/0/0/nan",
    "/ask/",
    "/ask/../../etc/passwd",
    "/ask/text/..%2f..%2fetc%2fpasswd",
    "/ask/%2e%2e/%2e%2e/etc/passwd",
    "/..%5c..",
    "/ask/text/0%00",
    "/manifest.json",
    "/static/page.js",
    "/ask/text/%D9%A3",
    "/ask//text/0",
    "/index.html",
    "/ask/tile/0/0/0/24/0/0/mean",
    "/ask/tile/0/0/0/6/0/0/mean",
    "/ask/tile/0/0/0/0/0/4294967296/mean",
    "/ask/tile/0/0-1/0/0/0/0/mean",
    "/ask/" + "9" * 70_000,
]


@pytest.mark.parametrize("path", BAD)
def test_bad_paths_are_refused_and_the_server_stays_up(address, path):
    assert 400 <= ask(address, path)[0] < 500
    assert ask(address, "/ask/texts")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "NONSENSE"])
def test_only_get_and_head_are_answered(address, method):
    assert ask(address, "/", method)[0] == 405
    assert ask(address, "/ask/texts")[0] == 200


@pytest.mark.parametrize("path", ["/", "/ask/texts", "/ask/rows/0/0/3", "/ask/rows/0/0/99", "/no-such-page"])
def test_head_is_answered_like_get_without_a_body(address, path):
    status, content, headers = ask(address, path)
    assert content
    assert ask(address, path, "HEAD") == (status, b"", headers | {"date": ask(address, path, "HEAD")[2]["date"]})


@pytest.mark.parametrize(
    "asked",
    [("/", "GET"), ("/ask/texts", "GET"), ("/ask/rows/0/0/99", "GET"), ("/no-such-page", "GET"), ("/", "POST")],
)
@pytest.mark.parametrize("host", [None, "example.org"])
def test_no_answer_can_be_framed_or_kept(address, asked, host):
    """In a frame of another site, a click on that site could be a click on the page."""
    headers = ask(address, *asked, host=host)[2]
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    assert headers["x-frame-options"] == "DENY" and headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "host",
    ["example.org", "example.org:80", "127.0.0.1.example.org", "", "evil@127.0.0.1", "127.0.0.1/x", "[::2]:80", "[::1"],
)
def test_other_host_names_are_refused(address, host):
    assert ask(address, "/", host=host)[0] == 400


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "[::1]:80", "127.0.0.1"])
def test_names_of_this_machine_are_not(address, host):
    assert ask(address, "/", host=host)[0] == 200


def test_the_last_zoom_level_is_one_cell(address, text):
    """A level above it would be padded to 4^level weights: 1 GiB at level 14."""
    (cell,) = np.frombuffer(ask(address, "/ask/tile/0/0/0/5/0/0/max")[1], "<f2")
    assert cell == text.maps["layer.0"].dense()[0, 0].max().half()


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"},
        {"Origin": "http://example.org"},
        {"Origin": "null"},
    ],
)
def test_pages_of_other_sites_get_no_answer(address, headers):
    assert ask(address, "/ask/texts", **headers)[0] == 403


def test_the_page_itself_and_links_to_it_are_answered(address):
    assert ask(address, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200
    assert ask(address, "/", Sec_Fetch_Site="none", Sec_Fetch_Mode="navigate")[0] == 200
    own = {"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors", "Origin": address.rstrip("/")}
    assert ask(address, "/ask/texts", **own)[0] == 200


def test_every_address_of_this_machine_has_any_name_but_asks_for_the_token(text):
    with served([Sheet.of(text)], hosts=None, token="a-long-enough-token") as address:
        assert ask(address, "/ask/texts?token=a-long-enough-token", host="a.name.of.mine")[0] == 200
        assert ask(address, "/ask/texts", host="a.name.of.mine")[0] == 403
        assert ask(address, "/", host="evil@127.0.0.1")[0] == 400


@pytest.mark.parametrize(
    ("host", "start"), [("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:"), ("0.0.0.0", "http://machine:")]
)
def test_the_printed_address_can_be_opened(text, host, start, monkeypatch):
    import uvicorn

    from regard.viewer.server import serve

    token, addresses = "a-long-enough-token", []
    monkeypatch.setattr("socket.gethostname", lambda: "machine")
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serve([Sheet.of(text)], listening, host, token, addresses.append)
    assert addresses[0].startswith(start) and addresses[0].endswith(f"/?token={token}")


def test_a_token_is_asked_of_everyone(text):
    with served([Sheet.of(text)], token="a-long-enough-token") as address:
        assert [ask(address, path)[0] for path in ("/", "/?token=", "/?token=a-long-enough-tokeN", "/ask/texts")] == [
            403
        ] * 4
        assert ask(address, "/?token=a-long-enough-token")[0] == 200
        assert ask(address, "/ask/texts?token=a-long-enough-token")[0] == 200


def test_other_addresses_need_a_token():
    from regard.viewer.server import listen

    with pytest.raises(RegardError, match=r"--host 0\.0\.0\.0 makes the page visible to other machines.*--token"):
        listen("0.0.0.0", 0, "short")
    with pytest.raises(RegardError, match="cannot be used"):
        listen("localhost.invalid", 0, "a-long-enough-token")
