//! The keeper: a small process that holds the descriptors of every paged program.
//!
//! When the last reference to a userfaultfd closes, the kernel answers missing pages with zeros. So the agent's death must not
//! close it: the keeper has another reference. Programs then wait. If the agent does not take them back within the grace time, the
//! keeper ends them; none ever reads a zero that it did not write.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_faults::serve::attach::{AttachError, receive_frame, send_frame};
use aquifer_ipc::{Frame, Put};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::socket::{accept_own, connect_to, listen_at, raise_descriptor_limit, wait_readable};

/// How often to look around.
const TICK: Duration = Duration::from_millis(100);
/// Programs held at once.
const PROGRAMS_MAX: usize = 65_536;

/// How to run a keeper.
#[derive(Clone, Debug)]
pub struct KeeperOptions {
    /// Where it listens.
    pub socket: PathBuf,
    /// How long programs wait for an agent that died.
    pub grace: Duration,
}

#[derive(Debug, Default)]
struct Kept {
    pid: u32,
    pidfd: Option<OwnedFd>,
    fds: Vec<OwnedFd>,
}

type Programs = Arc<Mutex<HashMap<u64, Kept>>>;

/// Hold programs until `stop`.
///
/// # Errors
/// If it cannot listen.
pub fn serve(options: &KeeperOptions, stop: &AtomicBool, ready: impl FnOnce()) -> io::Result<()> {
    raise_descriptor_limit();
    let stopping = Arc::new(AtomicBool::new(false));
    let mut agents = Vec::new();
    let listener = listen_at(&options.socket)?;
    ready();
    while !stop.load(Relaxed) {
        if !wait_readable(&[&listener], TICK)? {
            continue;
        }
        let Some((socket, pid)) = accept_own(&listener)? else {
            continue;
        };
        let (grace, stopping) = (options.grace, Arc::clone(&stopping));
        let spawned = std::thread::Builder::new()
            .name(format!("agent-{pid}"))
            .spawn(move || hold(&socket, grace, &stopping));
        match spawned {
            Ok(thread) => agents.push(thread),
            Err(error) => tracing::error!(%error, "an agent's programs cannot be held"),
        }
        agents.retain(|thread: &JoinHandle<()>| !thread.is_finished());
    }
    // Programs that no agent serves are ended before their descriptors close.
    stopping.store(true, Relaxed);
    for thread in agents {
        if thread.join().is_err() {
            tracing::error!("a thread that held programs has panicked");
        }
    }
    let _ = std::fs::remove_file(&options.socket);
    Ok(())
}

/// Hold what one agent gives, until it has gone and the grace time is over.
fn hold(socket: &OwnedFd, grace: Duration, stopping: &AtomicBool) {
    let programs = Programs::default();
    while listen_to(socket, &programs) {
        if stopping.load(Relaxed) {
            // The agent lives and has descriptors of its own.
            return;
        }
    }
    let mut programs = std::mem::take(&mut *programs.lock().unwrap_or_else(PoisonError::into_inner));
    let deadline = Instant::now() + grace;
    if !programs.is_empty() {
        tracing::warn!(programs = programs.len(), ?grace, "the agent is gone; its programs wait");
    }
    while !programs.is_empty() && Instant::now() < deadline && !stopping.load(Relaxed) {
        std::thread::sleep(TICK);
        programs.retain(|_, kept| kept.is_alive());
    }
    for kept in programs.values() {
        kept.end();
    }
    // Only now may descriptors close: nobody is left to read zeros. Those of programs that could not be ended stay open.
    let deadline = Instant::now() + grace;
    while programs.values().any(Kept::is_alive) && Instant::now() < deadline {
        std::thread::sleep(TICK);
    }
    programs.drain().filter(|(_, kept)| kept.is_alive()).for_each(|(_, kept)| std::mem::forget(kept));
}

