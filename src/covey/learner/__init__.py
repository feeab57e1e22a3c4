"""The weights under training and what moves them; knows no run, no files, no console."""
