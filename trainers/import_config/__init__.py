"""Launch scripts and configurations of verl, Search-R1, Tree-GRPO and AT2PO as this project's options."""

from __future__ import annotations

from turntree.trainers.import_config.importing import Imported, import_config
from turntree.trainers.import_config.settings import Launch, Note, Setting
from turntree.trainers.import_config.translation import Entry, Status

__all__ = ["Entry", "Imported", "Launch", "Note", "Setting", "Status", "import_config"]
