"""Prompts: read from files or made, checked, encoded; an ordinal names one for ever."""
