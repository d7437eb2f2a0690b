"""One exception class for each boundary of the library.

Every message says what was expected, what was found and what to do about it. All classes take a single
message, so that they survive pickling between processes.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "CostLimitError",
    "DataError",
    "DivergenceError",
    "EngineError",
    "EpisodeReplayError",
    "ForkLawError",
    "MissingExtraError",
    "RankError",
    "ReplayError",
    "ReplayMissError",
    "RetrievalError",
    "SearchIndexError",
    "SnapshotError",
    "TemplateError",
    "ToolError",
    "TurnTreeError",
]


class TurnTreeError(Exception):
    """Base of every error that turntree raises on purpose."""


class ConfigError(TurnTreeError):
    """An option is unknown, out of range, or cannot be combined with another one."""


class DataError(TurnTreeError):
    """A question file, corpus or world cannot be read as what it claims to be; names file and row."""


class SnapshotError(TurnTreeError):
    """A snapshot cannot be taken, decoded, or restored into this environment."""


class EpisodeReplayError(SnapshotError):
    """An environment without snapshots was played again, and gave something else than was recorded."""


class ForkLawError(TurnTreeError):
    """An environment breaks a law of snapshots; the message starts with the law's name."""


class ToolError(TurnTreeError):
    """A tool could not be executed for reasons that are not the agent's (infrastructure). Never a reward."""


class RetrievalError(ToolError):
    """A search backend failed or answered something that is not a result."""


class ReplayMissError(RetrievalError):
    """A store of searches that may not ask its backend has no answer to a query."""


class SearchIndexError(TurnTreeError):
    """A search index or corpus store on disk is missing, incomplete, damaged, or not the one that is expected."""


class CapacityError(TurnTreeError):
    """Something needs more memory or disk than there is; nothing was started."""


class ReplayError(ToolError):
    """Cells of an interpreter that were executed again did not give what they gave before."""


class EngineError(TurnTreeError):
    """A generation engine failed or broke its contract."""


class CostLimitError(EngineError):
    """The configured cost of an endpoint is spent: requests in flight were finished, this one was not started."""


class TemplateError(TurnTreeError):
    """A chat template cannot be used append-only, token in and token out."""


class CheckpointError(TurnTreeError):
    """A checkpoint or run folder is missing, incomplete, or belongs to another configuration."""


class DivergenceError(TurnTreeError):
    """Updates were skipped one after another because their gradients are not finite; the batch was saved."""


class RankError(TurnTreeError):
    """A process of a run in several processes is gone, or differs from the others; the run can be resumed."""


class MissingExtraError(TurnTreeError, ImportError):
    """An optional dependency is not installed; the message names the extra."""
