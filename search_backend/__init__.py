"""Finds passages. Knows nothing of environments or models."""

from turntree.search_backend.passage import Passage, SearchBackend

__all__ = ["Passage", "SearchBackend"]
