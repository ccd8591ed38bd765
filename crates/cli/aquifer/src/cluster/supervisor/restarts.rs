//! Restarts: decides which daemons the supervisor starts, and when.
//!
//! A state machine whose inputs are the states of the daemons' locks, and the time since the start
//! of the supervisor.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::daemon::Daemon;

/// Pause before the first restart of a daemon.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Longest pause before a restart: each one doubles the pause.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Time after which the pause before the next restart of a running daemon is the shortest again.
const STABLE_TIME: Duration = Duration::from_secs(60);

/// State of a daemon's lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockState {
    /// A process holds the lock.
    Held {
        /// The process.
        pid: u32,
        /// True if `aquifer up`, the supervisor, or the agent before it has started the process.
        is_of_up: bool,
    },
    /// No process holds the lock.
    Free {
        /// The last process that held the lock.
        pid: Option<u32>,
        /// True if that process was asked to stop.
        was_stopped: bool,
    },
}

/// Change of a daemon's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// The daemon has died, and is restarted after the pause.
    Died {
        /// The pause.
        pause: Duration,
    },
    /// The daemon has ended and is not restarted.
    Stopped,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// The daemon does not run, and is not started unless a process other than `pid` has died.
    Stopped { pid: Option<u32> },
    /// The daemon is started at a time.
    Waiting { at: Duration },
    /// The daemon runs since a time.
    Running { pid: u32, is_of_up: bool, since: Duration },
}

#[derive(Clone, Copy, Debug)]
struct DaemonRestarts {
    phase: Phase,
    /// The pause before the next restart.
    pause: Duration,
}

/// The restarts of all daemons of a cluster.
#[derive(Debug)]
pub struct Restarts {
    daemons: BTreeMap<Daemon, DaemonRestarts>,
}

impl Restarts {
    /// Creates the restarts of these daemons. Daemons that do not run are restarted, unless they
    /// were stopped.
    pub fn new(daemons: impl IntoIterator<Item = Daemon>) -> Self {
        let new = DaemonRestarts { phase: Phase::Stopped { pid: None }, pause: PAUSE_MIN };
        Self { daemons: daemons.into_iter().map(|daemon| (daemon, new)).collect() }
    }

    /// The daemons, in the order in which they are started.
    pub fn daemons(&self) -> Vec<Daemon> {
        self.daemons.keys().copied().collect()
    }

    /// Updates the state of a daemon from its lock.
    pub fn observe(&mut self, daemon: Daemon, lock: LockState, now: Duration) -> Option<Change> {
        let restarts = self.daemons.get_mut(&daemon)?;
        match (restarts.phase, lock) {
            (Phase::Running { pid: known, .. }, LockState::Held { pid, .. }) if known == pid => None,
            (_, LockState::Held { pid, is_of_up }) => {
                restarts.phase = Phase::Running { pid, is_of_up, since: now };
                None
            }
            (Phase::Stopped { .. }, LockState::Free { pid, was_stopped: true }) => {
                restarts.phase = Phase::Stopped { pid };
                None
            }
            (_, LockState::Free { pid, was_stopped: true }) => {
                restarts.phase = Phase::Stopped { pid };
                Some(Change::Stopped)
            }
            (Phase::Waiting { .. }, LockState::Free { .. }) => None,
            (Phase::Stopped { pid: Some(known) }, LockState::Free { pid, .. }) if pid == Some(known) => None,
            // The process that has started the daemon, such as systemd, may restart it.
            (Phase::Running { is_of_up: false, .. }, LockState::Free { pid, .. }) => {
                restarts.phase = Phase::Stopped { pid };
                Some(Change::Stopped)
            }
            (Phase::Running { since, .. }, LockState::Free { .. }) => {
                if now.saturating_sub(since) >= STABLE_TIME {
                    restarts.pause = PAUSE_MIN;
                }
                Some(restarts.wait(now))
            }
            (Phase::Stopped { .. }, LockState::Free { .. }) => Some(restarts.wait(now)),
        }
    }

