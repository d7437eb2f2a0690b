"""Finds passages. Knows nothing of environments or models."""

from turntree.search_backend.bm25 import BM25Backend, BM25Settings
from turntree.search_backend.corpus import load_corpus, save_corpus
from turntree.search_backend.passage import Passage, SearchBackend

__all__ = ["BM25Backend", "BM25Settings", "Passage", "SearchBackend", "load_corpus", "save_corpus"]
