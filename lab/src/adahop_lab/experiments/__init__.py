"""The experiments: every table and figure, made of cells that run alone, in any order, and go on after a kill."""
