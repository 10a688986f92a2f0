"""The offline stage: models of what was measured on a GPU."""
