//! The supervisor of a cluster of `aquifer up`: restarts daemons that have died.
//!
//! `aquifer up`, a user, or an agent that starts its successor can start a daemon, too. So the
//! supervisor acts on the state of the locks and not on its own record of started daemons. If a
//! daemon is started twice nevertheless, the second process ends, because it cannot acquire the
//! lock.

mod restarts;

use std::collections::BTreeMap;
use std::error::Error;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use aquifer_channel::exiting::is_exiting;
use aquifer_channel::socket::wait_readable;
use rustix::process::{Pid, WaitOptions, waitpid};

use super::config::ClusterConfig;
use super::daemon::Daemon;
use super::launch::{LaunchError, process_of, start};
use super::lock::{LockHolder, last_record};
use super::running::{is_started_by_up, try_lock_cluster};
use super::signals::StopSignal;
use super::up::watch_exits;
use crate::state::StateDir;
use restarts::{Change, LockState, Restarts};

/// Interval between checks of the locks while no process ends. A check finds daemons that another
/// process has started, and killed processes whose end the kernel delays.
const LOCK_CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Pause before the next attempt while another process holds the cluster's lock.
const LOCKED_PAUSE: Duration = Duration::from_millis(200);

/// Restarts daemons of the cluster that die, until `stop` has a request or the configuration is
/// removed. Calls `ready` once all daemons are watched.
///
/// # Errors
/// If the state folder has no cluster with a supervisor.
pub fn supervise(state: &StateDir, mut stop: StopSignal, ready: impl FnOnce()) -> Result<(), Box<dyn Error>> {
    let Some(config) = ClusterConfig::load(state)?.filter(|config| !config.no_restart) else {
        let folder = state.path().display();
        return Err(format!(
            "no cluster in {folder} is configured with a supervisor: `aquifer up` starts one"
        )
        .into());
    };
    let mut supervisor = Supervisor::new(state, config);
    supervisor.check_locks();
    ready();
    loop {
        let Some(timeout) = supervisor.restart_due(&mut stop) else { return Ok(()) };
        if stop.wait_or(&supervisor.pidfds(), Some(timeout)).is_some() {
            return Ok(());
        }
        supervisor.check_locks();
        if matches!(ClusterConfig::load(state), Ok(None)) {
            tracing::info!("the cluster's configuration is gone");
            return Ok(());
        }
    }
}

struct Supervisor<'a> {
    state: &'a StateDir,
    config: ClusterConfig,
    restarts: Restarts,
    /// The processes that held the locks at the last check.
    watched: BTreeMap<Daemon, LockHolder>,
    start: Instant,
}

impl<'a> Supervisor<'a> {
    fn new(state: &'a StateDir, config: ClusterConfig) -> Self {
        let restarts = restarts_of(&config);
        Self { state, config, restarts, watched: BTreeMap::new(), start: Instant::now() }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Descriptors that become readable when a daemon ends.
    fn pidfds(&self) -> Vec<BorrowedFd<'_>> {
        self.watched.values().map(|process| process.pidfd.as_fd()).collect()
    }

    /// Updates the state of all daemons from their locks.
    fn check_locks(&mut self) {
        reap_children();
        for daemon in self.restarts.daemons() {
            match self.lock_state(daemon) {
                Ok(Some(lock)) => self.observe(daemon, lock),
                Ok(None) => {}
                Err(error) => {
                    // A readable pidfd of this process would end each wait at once.
                    self.watched.remove(&daemon);
                    tracing::warn!(%daemon, %error, "cannot determine whether the daemon runs");
                }
            }
        }
    }

    /// The state of a daemon's lock; `None` if the daemon runs and its lock file was deleted.
    fn lock_state(&mut self, daemon: Daemon) -> Result<Option<LockState>, Box<dyn Error>> {
        if let Some(process) = process_of(self.state, daemon)? {
            let lock = LockState::Held { pid: process.pid, is_of_up: is_started_by_up(process.pid) };
            self.watched.insert(daemon, process);
            return Ok(Some(lock));
        }
        if let Some(process) = self.watched.get(&daemon)
            && !wait_readable(&[&process.pidfd], Duration::ZERO)?
            && !is_exiting(process.pid)
        {
            return Ok(None);
        }
        self.watched.remove(&daemon);
        let record = last_record(&self.state.lock(&daemon.to_string()))?;
        let (pid, was_stopped) = record.map(|record| (record.pid, record.is_ending)).unzip();
        Ok(Some(LockState::Free { pid, was_stopped: was_stopped.unwrap_or(false) }))
    }

