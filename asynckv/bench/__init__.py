"""Measurements behind ``asynckv bench``: the store beside what its disk, its memory and its rivals give."""
