"""Reads and writes the files of a checkpoint, decodes stored weights, and recognises tensor names and layouts."""
