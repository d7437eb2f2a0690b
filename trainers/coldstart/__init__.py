"""Cold start: a teacher's trajectories by rejection sampling, then supervised training on those that are kept."""

from turntree.trainers.coldstart.filters import FILTERS
from turntree.trainers.coldstart.job import Selection, coldstart
from turntree.trainers.coldstart.played import Key, Played
from turntree.trainers.coldstart.rows import read_kept
from turntree.trainers.coldstart.select import Verdict, best_of, judge
from turntree.trainers.coldstart.statistics import Statistics
from turntree.trainers.coldstart.training import ColdStart, cold_start, demonstrations, teach

__all__ = [
    "FILTERS",
    "ColdStart",
    "Key",
    "Played",
    "Selection",
    "Statistics",
    "Verdict",
    "best_of",
    "cold_start",
    "coldstart",
    "demonstrations",
    "judge",
    "read_kept",
    "teach",
]
