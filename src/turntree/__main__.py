"""``python -m turntree``, and ``torchrun -m turntree``: the command line."""

from __future__ import annotations

from turntree.cli import main

if __name__ == "__main__":
    main()