    /// Records that a daemon could not be started, and delays the next attempt.
    pub fn fail(&mut self, daemon: Daemon, now: Duration) {
        if let Some(restarts) = self.daemons.get_mut(&daemon) {
            restarts.wait(now);
        }
    }

    /// The daemons to start now, in this order.
    pub fn due(&self, now: Duration) -> Vec<Daemon> {
        self.starts().filter(|(_, at)| *at <= now).map(|(daemon, _)| daemon).collect()
    }

    /// The time of the next start, if a daemon waits.
    pub fn next_start(&self) -> Option<Duration> {
        self.starts().map(|(_, at)| at).min()
    }

    /// The waiting daemons, with the times of their starts. The others need the directory and the
    /// keeper, so they are not started before these.
    fn starts(&self) -> impl Iterator<Item = (Daemon, Duration)> {
        let waiting = self.daemons.iter().filter_map(|(daemon, restarts)| match restarts.phase {
            Phase::Waiting { at } => Some((*daemon, at)),
            _ => None,
        });
        let is_basic = |daemon| matches!(daemon, Daemon::Directory | Daemon::Keeper);
        let basic = waiting.clone().filter(move |(daemon, _)| is_basic(*daemon)).map(|(_, at)| at).max();
        waiting.map(move |(daemon, at)| match basic {
            Some(basic) if !is_basic(daemon) => (daemon, at.max(basic)),
            _ => (daemon, at),
        })
    }
}

impl DaemonRestarts {
    fn wait(&mut self, now: Duration) -> Change {
        let pause = self.pause;
        self.phase = Phase::Waiting { at: now + pause };
        self.pause = (2 * pause).min(PAUSE_MAX);
        Change::Died { pause }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: Daemon = Daemon::Node(1);
    const DIED: LockState = LockState::Free { pid: Some(7), was_stopped: false };
    const STOPPED: LockState = LockState::Free { pid: Some(7), was_stopped: true };

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn held(pid: u32) -> LockState {
        LockState::Held { pid, is_of_up: true }
    }

    fn died(pause_s: u64) -> Option<Change> {
        Some(Change::Died { pause: s(pause_s) })
    }

    /// The restarts of a cluster of one running daemon.
    fn running(daemon: Daemon) -> Restarts {
        let mut restarts = Restarts::new([daemon]);
        assert_eq!(restarts.observe(daemon, held(7), s(0)), None);
        restarts
    }

    #[test]
    fn a_daemon_that_died_is_due_after_the_pause() {
        let mut restarts = running(NODE);
        assert_eq!((restarts.due(s(9)), restarts.next_start()), (vec![], None));
        assert_eq!(restarts.observe(NODE, DIED, s(10)), died(1));
        assert_eq!((restarts.due(s(10)), restarts.next_start()), (vec![], Some(s(11))));
        assert_eq!(restarts.observe(NODE, DIED, s(11)), None, "another check changes nothing");
        assert_eq!(restarts.due(s(11)), [NODE]);
        assert_eq!(restarts.observe(NODE, held(8), s(11)), None);
        assert_eq!((restarts.due(s(11)), restarts.next_start()), (vec![], None));
    }

    #[test]
    fn pauses_grow_until_a_daemon_has_run_for_a_minute() {
        let mut restarts = running(NODE);
        let mut now = s(0);
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(restarts.observe(NODE, DIED, now), died(pause));
            now += s(pause);
            restarts.observe(NODE, held(7), now);
            now += s(59);
        }
        assert_eq!(restarts.observe(NODE, DIED, now + s(1)), died(1), "it has run for a minute");
        restarts.fail(NODE, now + s(2));
        assert_eq!(restarts.next_start(), Some(now + s(4)), "a failed start counts as a death");
        restarts.observe(NODE, held(8), now + s(4));
        restarts.observe(NODE, held(9), now + s(60));
        let pause = restarts.observe(NODE, DIED, now + s(65));
        assert_eq!(pause, died(4), "another process begins its minute anew");
    }

