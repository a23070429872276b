"""Older versions of torch and transformers, and the one file that knows about versions."""

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn

import extras
import regard as rg
from regard.base import versions
from regard.base.errors import RegardError
from regard.engine import flash
from regard.hf import text_reader
from regard.hf.capture import transformers_interface

SOURCE, ROOT = Path(rg.__file__).parent, Path(__file__).parents[2]
VERSION_TEST = re.compile(
    r"__version__\S*\s*[<>=]=?\s|\bversions?\.numbers\(|\bparse\(.*version|AuxRequest|\.get_interface"
    r"|transformers import .*__version__|hasattr\((torch|transformers|AttentionInterface)\b(?!\.(ops|compiler))"
)


def test_versions_are_tested_in_one_file():
    found = {p.name for p in SOURCE.rglob("*.py") for line in p.read_text().splitlines() if VERSION_TEST.search(line)}
    assert found - {"version.py"} == {"versions.py"}  # that of Regard itself is in version.py


def softmax_output(query, key, value):
    """The definition, causal, with shared key heads."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


def test_key_heads_are_repeated_for_the_kernel_of_torch_2_8(monkeypatch):
    monkeypatch.setattr(flash, "shares_key_heads", lambda: False)
    num_heads, operators = [], torch.ops.aten

    class Operators:
        def __getattr__(self, name):
            function = getattr(operators, name)

            def run(*args, **options):
                num_heads.append({x.shape[1] for x in args if isinstance(x, torch.Tensor) and x.ndim == 4})
                return function(*args, **options)

            return run if "flash_attention_for_cpu" in name else function

    monkeypatch.setattr(torch.ops, "aten", Operators())
    monkeypatch.setattr(flash, "_cpu_kernel", lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
    torch.manual_seed(0)
    shapes = (2, 6, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    expected = softmax_output(*inputs)
    grad = torch.randn_like(expected)
    tensors = [x.detach() for x in inputs]
    output, logsumexp = flash.flash(*tensors, scale=0.5, causal=True)
    assert torch.allclose(output, expected, atol=1e-12)
    ours = flash.flash_gradients(grad, *tensors, output, logsumexp, scale=0.5, causal=True)
    theirs = torch.autograd.grad(expected, inputs, grad)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))
    assert num_heads == [{6}, {6}]


@pytest.mark.parametrize("engine", ["fused", "blocked"])
def test_shared_key_heads_equal_the_definition(engine):
    torch.manual_seed(1)
    inputs = [torch.randn(1, heads, 7, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    output = rg.Attention(mask=rg.causal())(*inputs, engine=engine).output
    expected = softmax_output(*inputs)
    assert torch.allclose(output, expected, atol=1e-12)
    grad = torch.randn_like(output)
    ours, theirs = torch.autograd.grad(output, inputs, grad), torch.autograd.grad(expected, inputs, grad)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


def test_a_backend_that_is_looked_up_by_getitem_is_observed(monkeypatch):
    """transformers before 5.1: `AttentionInterface()[name]`."""

    class Interface:
        def __getitem__(self, key):
            return lambda module, query, key, value, mask, **options: (query, None)

    monkeypatch.setattr(transformers_interface, "backend_lookup", lambda: (Interface, "__getitem__"))
    calls, observed = transformers_interface.BackendCalls(), []

    class Observer:
        def backend_called(self, call, output):
            observed.append((call.backend, output[0]))

    original, query = Interface.__getitem__, torch.ones(1, 1, 2, 2)
    with calls.observed_by(Observer()):
        Interface()["sdpa"](nn.Identity(), query, query, query, None)
    assert observed[0][0] == "sdpa" and observed[0][1] is query and Interface.__getitem__ is original


def broken_transformers(version):
    """An old transformers, or one whose parts cannot be imported."""
    module = ModuleType("transformers")
    module.__version__ = version
    return module


@pytest.mark.parametrize("version", ["4.30.2", "4.57.1", "5.23.0", "unknown"])
def test_models_of_torch_need_no_transformers(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "transformers", broken_transformers(version))
    model, x = nn.MultiheadAttention(4, 2, batch_first=True).eval(), torch.randn(1, 3, 4)
    with rg.watch(model) as seen:
        model(x, x, x)
    assert len(seen) == 1
    with rg.edit(model, rg.KnockOut(rg.Where(heads=0, keys=1))), rg.watch(model) as edited:
        model(x, x, x, need_weights=False)
    assert (edited[0].dense()[0, 0, :, 1] == 0).all()


def test_a_model_of_a_transformers_that_is_too_old_is_refused(monkeypatch):
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9)
    model = BertModel(config).eval()
    monkeypatch.setitem(sys.modules, "transformers", broken_transformers("4.40.0"))
    for operation in (lambda: rg.watch(model).__enter__(), lambda: rg.edit(model, rg.KnockOut(rg.Where(heads=0)))):
        with pytest.raises(RegardError, match=r"BertModel is a model of transformers 4\.40\.0.*>=4\.57"):
            operation()


def test_register_says_which_version_it_needs(monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "__version__", "5.14.1")
    with pytest.raises(RegardError, match=r"needs transformers 5\.15 or newer, and 5\.14\.1"):
        rg.register()


def test_encoder_decoders_that_run_their_own_softmax_are_seen_truly():
    """T5 calls the interface since 5.15 only. Before, its weights are still those that it returns."""
    pytest.importorskip("transformers")
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(d_model=16, d_kv=8, num_heads=2, num_layers=2, d_ff=16, vocab_size=20, decoder_start_token_id=0)
    model = T5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :4]}
    with rg.watch(model) as seen:
        model(**inputs)
    returned = model(**inputs, output_attentions=True)
    for layer, weights in enumerate(returned.encoder_attentions):
        assert torch.allclose(seen[f"encoder.block.{layer}.layer.0.SelfAttention"].dense(), weights, atol=1e-6)
    for layer, weights in enumerate(returned.cross_attentions):
        assert torch.allclose(seen[f"decoder.block.{layer}.layer.1.EncDecAttention"].dense(), weights, atol=1e-6)


def test_eager_attention_that_is_not_observed_is_refused_in_words(monkeypatch):
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(_attn_implementation="eager")
    monkeypatch.setattr(versions, "backend_lookup", lambda: (object, "__getitem__"))
    assert "needs transformers 5.1 or newer" in versions.hidden_eager(model)
    model.config._attn_implementation = "sdpa"
    assert versions.hidden_eager(model) == ""


def test_heads_that_must_fill_the_width_of_the_model_are_not_pruned():
    """CLIP before transformers 5: the pruned model would fail at its first call."""
    pytest.importorskip("transformers")
    from transformers import CLIPVisionConfig, CLIPVisionModel
    from transformers.models.clip.modeling_clip import CLIPAttention

    class Old(CLIPAttention):
        def forward(self, hidden_states, **options):
            batch_size, seq_length, embed_dim = hidden_states.shape
            return hidden_states.reshape(batch_size, seq_length, embed_dim), None

    Old.__name__, Old.__module__ = CLIPAttention.__name__, CLIPAttention.__module__
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=8, patch_size=4))
    (module,) = (part for part in model.modules() if isinstance(part, CLIPAttention))
    module.__class__, width = Old, module.q_proj.weight.shape
    with pytest.raises(RegardError, match=r"cannot be pruned: this transformers reshapes.*regard\.hf\.gated"):
        rg.prune(model, {0: [1]})
    assert module.q_proj.weight.shape == width


@pytest.mark.parametrize(("kind", "name", "expected"), [("GPT2", "LMHeadModel", True), ("Bert", "LMHeadModel", False)])
def test_a_causal_model_has_a_loss_whatever_its_configuration_says_of_decoders(kind, name, expected):
    """Before transformers 5, every configuration says `is_decoder=False`; of encoders it is true."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")()
    config.is_decoder = False
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}{name}")(config)
    assert text_reader._predicts_next_token(model) == expected


