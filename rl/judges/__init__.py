"""Judging. The pure half neither waits nor loads a model: `templates` says whether a judge's config can work,
`questions` turns a group of answers into questions, `verdicts` the replies into one verdict per answer.
"""
