"""Fictional multi-hop worlds, generated from a seed."""

from turntree.envs.worlds.languages import lexicon, name_words
from turntree.envs.worlds.profiles import PROFILES, WorldConfig
from turntree.envs.worlds.world import World, generate_world, load_world

__all__ = ["PROFILES", "World", "WorldConfig", "generate_world", "lexicon", "load_world", "name_words"]
