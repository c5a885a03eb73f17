"""Replay of journals: fresh objects, the same events, and every plan compared."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from millpond import __version__
from millpond.config.journal import SUFFIX, ChanceRecord, EventRecord, JournalReader, PlanRecord
from millpond.core.errors import ConfigError, InvariantBroken


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What replaying one journal showed."""

    name: str
    num_events: int
    num_plans: int
    """Compared and equal."""
    difference: str | None = None
    """The first plan that differs, for people; None if all are equal."""
    is_torn: bool = False
    """The journal ends inside a record, as after a crash; it is good up to there."""
    written_by: str = __version__
    """Code version that wrote it."""

    @property
    def is_equal(self) -> bool:
        """Whether every plan is the recorded one."""
        return self.difference is None

    def __str__(self) -> str:
        notes = ["torn at its end"] if self.is_torn else []
        if self.written_by != __version__:
            notes.append(f"written by version {self.written_by}")
        head = f"{self.name}: {self.num_events} events, {self.num_plans} equal plans"
        tail = f" ({', '.join(notes)})" if notes else ""
        return f"{head}{tail}" if self.difference is None else f"{head}{tail}\n{self.difference}"


def replay(folder: Path) -> list[ReplayReport]:
    """Replay every journal of a folder, in order of name.

    Raises:
        ConfigError: The folder has no journals.
        DataError: A journal is malformed or of another format.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise ConfigError(f"no {SUFFIX} files in {folder}")
    return [replay_file(path) for path in paths]


def replay_file(path: Path) -> ReplayReport:
    """Replay one journal up to its end or to the first plan that differs."""
    reader = JournalReader(path)
    machine = reader.header.setup.make()
    num_events = num_plans = 0
    difference = None
    for index, record in enumerate(reader.records()):
        try:
            if isinstance(record, EventRecord):
                num_events += 1
                machine.advance(record.now_ns, record.event)
            elif isinstance(record, PlanRecord):
                span = () if record.max_steps == 1 else (record.max_steps,)
                plan = machine.next_plan(record.now_ns, *span)
                if plan != record.plan:
                    difference = _describe(index, record, plan)
                    break
                num_plans += 1
            else:
                difference = _describe_draw(index, record)
                break
        except InvariantBroken as error:
            difference = f"record {index}: {type(record).__name__} breaks a law: {error}"
            break
    return ReplayReport(
        name=reader.header.name,
        num_events=num_events,
        num_plans=num_plans,
        difference=difference,
        is_torn=reader.is_torn,
        written_by=reader.header.code_version,
    )


def _describe(index: int, record: PlanRecord, got: object) -> str:
    lines = [f"record {index}, {record.now_ns} ns: another plan"]
    expected = record.plan
    if expected is None or got is None:
        return "\n".join([*lines, f"  recorded: {expected}", f"  now:      {got}"])
    for field in fields(expected):
        before, after = getattr(expected, field.name), getattr(got, field.name, None)
        if before != after:
            lines += [f"  {field.name}", f"    recorded: {before}", f"    now:      {after}"]
    return "\n".join(lines)


def _describe_draw(index: int, record: ChanceRecord) -> str:
    return f"record {index}: a draw of {record.stream}, but no object draws chance in this version"