/// One message of the agent; false when it has gone.
fn listen_to(socket: &OwnedFd, programs: &Programs) -> bool {
    if !wait_readable(&[socket], TICK).unwrap_or(true) {
        return true;
    }
    match receive_frame(socket) {
        Ok((Frame::Put(put), fds)) => {
            let mut programs = programs.lock().unwrap_or_else(PoisonError::into_inner);
            if programs.len() < PROGRAMS_MAX {
                programs.entry(put.program).or_default().add(put, fds);
            }
            true
        }
        Ok((Frame::Drop(program), _)) => {
            programs.lock().unwrap_or_else(PoisonError::into_inner).remove(&program);
            true
        }
        Err(AttachError::System(error)) if error.kind() == io::ErrorKind::WouldBlock => true,
        Ok((frame, _)) => {
            tracing::warn!(?frame, "the agent said something that is not for a keeper");
            true
        }
        Err(AttachError::Frame(error)) => {
            tracing::warn!(%error, "the agent said something unintelligible");
            true
        }
        Err(_) => false,
    }
}

impl Kept {
    fn add(&mut self, put: Put, fds: Vec<OwnedFd>) {
        if put.pid != 0 {
            self.pid = put.pid;
            let pid = i32::try_from(put.pid).ok().and_then(Pid::from_raw);
            self.pidfd = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        }
        self.fds.extend(fds);
    }

    /// Unknown processes count as alive: their memory may be.
    fn is_alive(&self) -> bool {
        match &self.pidfd {
            Some(pidfd) => !wait_readable(&[pidfd], Duration::ZERO).unwrap_or(true),
            None => self.pid == 0,
        }
    }

    fn end(&self) {
        let Some(pidfd) = &self.pidfd else { return };
        tracing::error!(pid = self.pid, "ended: the agent did not come back for it");
        if let Err(error) = pidfd_send_signal(pidfd, Signal::KILL) {
            tracing::debug!(%error, pid = self.pid, "it had ended already");
        }
    }
}

/// What the agent gave, kept so that a new keeper can be given it too.
#[derive(Debug, Default)]
struct Given {
    pid: u32,
    fds: Vec<OwnedFd>,
}

/// The agent's connection to the keeper.
#[derive(Debug)]
pub struct KeeperPort {
    path: PathBuf,
    state: Mutex<(OwnedFd, HashMap<u64, Given>)>,
}

impl KeeperPort {
    /// Connect.
    ///
    /// # Errors
    /// If there is no keeper: without one no program can be served safely.
    pub fn connect(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), state: Mutex::new((connect_to(path)?, HashMap::new())) })
    }

    /// Give the keeper descriptors of a program.
    pub fn keep(&self, program: u64, pid: u32, fds: &[BorrowedFd<'_>]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let given = state.1.entry(program).or_default();
        given.pid = if pid == 0 { given.pid } else { pid };
        given.fds.extend(fds.iter().filter_map(|fd| fd.try_clone_to_owned().ok()));
        let frame = Frame::Put(Put { program, pid });
        if send_frame(&state.0, &frame, fds).is_err() {
            self.give_all_again(&mut state);
        }
    }

    /// A program has ended.
    pub fn unkeep(&self, program: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.1.remove(&program);
        if send_frame(&state.0, &Frame::Drop(program), &[]).is_err() {
            self.give_all_again(&mut state);
        }
    }

    /// If the keeper has died and another is there, give it everything.
    pub fn refresh(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if wait_readable(&[&state.0], Duration::ZERO).unwrap_or(true) {
            self.give_all_again(&mut state);
        }
    }

    fn give_all_again(&self, state: &mut (OwnedFd, HashMap<u64, Given>)) {
        let Ok(socket) = connect_to(&self.path) else {
            tracing::error!("the keeper is gone: should the agent die too, its programs would be in danger");
            return;
        };
        state.0 = socket;
        for (program, given) in &state.1 {
            let fds: Vec<_> = given.fds.iter().take(4).map(AsFd::as_fd).collect();
            if let Err(error) =
                send_frame(&state.0, &Frame::Put(Put { program: *program, pid: given.pid }), &fds)
            {
                tracing::error!(%error, "the new keeper is gone too");
            }
        }
    }
}
