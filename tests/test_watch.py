"""Whose fault it is and how the others are brought to an end: workers here are plans, not processes.

Times are in units of `UNIT`, so that the whole of it takes seconds.
"""

from __future__ import annotations

import signal
import time
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR1

import pytest

from tf_largebatch.supervisor import watch

# No test waits this long unless it fails.
pytestmark = pytest.mark.timeout(60)
UNIT = 0.1
NEVER = 1e9


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(watch, "_SETTLE_SECS", 5 * UNIT)
    monkeypatch.setattr(watch, "_POLL_SECS", 0.005)


class Planned:
    """A worker that ends with `code` at a time, or after a signal with what `reacts` says: (units later, code)."""

    def __init__(self, rank=0, ends=NEVER, code=0, lost=False, told=(), reacts=None):
        self.name = f"worker {rank}"
        self.began = time.monotonic()
        self.exit_code, self.ended_at, self.end = None, None, "did not end by itself"
        self.lost_a_peer, self.told = lost, set(told)
        self.got: list[tuple[int, float]] = []
        self._ends_at, self._code = self.began + ends * UNIT, code
        self._reacts = {SIGKILL: (0, 137), **(reacts or {})}

    def has_ended(self) -> bool:
        if self.exit_code is None and time.monotonic() >= self._ends_at:
            self.exit_code, self.ended_at, self.end = self._code, time.monotonic(), f"exit code {self._code}"
        return self.exit_code is not None

    def signal(self, number: int) -> None:
        self.got.append((number, (time.monotonic() - self.began) / UNIT))
        if number in self._reacts:
            later, code = self._reacts.pop(number)
            ends_at = time.monotonic() + later * UNIT
            if ends_at < self._ends_at:
                self._ends_at, self._code = ends_at, code

    @property
    def signals(self) -> list[int]:
        return [number for number, _ in self.got]

    def at(self, number: int) -> float:
        """When it first got the signal."""
        return next(at for got, at in self.got if got == number)


class Signals(list):
    """Signals that the launcher gets: grows by the plan {units from now: number}."""

    def __init__(self, plan: dict[float, int] | None = None):
        super().__init__()
        self._began, self._plan = time.monotonic(), sorted((plan or {}).items())

    def _grow(self) -> None:
        while self._plan and time.monotonic() >= self._began + self._plan[0][0] * UNIT:
            self.append(self._plan.pop(0)[1])

    def __len__(self) -> int:
        self._grow()
        return super().__len__()


def limits(start=NEVER, grace=20.0, failure_grace=20.0, exit_grace=NEVER) -> watch.Limits:
    return watch.Limits(start * UNIT, grace * UNIT, failure_grace * UNIT, exit_grace * UNIT)


def watched(*workers: Planned, signals=None, must_meet=False, said=None, **limit) -> watch.Watch:
    lines = [] if said is None else said
    made = watch.Watch(workers, Signals(signals), lines.append, limits(**limit), must_meet)
    made.until_all_ended()
    assert all(worker.exit_code is not None for worker in workers)
    return made


# Whose fault it is.


def test_all_that_end_well_are_nobodys_fault():
    made = watched(Planned(0, ends=1), Planned(1, ends=2))
    assert (made.exit_code, made.culprit, made.reason) == (0, None, "")


@pytest.mark.parametrize("culprit_ends", [1.5, 4])
@pytest.mark.parametrize("code", [1, 3, 137])
def test_a_survivor_that_lost_a_peer_is_not_the_culprit_even_if_it_ends_first(code, culprit_ends):
    """TensorFlow notices a dying process before its parent does: its sockets close first."""
    culprit = Planned(1, ends=culprit_ends, code=code)
    made = watched(Planned(0, ends=1, code=1, lost=True), culprit)
    assert (made.exit_code, made.culprit) == (code, culprit)
    assert made.reason == f"worker 1 failed first: exit code {code}"


