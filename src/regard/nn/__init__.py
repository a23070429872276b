"""Modules with attention, all seen by `regard.watch`: multi-head attention, layers, Transformers, recurrent cells."""

from regard.nn.bridge import Bridge
from regard.nn.dropout import Dropout
from regard.nn.embedding import Embedding
from regard.nn.keys import Keys, Rows, select_rows
from regard.nn.layers import DecoderLayer, EncoderLayer, FeedForward, Residual
from regard.nn.listener import Attends, Listener, listeners
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.recurrent import Cell, Cells, CellStates, RecurrentEncoder
from regard.nn.roles import attention_for
from regard.nn.transformer import Blueprint, Decoder, Encoder, Past, Transformer

__all__ = [
    "Attends",
    "Blueprint",
    "Bridge",
    "Cell",
    "CellStates",
    "Cells",
    "Decoder",
    "DecoderLayer",
    "Dropout",
    "Embedding",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "Keys",
    "Listener",
    "MultiHeadAttention",
    "Past",
    "RecurrentEncoder",
    "Residual",
    "Rows",
    "Transformer",
    "attention_for",
    "listeners",
    "select_rows",
]
