"""`python -m adahop` is `adahop`."""

from adahop.cli import main

main()