    fn observe(&mut self, daemon: Daemon, lock: LockState) {
        match self.restarts.observe(daemon, lock, self.now()) {
            Some(Change::Died { pause }) => {
                tracing::warn!(%daemon, pause_s = pause.as_secs(), "daemon has died; starting it again");
            }
            Some(Change::Stopped) => tracing::info!(%daemon, "daemon was stopped; not starting it again"),
            None => {}
        }
    }

    /// Starts the daemons that are due, and returns the time until the next check; `None` if the
    /// supervisor must end.
    fn restart_due(&mut self, stop: &mut StopSignal) -> Option<Duration> {
        if !self.restarts.due(self.now()).is_empty() {
            // So that `aquifer up` and `aquifer down` do not start or stop them at the same time.
            let _lock = match try_lock_cluster(self.state) {
                Ok(Some(lock)) => lock,
                Ok(None) => return Some(LOCKED_PAUSE),
                Err(error) => {
                    tracing::warn!(%error, "cannot acquire the cluster's lock; retrying in 10 s");
                    return Some(LOCK_CHECK_INTERVAL);
                }
            };
            if !self.update_config() || self.restart_all(stop).is_err() {
                return None;
            }
        }
        let next_start = self.restarts.next_start().map(|at| at.saturating_sub(self.now()));
        Some(next_start.map_or(LOCK_CHECK_INTERVAL, |left| left.min(LOCK_CHECK_INTERVAL)))
    }

    /// Reads the configuration; returns false if there is none with a supervisor.
    fn update_config(&mut self) -> bool {
        match ClusterConfig::load(self.state) {
            Ok(Some(config)) if config.no_restart => false,
            Ok(None) => false,
            Ok(Some(config)) => {
                if config != self.config {
                    self.restarts = restarts_of(&config);
                    self.config = config;
                }
                true
            }
            Err(error) => {
                tracing::warn!(%error, "continuing with the configuration that was read before");
                true
            }
        }
    }

    /// Starts the daemons that are due. Must be called with the cluster's lock held.
    ///
    /// # Errors
    /// If the supervisor was asked to stop meanwhile.
    fn restart_all(&mut self, stop: &mut StopSignal) -> Result<(), LaunchError> {
        // Another process may have started them meanwhile.
        self.check_locks();
        for daemon in self.restarts.due(self.now()) {
            // It may run by now, or wait for one that could not be started.
            if self.restarts.due(self.now()).contains(&daemon) {
                self.restart(daemon, stop)?;
            }
        }
        if let Err(error) = watch_exits(self.state, &self.restarts.daemons()) {
            tracing::warn!(%error, "the keeper will not log how daemons end");
        }
        Ok(())
    }

    /// Starts a daemon. Must be called with the cluster's lock held.
    ///
    /// # Errors
    /// If the supervisor was asked to stop meanwhile.
    fn restart(&mut self, daemon: Daemon, stop: &mut StopSignal) -> Result<(), LaunchError> {
        let started = start(self.state, &self.config, daemon).and_then(|starting| {
            let pid = starting.pid();
            starting.wait_unless_stopped(stop).map(|()| pid)
        });
        match started {
            Ok(pid) => {
                tracing::info!(%daemon, pid, "daemon started again");
                self.observe(daemon, LockState::Held { pid, is_of_up: true });
            }
            Err(error @ LaunchError::Stopped { .. }) => {
                tracing::warn!(%error);
                return Err(error);
            }
            Err(error) => {
                tracing::warn!(%error, "daemon not started again");
                self.restarts.fail(daemon, self.now());
            }
        }
        // Another process of it may have been faster.
        self.check_locks();
        Ok(())
    }
}

fn restarts_of(config: &ClusterConfig) -> Restarts {
    Restarts::new(config.daemons().into_iter().filter(|daemon| *daemon != Daemon::Supervisor))
}

/// Removes the daemons that the supervisor has started and that have ended from the process table.
fn reap_children() {
    while let Ok(Some(_)) = waitpid(None::<Pid>, WaitOptions::NOHANG) {}
}