def test_a_worker_that_hangs_while_others_lose_it_is_the_culprit():
    hangs = Planned(1)
    made = watched(Planned(0, ends=1, code=1, lost=True), hangs, Planned(2, ends=2, code=1, lost=True), failure_grace=2)
    assert (made.exit_code, made.culprit) == (1, hangs)
    assert made.reason == "worker 1 no longer answered, as worker 0 found (exit code 1)"
    assert hangs.signals[:2] == [SIGTERM, SIGKILL]
    assert hangs.at(SIGTERM) >= 6 and hangs.at(SIGKILL) >= hangs.at(SIGTERM) + 2


def test_a_survivor_still_running_that_lost_a_peer_is_not_said_to_hang():
    survivor = Planned(1, lost=True, reacts={SIGTERM: (0, 143)})
    made = watched(Planned(0, ends=1, code=1, lost=True), survivor, hangs := Planned(2), failure_grace=1)
    assert made.culprit is hangs and made.reason.startswith("worker 2 no longer answered")


def test_if_all_lost_a_peer_the_first_of_them_is_named():
    made = watched(Planned(0, ends=2, code=1, lost=True), first := Planned(1, ends=1, code=1, lost=True))
    assert (made.culprit, made.exit_code) == (first, 1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_code_1_is_what_survivors_end_with_whatever_they_print(order):
    """Of two without a lost peer the one with a code of its own is to blame, whichever was first."""
    plans = [Planned(0, ends=1 + order[0], code=1), Planned(1, ends=1 + order[1], code=2)]
    assert watched(*plans).exit_code == 2


def test_a_failure_of_its_own_after_the_others_were_told_to_end_changes_nothing():
    late = Planned(1, reacts={SIGTERM: (1, 2)})
    made = watched(first := Planned(0, ends=1, code=3), late)
    assert (made.exit_code, made.culprit) == (3, first) and late.exit_code == 2


def test_there_is_time_for_others_to_show_their_end_before_they_are_told_to():
    slow = Planned(1, ends=4, code=1)
    watched(Planned(0, ends=1, code=3), slow)
    assert slow.got == []


# Workers that ended because somebody else told them to: code 75.


def test_if_all_workers_stopped_and_saved_so_did_the_job():
    made = watched(Planned(0, ends=1, code=75), Planned(1, ends=2, code=75))
    assert (made.exit_code, made.reason) == (75, "worker 0 was told to stop, and saved")


def test_a_worker_that_stopped_and_saved_gives_the_others_the_whole_grace_to_save():
    saving = Planned(1, ends=15, code=75)
    made = watched(Planned(0, ends=1, code=75), saving, failure_grace=1, grace=30)
    assert made.exit_code == 75 and saving.got == []


def test_a_worker_that_does_not_end_beside_one_that_stopped_is_killed_after_the_grace():
    hangs = Planned(1)
    made = watched(Planned(0, ends=1, code=75), hangs, failure_grace=1, grace=10)
    assert made.exit_code == 75 and set(hangs.signals) == {SIGKILL} and hangs.at(SIGKILL) >= 16


def test_a_first_signal_does_not_kill_workers_that_are_saving_already():
    """A machine's end is told to its workers, and then by the scheduler to the launcher."""
    saving = Planned(1, ends=15, code=75)
    made = watched(Planned(0, ends=1, code=75), saving, grace=30, signals={10: SIGTERM})
    assert SIGKILL not in saving.signals
    assert made.exit_code == 75 and made.reason.count("saved") == 1


@pytest.mark.parametrize("lost_first", [True, False])
def test_a_survivor_of_a_worker_that_stopped_and_saved_does_not_make_it_a_failure(lost_first):
    lost, saved = Planned(0, ends=1 if lost_first else 2, code=1, lost=True), Planned(1, ends=1.5, code=75)
    made = watched(lost, saved)
    assert (made.exit_code, made.culprit) == (75, saved)


def test_a_failure_beside_a_worker_that_stopped_is_one():
    assert watched(Planned(0, ends=1, code=75), Planned(1, ends=2, code=3)).exit_code == 3


# The limit on the start.


def test_the_worker_that_never_told_that_it_waits_is_named():
    missing = Planned(1, reacts={SIGTERM: (0, 143)})
    waits = [Planned(rank, told={"waiting"}, reacts={SIGTERM: (0, 143)}) for rank in (0, 2)]
    made = watched(waits[0], missing, waits[1], start=5)
    assert (made.exit_code, made.culprit) == (124, missing)
    assert made.reason == f"worker 1 had not started after {5 * UNIT:g} s"
    assert all(worker.at(SIGTERM) >= 5 for worker in (*waits, missing))


def test_workers_that_wait_for_one_another_in_vain_are_not_said_to_be_missing():
    made = watched(*(Planned(rank, told={"waiting"}, reacts={SIGTERM: (0, 143)}) for rank in (0, 1)), start=3)
    assert (made.exit_code, made.reason) == (124, f"the workers had not found each other after {3 * UNIT:g} s")


def test_one_that_met_and_one_that_did_not_are_too_late_too():
    met, waits = Planned(0, told={"waiting", "ready"}), Planned(1, told={"waiting"})
    made = watched(met, waits, start=3, failure_grace=1)
    assert made.exit_code == 124 and "had not found each other" in made.reason


def test_a_program_that_tells_nothing_has_no_limit_on_its_start():
    assert watched(Planned(0, ends=8), Planned(1, ends=8), start=2).exit_code == 0


def test_a_program_known_to_tell_has_one_even_if_it_hangs_before_it_tells_anything():
    made = watched(Planned(0), Planned(1), start=2, failure_grace=1, must_meet=True)
    assert (made.exit_code, made.reason) == (124, f"worker 0, worker 1 had not started after {2 * UNIT:g} s")


def test_workers_that_have_met_may_train_for_as_long_as_they_like():
    told = {"waiting", "ready"}
    assert watched(Planned(0, ends=8, told=told), Planned(1, ends=9, told=told), start=2, must_meet=True).exit_code == 0


def test_without_a_limit_workers_wait_for_ever():
    workers = [Planned(rank, ends=8, told={"waiting"}) for rank in (0, 1)]
    made = watch.Watch(workers, Signals(), print, watch.Limits(start=None), must_meet=True)
    made.until_all_ended()
    assert made.exit_code == 0


def test_a_failure_during_the_start_is_a_failure_and_not_a_late_start():
    made = watched(Planned(0, told={"waiting"}), Planned(1, ends=1, code=2), start=3, failure_grace=1)
    assert (made.exit_code, made.reason) == (2, "worker 1 failed first: exit code 2")


# The user, or a scheduler, stops the job.


@pytest.mark.parametrize(("number", "code"), [(SIGTERM, 75), (SIGUSR1, 75), (SIGINT, 130)])
def test_a_job_that_was_stopped_and_saved_says_so(number, code):
    workers = [Planned(rank, told={"stoppable"}, reacts={SIGTERM: (3, 75)}) for rank in (0, 1)]
    said: list[str] = []
    made = watched(*workers, signals={2: number}, said=said)
    assert (made.exit_code, made.reason) == (code, f"stopped by {signal.Signals(number).name}, and saved")
    assert [worker.signals for worker in workers] == [[SIGTERM]] * 2
    (line,) = said
    assert line.startswith(f"{signal.Signals(number).name}: worker 0, worker 1 may take {20 * UNIT:g} s to end; once ")


@pytest.mark.parametrize("number", [SIGTERM, SIGUSR1, SIGINT])
def test_a_job_that_was_asked_to_stop_when_all_was_done_has_ended_well(number):
    workers = [Planned(rank, told={"stoppable"}, reacts={SIGTERM: (3, 0)}) for rank in (0, 1)]
    made = watched(*workers, signals={2: number})
    assert (made.exit_code, made.reason) == (0, "")


@pytest.mark.parametrize(("number", "code"), [(SIGTERM, 143), (SIGUSR1, 138), (SIGINT, 130)])
@pytest.mark.parametrize("codes", [(75, 143), (75, 1), (130, 130)])
def test_a_job_that_was_stopped_but_not_saved_by_all_does_not_say_that_it_was(number, code, codes):
    workers = [Planned(rank, told={"stoppable"}, reacts={SIGTERM: (1, codes[rank])}) for rank in (0, 1)]
    made = watched(*workers, signals={1: number})
    assert (made.exit_code, made.reason) == (code, f"stopped by {signal.Signals(number).name}")
    assert made.culprit is None


def test_a_worker_that_had_finished_when_the_others_saved_is_no_failure():
    finished = Planned(0, ends=0.5)
    made = watched(finished, Planned(1, told={"stoppable"}, reacts={SIGTERM: (1, 75)}), signals={1: SIGTERM})
    assert made.exit_code == 75


def test_only_workers_that_said_so_are_stopped_by_sigterm():
    """Under TensorFlow the others would ignore it, and be killed after the grace."""
    stoppable = Planned(0, told={"waiting", "ready", "stoppable"}, reacts={SIGTERM: (0, 75)})
    other = Planned(1, told={"waiting", "ready"}, reacts={SIGINT: (0, 130)})
    assert watched(stoppable, other, signals={1: SIGTERM}).exit_code == 143
    assert (stoppable.signals, other.signals) == ([SIGTERM], [SIGINT])


def test_a_stoppable_worker_that_hangs_is_interrupted_within_the_grace_and_killed_at_its_end():
    hangs = Planned(0, told={"stoppable"})
    made = watched(hangs, signals={1: SIGTERM}, grace=20)
    assert made.exit_code == 143
    assert list(dict.fromkeys(hangs.signals)) == [SIGTERM, SIGINT, SIGKILL]
    asked = hangs.at(SIGTERM)
    assert asked + 14 <= hangs.at(SIGINT) < asked + 18 and hangs.at(SIGKILL) >= asked + 20
    assert hangs.signals.count(SIGINT) == 1


def test_a_worker_that_the_late_interrupt_ends_is_not_killed():
    hangs = Planned(0, told={"stoppable"}, reacts={SIGINT: (1, 130)})
    made = watched(hangs, signals={1: SIGUSR1}, grace=20)
    assert made.exit_code == 138 and hangs.signals == [SIGTERM, SIGINT]


@pytest.mark.parametrize("second", [SIGINT, SIGTERM, SIGUSR1])
def test_a_second_signal_kills_at_once(second):
    workers = [Planned(rank, told={"stoppable"}) for rank in (0, 1)]
    made = watched(*workers, signals={1: SIGTERM, 4: second}, grace=1000)
    assert made.exit_code == 143
    for worker in workers:
        assert worker.signals[:2] == [SIGTERM, SIGKILL] and 4 <= worker.at(SIGKILL) < 10


def test_two_signals_that_come_together_count_as_two():
    hangs = Planned(0)
    assert watched(hangs, signals={0.9999: SIGINT, 1: SIGINT}, grace=1000).exit_code == 130
    assert hangs.at(SIGKILL) < 8


def test_a_signal_before_the_first_look_stops_the_job_too():
    assert watched(Planned(0, reacts={SIGINT: (0, 130)}), signals={0: SIGINT}).exit_code == 130


def test_a_signal_while_a_failed_job_ends_kills_at_once_and_the_failure_stays_the_reason():
    hangs = Planned(1)
    made = watched(Planned(0, ends=1, code=3), hangs, failure_grace=1000, signals={9: SIGINT})
    assert made.exit_code == 3 and hangs.signals[:2] == [SIGTERM, SIGKILL] and 9 <= hangs.at(SIGKILL) < 15


def test_a_failed_worker_found_while_the_user_stops_the_job_is_not_blamed():
    made = watched(Planned(0, reacts={SIGINT: (1, 1)}), Planned(1, reacts={SIGINT: (0, 130)}), signals={1: SIGINT})
    assert (made.exit_code, made.culprit, made.reason) == (130, None, "stopped by SIGINT")
