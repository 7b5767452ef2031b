"""Judges and rewards on labelled answers: nothing is trained."""
