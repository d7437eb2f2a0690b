"""Turns text into tokens and back: prompts, transcripts, engines, teachers."""

from __future__ import annotations

from turntree.agents.dialogue import Dialogue
from turntree.agents.models import count_parameters, load_model, load_tokenizer, save_model
from turntree.agents.tokenizer import ByteTokenizer, Tokenizer

__all__ = [
    "ByteTokenizer",
    "Dialogue",
    "Tokenizer",
    "count_parameters",
    "load_model",
    "load_tokenizer",
    "save_model",
]
