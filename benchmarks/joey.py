"""JoeyNMT's recurrent encoder-decoder with the weights of one of ours, which makes it the same function."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from regard.lab import LuongTranslator
from regard.lab.data import BOS, EOS, PAD, UNK, Batch
from regard.nn import Cell

INSTALL = "pip install --no-deps joeynmt==2.3.0 subword-nmt==0.3.8 importlib_metadata==8.7.0 zipp==3.23.0"


def available() -> str:
    """The name and version of the peer, or "" where it cannot be used."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import joeynmt.model
            import joeynmt.search  # noqa: F401
    except ImportError:
        return ""
    for name in ("joeynmt.model", "joeynmt.builders"):  # they tell the console of every model
        logging.getLogger(name).setLevel(logging.WARNING)
    return f"JoeyNMT {version('joeynmt')}"


@dataclass(frozen=True)
class Words:
    """What JoeyNMT's models ask of a vocabulary, with our ids; its own class puts other ids first."""

    size: int
    pad_index: int = PAD
    unk_index: int = UNK
    bos_index: int = BOS
    eos_index: int = EOS
    sep_index: int | None = None
    specials: tuple[str, ...] = ()
    lang_tags: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.size

    def lookup(self, token: str) -> int:
        return self.unk_index


def peer(ours: LuongTranslator, attention: str, dropout: float = 0.0) -> Any:
    """Their model of the same sizes and weights: the current state asks, and its attentional vector is fed back.

    `attention` is what JoeyNMT calls the scores of ours: "luong" (general) or "bahdanau" (additive).
    """
    from joeynmt.model import build_model

    embeddings = {"embedding_dim": ours.width, "dropout": dropout}
    common = {"type": "recurrent", "rnn_type": "lstm", "dropout": dropout, "embeddings": embeddings}
    config = {
        "encoder": {**common, "hidden_size": ours.width // 2},
        "decoder": {**common, "hidden_size": ours.width, "attention": attention, "hidden_dropout": dropout},
    }
    model = build_model(config, Words(ours.source_size), Words(ours.target_size))
    with torch.no_grad():
        for theirs, weight in _pairs(ours, model):
            assert theirs.shape == weight.shape
            theirs.copy_(weight)
    return model


def tie_to(ours: LuongTranslator) -> None:
    """Take from ours what theirs cannot have: a bias of the words, and two projections for a first state."""
    width = ours.width
    with torch.no_grad():
        ours.projection.bias.zero_()
        ours.cells.initial.weight[width:] = ours.cells.initial.weight[:width]
        ours.cells.initial.bias[width:] = ours.cells.initial.bias[:width]


def _pairs(ours: LuongTranslator, theirs: Any) -> list[tuple[Tensor, Tensor]]:
    """Each tensor of theirs, and what it is in ours."""
    width, decoder, cell = ours.width, theirs.decoder, ours.cells.layers[0]
    assert isinstance(cell, Cell) and cell.fed is not None
    found = [
        (theirs.src_embed.lut.weight, ours.source_embedding.table.weight),
        (theirs.trg_embed.lut.weight, ours.target_embedding.table.weight),
        (decoder.rnn.weight_ih_l0, torch.cat((cell.input.weight, cell.fed), 1)),
        (decoder.rnn.weight_hh_l0, cell.recurrent),
        (decoder.rnn.bias_ih_l0, cell.input.bias),
        (decoder.rnn.bias_hh_l0, torch.zeros_like(cell.input.bias)),
        (decoder.bridge_layer.weight, ours.cells.initial.weight[:width]),
        (decoder.bridge_layer.bias, ours.cells.initial.bias[:width]),
        (decoder.att_vector_layer.weight, ours.attentional.weight.roll(width, 1)),  # [state; context] in theirs
        (decoder.att_vector_layer.bias, ours.attentional.bias),
        (decoder.output_layer.weight, ours.projection.weight),
        *_attention_pairs(ours, decoder.attention),
    ]
    for mine, suffix in ((ours.encoder.ahead[0], ""), (ours.encoder.back[0], "_reverse")):
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            found.append((getattr(theirs.encoder.rnn, name + suffix), getattr(mine, name)))
    return found


def _attention_pairs(ours: LuongTranslator, theirs: Any) -> list[tuple[Tensor, Tensor]]:
    score: Any = ours.bridge.attention.score
    if hasattr(score, "direction"):
        return [
            (theirs.query_layer.weight, score.query.weight),
            (theirs.key_layer.weight, score.key.weight),
            (theirs.energy_layer.weight, score.direction[None]),
        ]
    return [(theirs.key_layer.weight, score.weight[0])]


def their_batch(batch: Batch) -> Any:
    """The same pairs as theirs holds them."""
    from joeynmt.batch import Batch as Theirs

    return Theirs(
        src=batch.source,
        src_length=(batch.source != PAD).sum(1),
        src_prompt_mask=None,
        trg=batch.target,
        trg_prompt_mask=None,
        indices=torch.arange(len(batch)),
        device=torch.device("cpu"),
        pad_index=PAD,
        eos_index=EOS,
    )


def trainer(model: Any, smoothing: float = 0.0, clip: float = 1.0, rate: float = 1e-4) -> Callable[[Any], float]:
    """One update, of the calls that JoeyNMT's `TrainManager` makes for it."""
    from joeynmt.builders import build_gradient_clipper, build_optimizer

    model.loss_function = ("crossentropy", smoothing)
    optimizer = build_optimizer({"optimizer": "adam", "learning_rate": rate}, model.parameters())
    clipping = build_gradient_clipper({"clip_grad_val": None, "clip_grad_norm": clip})
    assert clipping is not None

    def update(batch: Any) -> float:
        model.train()
        batch.sort_by_src_length()
        loss, _, _, correct = model(return_type="loss", **vars(batch))
        loss = batch.normalize(loss, normalization="tokens")
        loss.backward()
        value, _ = loss.item(), correct.item()
        clipping(parameters=model.parameters())
        optimizer.step()
        model.zero_grad()
        return value

    return update


def searcher(model: Any, beam: int, least: int, most: int) -> Callable[[Any], tuple[Any, Any]]:
    """Beam search for at least and at most so many steps: ids and scores."""
    from joeynmt.search import search

    def run(batch: Any) -> tuple[Any, Any]:
        model.eval()
        found, scores, _ = search(model, batch, most, beam, 1.0, min_output_length=least, return_prob="hyp")
        return found, scores

    return run