def test_caches_that_count_positions_say_where_their_keys_begin():
    """transformers before 5.4; with a window of 4, the last 3 of 7 tokens are held."""

    class Cache:
        def get_mask_sizes(self, positions, layer):
            return 3 + positions.shape[0], 4 + layer

    assert versions.mask_sizes(Cache(), 2, 0) == (5, 4)


@pytest.mark.parametrize("name", ["Qwen3Next", "Bamba", "FalconH1"])
@torch.no_grad()
def test_recurrent_layers_of_other_versions_are_neither_edited_nor_watched_in_silence(name, monkeypatch):
    pytest.importorskip("transformers")
    from recurrent_models import build

    for file in ("capture.recurrent_calls", "editing.recurrent_layers"):
        monkeypatch.setattr(f"regard.hf.{file}.core_names", lambda module: set())
    model, ids = build(name), torch.tensor([[3, 1, 4, 1, 5]])
    with rg.watch(model) as seen:
        model(ids)
    recurrent = {path for path, module in model.named_modules() if hasattr(module, "A_log")}
    assert set(seen.missing) == recurrent and recurrent
    with pytest.raises(RegardError, match="could not be applied to"), rg.edit(model, rg.KnockOut(rg.Where(keys=1))):
        model(ids)


def pinned(name):
    return next(
        line.split("==")[1] for line in (ROOT / "constraints.txt").read_text().splitlines() if f"{name}==" in line
    )


def test_nothing_is_refused_or_skipped_at_the_versions_of_constraints_txt():
    version = pinned("transformers")
    assert versions.WATCHED <= versions.REGISTERED <= versions.numbers(version) == extras.PINNED
    absent = "module transformers has no attribute Absent"
    refused = "register: it needs transformers 5.15 or newer, and 5.2.0 is installed."
    for error in (AttributeError(absent), ImportError(absent, name="transformers.models"), RegardError(refused)):
        assert extras.is_newer(error, "5.2.0") and not extras.is_newer(error, version)
    with pytest.raises(AttributeError) as within:  # a name that Regard misses is a failure with any version
        exec(compile(f"raise AttributeError({absent!r})", SOURCE / "absent.py", "exec"))
    assert not extras.is_newer(within.value, "5.2.0")


def test_a_torch_that_is_new_enough_is_kept():
    """Regard asks for a lower bound alone, which its own torch meets, and no extra names torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch_needed,) = [r for r in map(Requirement, project["dependencies"]) if r.name == "torch"]
    assert [bound.operator for bound in torch_needed.specifier] == [">="] and torch_needed.url is None
    assert pinned("torch") in torch_needed.specifier
    extra = {Requirement(r).name for listed in project["optional-dependencies"].values() for r in listed}
    assert not {name for name in extra if name.startswith(("torch", "pytorch", "nvidia", "cuda"))}


def test_versions_are_compared_by_their_first_two_numbers():
    assert versions.numbers("4.56.2") < versions.WATCHED <= versions.numbers("4.57.6")
    assert versions.numbers("5.9.0") < versions.REGISTERED <= versions.numbers("5.15.0.dev1")
