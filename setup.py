"""The build fails where a link to a room is missing: without this check the wheel would silently lack the package."""

import runpy
from pathlib import Path

from setuptools import setup

# Importing the package checks its links and says what to do; everything else is in pyproject.toml.
runpy.run_path(str(Path(__file__).resolve().parent / "src" / "turntree" / "__init__.py"))
setup()
