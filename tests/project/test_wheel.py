"""What `pip install regard` brings: its description, the files of the wheel, and torch and numpy alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from email import message_from_bytes
from importlib import metadata
from importlib.util import find_spec

import pytest
from packaging.requirements import Requirement

from build_hooks import ROOT, hatch_build
from package_version import package_version

REPOSITORY = "https://example.org/regard"
#: Before the translators shared their tokenizers, the wheel of Linux had 11.46 MB. With the lectures it has 11.19 MB,
#: and 11.31 MB since each function says its arguments and shapes.
LARGEST = 11_400_000

PAGE = """# Title <a id="below"></a>
[![a badge](docs/badge.svg)](docs/guide.md "the guide") and [plain](https://example.org), [below](#below).
![a picture
of two lines](docs/images/a.png)
[`code`](src/regard/), [a list](docs/b.md#c), [mail](mailto:a@example.org).
`[code](of.md)` and ``a ` [tick](of.md)``

```python
table[0](relative)
```
"""


def targets(text):
    """The targets of the links and pictures of a page, as a parser of Markdown and its HTML finds them."""
    markdown_it = pytest.importorskip("markdown_it", reason="markdown-it-py comes with rich, of regard[cli]")
    tokens = markdown_it.MarkdownIt("commonmark").enable("table").parse(text)
    every = [inner for token in tokens for inner in (token, *(token.children or ()))]
    found = [token.attrs[name] for token in every for name in ("href", "src") if name in token.attrs]
    html = [token.content for token in every if token.type.startswith("html")]
    return found + [target for content in html for target in re.findall(r'(?:href|src)="([^"]*)"', content)]


def dead(text):
    """Targets that lead nowhere from another place than the repository."""
    return [
        target
        for target in targets(text)
        if f'id="{target[1:]}"' not in text and not re.match(r"https?://|mailto:", target)
    ]


def test_relative_links_become_addresses_or_text():
    described = hatch_build().described
    assert set(dead(PAGE)) == {"docs/badge.svg", "docs/guide.md", "docs/images/a.png", "src/regard/", "docs/b.md#c"}
    with_address, without = described(PAGE, REPOSITORY), described(PAGE, "")
    assert not dead(with_address) and not dead(without)
    paths = ["blob/HEAD/docs/guide.md", "raw/HEAD/docs/badge.svg", "raw/HEAD/docs/images/a.png"]
    paths += ["blob/HEAD/src/regard/", "blob/HEAD/docs/b.md#c"]
    kept = ["https://example.org", "#below", "mailto:a@example.org"]
    assert Counter(targets(with_address)) == Counter([*kept, *(f"{REPOSITORY}/{path}" for path in paths)])
    assert Counter(targets(without)) == Counter(kept)
    assert "`code`, a list, [mail]" in without and "picture" not in without and "badge" not in without
    for page in (with_address, without):  # code stays
        assert page.partition("`[code](of.md)`")[1:] == PAGE.partition("`[code](of.md)`")[1:]


@pytest.mark.parametrize("address", ["", REPOSITORY])
def test_the_description_of_the_package_has_no_dead_link(address):
    hook, data = hatch_build().DescriptionHook(), {}
    hook.root, hook.config = str(ROOT), {"addresses": {"Repository": address, "Documentation": ""}}
    hook.update(data)
    assert data["readme"]["content-type"] == "text/markdown"
    assert data["urls"] == ({"Repository": address} if address else {})
    text = data["readme"]["text"]
    assert len(targets((ROOT / "README.md").read_text())) > 10 and not dead(text)
    assert any(target.startswith(f"{REPOSITORY}/raw/HEAD/docs/") for target in targets(text)) == bool(address)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this machine."""
    for needed in ("pip", "hatchling", "ziglang"):
        if find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed; `make kernels` installs it")
    folder = tmp_path_factory.mktemp("wheel")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REGARD_")}
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", folder, ROOT]
    subprocess.run(command, env=environment, check=True, timeout=900)
    (path,) = folder.iterdir()
    return path


@pytest.mark.example
@pytest.mark.xdist_group("wheel")
def test_the_wheel_holds_each_file_once_and_no_dead_link(wheel):
    with zipfile.ZipFile(wheel) as packed:
        files = packed.infolist()
        about = message_from_bytes(packed.read(f"regard-{package_version()}.dist-info/METADATA"))
    large = Counter((file.CRC, file.file_size) for file in files if file.file_size > 1000)
    assert max(large.values()) == 1 and wheel.stat().st_size < LARGEST
    tokenizers = [file.filename for file in files if file.filename.endswith(".tokenizer")]
    assert sorted(tokenizers) == [f"regard/lab/pretrained/{side}.tokenizer" for side in ("source", "target")]
    text = about.get_payload(decode=True).decode()
    assert about["Description-Content-Type"] == "text/markdown" and "# Regard" in text and not dead(text)
    addresses = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    expected = [f"{name}, {address}" for name, address in addresses["addresses"].items() if address]
    assert about.get_all("Project-URL", []) == expected


def needs(*names):
    """These distributions and all that they need here."""
    found, left = {}, list(names)
    while left:
        name = left.pop()
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name in names:
                raise
            continue  # of another build of torch
        required = map(Requirement, found[name].requires or ())
        here = [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
        left += set(here) - found.keys()
    return found.values()


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """The folder of the commands of an environment with the wheel, torch, numpy and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=300)
    (site,) = folder.glob("lib/python*/site-packages")
    for distribution in needs("torch", "numpy"):
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / name).is_symlink():
                (site / name).symlink_to(distribution.locate_file(name))
    command = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-index"]
    subprocess.run([*command, "--disable-pip-version-check", wheel], check=True, timeout=300)  # its needs are there
    return folder / "bin"


ATTEND = """
import importlib.util, regard as rg, torch
assert importlib.util.find_spec("rich") is importlib.util.find_spec("transformers") is None
q, k, v = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)
seen = rg.Attention(mask=rg.causal())(q, k, v)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(seen.output, expected)
torch.testing.assert_close(seen.weights.dense() @ v, expected)
print(rg.__file__)
"""


@pytest.mark.example
@pytest.mark.xdist_group("wheel")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["regard", "--version"], f"regard {package_version()}\n"),
        (["regard", "--help"], "regard[lab]"),
        (["python", "-c", ATTEND], "site-packages"),
    ],
    ids=["version", "help", "attend"],
)
def test_torch_and_numpy_are_enough(bare, command, said, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("REGARD_", "PYTHON"))}
    run = [bare / command[0], *command[1:]]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
