"""The server: what is not asked well is refused with 4xx, and it stays up."""

from __future__ import annotations

import http.client
import json
from contextlib import closing

import numpy as np
import pytest

from pages import HOSTILE, reading, served
from regard.errors import RegardError
from regard.viewer import Sheet

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def ask(address, path, method="GET", host=None):
    place = address.split("/")[2]
    with closing(http.client.HTTPConnection(place, timeout=300)) as connection:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", place if host is None else host)
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
    "/ask/tile/0/0/0/0/0/4294967296/mean",
    "/ask/tile/0/0-1/0/0/0/0/mean",
    "/ask/" + "9" * 70_000,
]


@pytest.mark.parametrize("path", BAD)
def test_bad_paths_are_refused_and_the_server_stays_up(address, path):
    assert 400 <= ask(address, path)[0] < 500
    assert ask(address, "/ask/texts")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "PATCH", "NONSENSE"])
def test_only_get_is_answered(address, method):
    assert ask(address, "/", method)[0] == 405
    assert ask(address, "/ask/texts")[0] == 200


@pytest.mark.parametrize(
    "host",
    ["example.org", "example.org:80", "127.0.0.1.example.org", "", "evil@127.0.0.1", "127.0.0.1/x", "[::2]:80", "[::1"],
)
def test_other_host_names_are_refused(address, host):
    assert ask(address, "/", host=host)[0] == 400


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "[::1]:80", "127.0.0.1"])
def test_names_of_this_machine_are_not(address, host):
    assert ask(address, "/", host=host)[0] == 200


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
