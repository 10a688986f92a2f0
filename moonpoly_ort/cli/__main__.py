"""`python -m moonpoly_ort.cli` is `moonpoly`."""

from . import main

main()
