"""Turns text into tokens and back: prompts, transcripts, engines, teachers."""
