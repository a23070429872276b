"""Modules with attention, all seen by `regard.watch`: multi-head attention, layers, Transformers, recurrent cells."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.nn.attention_roles import attention_for
from regard.nn.cross_attention import CrossAttention
from regard.nn.dropout import Dropout
from regard.nn.embedding import Embedding, PositionalEncoding
from regard.nn.latent import MultiHeadLatentAttention
from regard.nn.layers import DecoderLayer, EncoderLayer, FeedForward, Residual
from regard.nn.listener import Attends, Listener, listeners
from regard.nn.module_output import ModuleOutput
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.projected_kv import ProjectedKV, Rows, select_rows
from regard.nn.recurrent import Cell, Cells, CellStates, RecurrentEncoder
from regard.nn.transformer import Decoder, DecoderCache, Encoder, Transformer, TransformerConfig

__all__ = [
    "Attends",
    "Cell",
    "CellStates",
    "Cells",
    "CrossAttention",
    "Decoder",
    "DecoderCache",
    "DecoderLayer",
    "Dropout",
    "Embedding",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "Listener",
    "ModuleOutput",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "PositionalEncoding",
    "ProjectedKV",
    "RecurrentEncoder",
    "Residual",
    "Rows",
    "Transformer",
    "TransformerConfig",
    "attention_for",
    "listeners",
    "select_rows",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
