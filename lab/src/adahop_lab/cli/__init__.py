"""The commands that join `adahop` where the laboratory is installed."""
