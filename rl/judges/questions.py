"""What a judge is asked about a group of answers: prompt and texts in, questions (`Ask`) out. Pure.

`Ask.part` says which of several questions about the same answers this is: "criterion 2", "vote 0", or
"criterion 2 vote 0".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import losses
from rl.config import Judge, Scalar
from rl.judges.pairwise import games
from rl.seeds import fold_in
from rl.types import Ask, Prompt

# What the template's fields are called by losses.render, which treats both as a candidate's text.
_RENDERED = {"{first}": "{candidate_a}", "{second}": "{candidate_b}"}
NAMED = ("label", "json", "tag")  # formats in which judge.label names the verdict


def questions(cfg: Judge, prompt: Prompt, texts: Sequence[str], seeds: Sequence[int]) -> list[Ask]:
    """Every question that a group's answers ask of a generative judge. `seeds`: one per answer.

        label, json, tag, boxed, yes_no    votes · answers
        rubric                             votes · criteria · answers
        logprob                            answers: nothing is sampled
        pairwise                           votes · games, see rl/judges/pairwise.py; of one answer none

    Answers with the same text are asked about each. A question's seed is a function of its answers' seeds and
    its part alone, and so is who meets whom: to permute texts and seeds alike permutes the questions.

    Raises ValueError for a template that wants {reference} of a prompt without an answer.
    """
    if len(texts) != len(seeds):
        raise ValueError(f"questions: one seed per answer, got {len(texts)} answers and {len(seeds)} seeds")
    every = range(len(texts))
    abouts = games(seeds, cfg.opponents, cfg.orders) if cfg.format == "pairwise" else [(i,) for i in every]
    return [
        _ask(cfg, prompt, texts, about, _seed(seeds, about, part), part, criterion)
        for about in abouts
        for part, criterion in _parts(cfg)
    ]


def scalar_questions(cfg: Scalar, prompt: Prompt, texts: Sequence[str]) -> list[Ask]:
    """One question per answer. With `chat` its two messages: `text` the user's, `said` the assistant's."""
    if cfg.chat:
        return [Ask(text=prompt.text, about=(i,), seed=0, said=said) for i, said in enumerate(texts)]
    rows = [_trusted(prompt) | {"candidate": text} for text in texts]
    read = [losses.render(cfg.template, row, neutralise=False, delimiter=None) for row in rows]
    return [Ask(text=text, about=(i,), seed=0) for i, text in enumerate(read)]


def topic(ask: Ask) -> str:
    """What the votes on one question have in common: its part without the vote."""
    return ask.part.partition("vote")[0].strip()


def criteria(cfg: Judge) -> list[str]:
    """Topic of each criterion of the rubric."""
    return [f"criterion {i}" for i in range(len(cfg.criteria))]


def _parts(cfg: Judge) -> list[tuple[str, str]]:
    """(part, criterion's text) of each question about the same answers."""
    topics = list(zip(criteria(cfg), cfg.criteria, strict=True)) if cfg.format == "rubric" else [("", "")]
    several = cfg.votes > 1 and cfg.format != "logprob"
    votes = [f"vote {i}" for i in range(cfg.votes)] if several else [""]
    return [(f"{name} {vote}".strip(), text) for name, text in topics for vote in votes]


def _seed(seeds: Sequence[int], about: tuple[int, ...], part: str) -> int:
    return fold_in(seeds[about[0]], "judge", *(seeds[i] for i in about[1:]), part)


def _ask(
    cfg: Judge,
    prompt: Prompt,
    texts: Sequence[str],
    about: tuple[int, ...],
    seed: int,
    part: str,
    criterion: str,
) -> Ask:
    nonce = f"{fold_in(seed, 'nonce'):016x}"[-8:] if cfg.nonce else ""
    names = ("candidate",) if len(about) == 1 else ("candidate_a", "candidate_b")
    fields = _trusted(prompt) | {name: texts[i] for name, i in zip(names, about, strict=True)}
    template = cfg.template
    if cfg.format == "rubric":
        fields["criterion"] = criterion
    if cfg.format == "pairwise":
        for field, rendered in _RENDERED.items():
            template = template.replace(field, rendered)
    text = losses.render(
        template,
        fields,
        neutralise=cfg.neutralise,
        delimiter=cfg.delimiter,
        nonce=nonce or None,
        verdict=[cfg.label] if cfg.format in NAMED else [],
    )
    labels = cfg.labels if cfg.format == "logprob" else ()
    return Ask(text=text, about=about, seed=seed, part=part, nonce=nonce, labels=labels)


def _trusted(prompt: Prompt) -> dict[str, str]:
    reference: Mapping[str, str] = {} if prompt.answer is None else {"reference": prompt.answer}
    return {"problem": prompt.text, **reference}
