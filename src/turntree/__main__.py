"""``python -m turntree``, and ``torchrun -m turntree``: the command line."""

from turntree.cli import main

main()
