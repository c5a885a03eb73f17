"""Journals: what was recorded replays to equal plans; what was changed or damaged is found."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import pytest

from millpond.config.journal import (
    JOURNAL_FORMAT,
    SUFFIX,
    DispatcherSetup,
    EventRecord,
    GroupSetup,
    JournalReader,
    JournalWriter,
    PlanRecord,
    journaled,
)
from millpond.config.sections import Config
from millpond.config.sim_params import SimRankParams
from millpond.control.dispatcher import Dispatcher, DispatchParams
from millpond.control.group_scheduler import GroupParams, GroupRole, GroupScheduler
from millpond.core.chance import Chance
from millpond.core.errors import ConfigError, DataError, WireVersionMismatch
from millpond.core.events import Assigned, GatewayUp, Tick
from millpond.core.ids import DpRank, GatewayId, GroupId, RankRef
from millpond.core.plan import GroupPlan
from millpond.core.units import SECOND_NS
from millpond.sim.cluster import CLIENT_ORDER, Cluster, ClusterShape
from millpond.sim.replay import replay, replay_file
from millpond.sim.run import run_simulation
from millpond.sim.workload import Arrival, poisson
from tests.sim.making import Engines, make_assign, make_ranks, make_spec

M0 = RankRef(GroupId("m0"), DpRank(0))


def group_setup():
    return GroupSetup(GroupId("m0"), GroupRole.MIXED, make_ranks(), 4096, GroupParams())


@pytest.fixture
def journal(tmp_path):
    """A journal of one mixed group that served three requests."""
    writer = JournalWriter(tmp_path, "m0.1", group_setup(), config_digest="abc", seed=7)
    scheduler, engines = journaled(group_setup().make(), writer), Engines(1)
    for i in range(3):
        scheduler.advance(i, Assigned(make_assign(make_spec(f"r{i}", 100 * i + 1, 20), M0, M0)))
    now_ns = 10
    while (plan := scheduler.next_plan(now_ns, 8)) is not None:
        now_ns += 5
        if plan.ranks:
            scheduler.advance(now_ns, engines.run(plan))
    writer.close()
    return tmp_path / f"m0.1{SUFFIX}"


def test_replay_gives_equal_plans(journal):
    report = replay_file(journal)
    assert report.is_equal
    assert not report.is_torn
    assert report.num_plans > 5
    assert "equal plans" in str(report)


def test_the_header_tells_what_it_is(journal):
    header = JournalReader(journal).header
    assert (header.format, header.object, header.name) == (JOURNAL_FORMAT, "group", "m0.1")
    assert (header.config_digest, header.seed) == ("abc", 7)
    assert header.setup == group_setup()


def test_a_stand_in_is_used_like_the_object(tmp_path):
    with JournalWriter(tmp_path, "x", group_setup()) as writer:
        scheduler = journaled(group_setup().make(), writer)
        assert isinstance(scheduler, GroupScheduler)
        assert scheduler.views() == group_setup().make().views()
        assert scheduler.next_plan(0) is None


def test_two_lives_have_two_files(tmp_path):
    JournalWriter(tmp_path, "p0.1", group_setup()).close()
    with pytest.raises(FileExistsError):
        JournalWriter(tmp_path, "p0.1", group_setup())


def test_nobody_else_may_read_the_prompts(tmp_path):
    with JournalWriter(tmp_path / "journals", "p0.1", group_setup()):
        [path] = (tmp_path / "journals").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_what_was_parked_is_on_disk(tmp_path):
    """A killed process loses nothing that it decided before it parked."""
    writer = JournalWriter(tmp_path, "m0", group_setup())
    scheduler = journaled(group_setup().make(), writer)
    scheduler.advance(1, Tick())
    scheduler.next_plan(2)
    records = list(JournalReader(tmp_path / f"m0{SUFFIX}").records())
    assert records == [EventRecord(1, Tick()), PlanRecord(2, 1, None)]
    writer.close()


def rewrite(journal, change):
    """Write the journal again with every record changed."""
    reader = JournalReader(journal)
    records = [change(i, record) for i, record in enumerate(reader.records())]
    header = reader.header
    journal.unlink()
    with JournalWriter(journal.parent, header.name, header.setup, seed=header.seed) as writer:
        for record in records:
            if isinstance(record, EventRecord):
                writer.event(record.now_ns, record.event)
            elif record is not None:
                writer.plan(record.now_ns, record.max_steps, record.plan)


def test_one_changed_plan_is_found_and_named(journal):
    plans = [i for i, r in enumerate(JournalReader(journal).records()) if isinstance(r, PlanRecord)]
    victim = plans[len(plans) // 2]

    def change(i, record):
        return (
            replace(record, plan=replace(record.plan, step=record.plan.step + 1)) if i == victim else record
        )

    rewrite(journal, change)
    report = replay_file(journal)
    assert not report.is_equal
    assert report.num_plans == len(plans) // 2
    assert f"record {victim}, " in report.difference
    assert "step" in report.difference
    assert "recorded: " in report.difference


def test_one_missing_event_is_found(journal):
    rewrite(journal, lambda i, record: None if i == 1 else record)
    assert not replay_file(journal).is_equal


def test_a_plan_that_was_never_made_is_found(journal):
    last = [r for r in JournalReader(journal).records() if isinstance(r, PlanRecord)][-1]
    assert last.plan is None
    invented = GroupPlan(step=99, kind="decode", num_steps=1, ranks=())
    rewrite(journal, lambda i, r: replace(r, plan=invented) if r == last else r)
    report = replay_file(journal)
    assert "now:      None" in report.difference


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 40])
def test_a_torn_end_is_tolerated_and_reported(journal, cut):
    whole = replay_file(journal)
    data = journal.read_bytes()
    journal.write_bytes(data[:-cut])
    report = replay_file(journal)
    assert report.is_equal
    assert report.is_torn
    assert 0 < report.num_plans <= whole.num_plans
    assert "torn" in str(report)


def test_every_cut_is_readable_or_a_clear_error(journal):
    data = journal.read_bytes()
    for length in range(0, len(data), 97):
        journal.write_bytes(data[:length])
        try:
            reader = JournalReader(journal)
        except DataError:
            assert length < 400, "only the header may be missed"
            continue
        assert len(list(reader.records())) >= 0


def test_another_format_is_refused_by_name(tmp_path):
    body = msgspec.msgpack.encode({"format": JOURNAL_FORMAT + 1, "object": "group", "new_field": 1})
    path = tmp_path / f"old{SUFFIX}"
    path.write_bytes(len(body).to_bytes(4, "little") + body)
    with pytest.raises(WireVersionMismatch, match=f"format {JOURNAL_FORMAT + 1}"):
        JournalReader(path)


@pytest.mark.parametrize("data", [b"", b"\x00", b"not a journal at all", b"\x02\x00\x00\x00{}"])
def test_what_is_no_journal_is_refused(tmp_path, data):
    path = tmp_path / f"x{SUFFIX}"
    path.write_bytes(data)
    with pytest.raises(DataError):
        JournalReader(path)


def test_a_malformed_record_is_named(journal):
    body = msgspec.msgpack.encode(["Z", 1, 2])
    with journal.open("ab") as file:
        file.write(len(body).to_bytes(4, "little") + body)
    with pytest.raises(DataError, match="unknown kind of record 'Z'"):
        replay_file(journal)


def test_a_folder_without_journals_is_an_error(tmp_path):
    with pytest.raises(ConfigError):
        replay(tmp_path)


def test_draws_of_chance_are_kept(tmp_path):
    with JournalWriter(tmp_path, "x", group_setup()) as writer:
        writer.chance("encoder.pick", 2**64 - 1)
    [record] = JournalReader(tmp_path / f"x{SUFFIX}").records()
    assert (record.stream, record.draw) == ("encoder.pick", 2**64 - 1)
    assert "encoder.pick" in replay_file(tmp_path / f"x{SUFFIX}").difference


def test_a_dispatcher_is_rebuilt_from_its_header(tmp_path):
    setup = DispatcherSetup(DispatchParams(orphan_s=3.5), (GroupId("d0"), GroupId("p0")), 12)
    with JournalWriter(tmp_path, "controller.1", setup) as writer:
        dispatcher = journaled(setup.make(), writer)
        assert isinstance(dispatcher, Dispatcher)
        dispatcher.advance(13, GatewayUp(GatewayId("g0")))
    assert JournalReader(tmp_path / f"controller.1{SUFFIX}").header.setup == setup


def test_a_run_of_200_requests_replays(tmp_path):
    run_simulation(Config(), poisson(Chance(0, "arrivals"), 200, 3.0, 80, 12), journal=tmp_path)
    reports = replay(tmp_path)
    assert [report.name for report in reports] == ["controller.1", "d0.1", "p0.1"]
    assert [str(report) for report in reports if not report.is_equal] == []
    assert min(report.num_plans for report in reports) > 200


def test_every_life_of_a_disturbed_service_replays(tmp_path):
    writers = []

    def make(name, setup):
        writers.append(JournalWriter(tmp_path, name, setup))
        return journaled(setup.make(), writers[-1])

    cluster = Cluster(ClusterShape(rank=SimRankParams(num_blocks=8)), make=make)
    cluster.add([Arrival(SECOND_NS, 100 + i, 60) for i in range(15)])
    for seconds, action in (
        (1.5, partial(cluster.kill_group, GroupId("d0"))),
        (2.5, cluster.kill_controller),
        (5.0, partial(cluster.kill_group, GroupId("p0"))),
    ):
        cluster.kernel.at(int(seconds * SECOND_NS), CLIENT_ORDER, action)
    assert cluster.run()
    for writer in writers:
        writer.close()
    reports = replay(tmp_path)
    assert {report.name for report in reports} == {
        "controller.1", "controller.2", "d0.1", "d0.2", "p0.1", "p0.2",
    }  # fmt: skip
    assert all(report.is_equal for report in reports)
