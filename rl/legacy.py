"""`--reward.legacy FILE.yaml`: verl's reward groups, merged into the config before anything else reads it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.config import Config, ConfigError
from rl.migrate import migrate


def read(path: str) -> dict[str, Any]:
    """The groups in a YAML file. Raises ConfigError if it cannot be read as a mapping."""
    import yaml

    try:
        tree = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"reward.legacy: {path} cannot be read: {error}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"reward.legacy: {path} must hold a mapping of groups, got {type(tree).__name__}")
    return dict(tree)


def merge(
    cfg: Config, legacy: Mapping[str, Any], given: Collection[str]
) -> tuple[Config, tuple[str, ...]]:  # fmt: skip
    """(config with what the legacy groups say, report with a line per legacy key).

    given: dotted names of the fields that the user set beside the file, such as "judge.replicas"; where one
    of them says otherwise, that is a conflict, and whatever else the experiment has gives way. Raises
    MigrationError (a ConfigError) as `migrate` does.
    """
    user: dict[str, dict[str, Any]] = {}
    for name in given:
        section, _, field = name.rpartition(".")
        if section in ("reward", "judge") and hasattr(getattr(cfg, section), field):
            user.setdefault(section, {})[field] = _to_plain(field, getattr(getattr(cfg, section), field))
    merged, report = migrate(legacy, user)
    for section, fields in merged.items():
        values = {field: _to_field(field, value) for field, value in fields.items()}
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **values)})
    return cfg, report


def _to_plain(field: str, value: Any) -> Any:
    """A field of ours as `migrate` speaks of it: one function is a text, arguments are a mapping."""
    if field == "fn":
        return value[0] if len(value) == 1 else value or None
    if field == "fn_kwargs":
        return json.loads(value) if value else None
    return value


def _to_field(field: str, value: Any) -> Any:
    if field == "fn":
        return (value,) if isinstance(value, str) else value or ()
    if field == "fn_kwargs":
        return json.dumps(value) if value else ""
    return value