    #[test]
    fn a_daemon_that_was_stopped_is_not_started() {
        let mut restarts = running(NODE);
        assert_eq!(restarts.observe(NODE, STOPPED, s(1)), Some(Change::Stopped));
        assert_eq!(restarts.observe(NODE, STOPPED, s(2)), None);
        assert_eq!(restarts.next_start(), None);
        // Another process starts the daemon, and it dies while it is watched.
        restarts.observe(NODE, held(7), s(3));
        assert_eq!(restarts.observe(NODE, DIED, s(4)), died(1));
        // The daemon is stopped while it waits.
        assert_eq!(restarts.observe(NODE, STOPPED, s(4)), Some(Change::Stopped));
        assert_eq!(restarts.next_start(), None);
    }

    #[test]
    fn a_death_between_two_checks_is_noticed() {
        let mut restarts = running(NODE);
        restarts.observe(NODE, STOPPED, s(1));
        let other = LockState::Free { pid: Some(8), was_stopped: false };
        assert_eq!(restarts.observe(NODE, other, s(2)), died(1));
    }

    #[test]
    fn a_daemon_that_another_process_has_started_is_left_to_it() {
        let mut restarts = running(NODE);
        restarts.observe(NODE, LockState::Held { pid: 7, is_of_up: false }, s(1));
        restarts.observe(NODE, LockState::Held { pid: 8, is_of_up: false }, s(2));
        let end = LockState::Free { pid: Some(8), was_stopped: false };
        assert_eq!(restarts.observe(NODE, end, s(3)), Some(Change::Stopped));
        assert_eq!(restarts.observe(NODE, end, s(4)), None, "it stays stopped");
        assert_eq!(restarts.next_start(), None);
    }

    #[test]
    fn a_successor_is_watched_in_place_of_the_agent_before_it() {
        let mut restarts = running(Daemon::Agent);
        assert_eq!(restarts.observe(Daemon::Agent, DIED, s(1)), died(1));
        assert_eq!(restarts.observe(Daemon::Agent, held(8), s(1)), None);
        assert_eq!(restarts.next_start(), None, "no second agent is started");
        let end = LockState::Free { pid: Some(8), was_stopped: false };
        assert_eq!(restarts.observe(Daemon::Agent, end, s(70)), died(1));
    }

    #[test]
    fn daemons_that_do_not_run_at_first_are_restarted_unless_they_were_stopped() {
        let mut restarts = Restarts::new([NODE, Daemon::Agent]);
        assert_eq!(restarts.observe(NODE, STOPPED, s(0)), None);
        let never = LockState::Free { pid: None, was_stopped: false };
        assert_eq!(restarts.observe(Daemon::Agent, never, s(0)), died(1));
        assert_eq!(restarts.due(s(1)), [Daemon::Agent]);
    }

    #[test]
    fn all_wait_for_the_directory_and_the_keeper() {
        let all = Daemon::all(1, true).into_iter().filter(|daemon| *daemon != Daemon::Supervisor);
        let mut restarts = Restarts::new(all.clone());
        restarts.observe(Daemon::Directory, held(7), s(0));
        restarts.fail(Daemon::Directory, s(0));
        for daemon in all.clone() {
            restarts.observe(daemon, held(7), s(0));
            restarts.observe(daemon, DIED, s(0));
        }
        assert_eq!(restarts.due(s(1)), [Daemon::Keeper], "the directory failed before: 2 s");
        assert_eq!(restarts.next_start(), Some(s(1)));
        restarts.observe(Daemon::Keeper, held(8), s(1));
        assert_eq!(restarts.next_start(), Some(s(2)));
        let others = all.filter(|daemon| *daemon != Daemon::Keeper);
        assert_eq!(restarts.due(s(2)), others.collect::<Vec<_>>());
    }
}
