//! One thread that notices the end of each program.
//!
//! A program has ended when the socket of its worker hangs up, after `exit`, `exec` or death.
//! Before a program has a worker, its pidfd reports the end.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::event::epoll;

use super::program::Program;

const EVENTS_MAX: usize = 64;

/// Notifies monitors that their programs have ended.
#[derive(Debug)]
pub(crate) struct ProgramExitWatcher {
    epoll: OwnedFd,
    programs: Mutex<HashMap<u64, Weak<Program>>>,
}

impl ProgramExitWatcher {
    /// Starts the thread, which ends with the process.
    pub(crate) fn start() -> io::Result<Arc<Self>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watcher = Arc::new(Self { epoll, programs: Mutex::new(HashMap::new()) });
        let for_thread = Arc::clone(&watcher);
        std::thread::Builder::new().name("exit-watcher".into()).spawn(move || for_thread.run())?;
        Ok(watcher)
    }

    /// Marks `program` as ended when `fd` becomes readable.
    pub(crate) fn watch(&self, program: &Arc<Program>, fd: impl AsFd) {
        self.lock().insert(program.id, Arc::downgrade(program));
        let data = epoll::EventData::new_u64(program.id);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
        if let Err(error) = epoll::add(&self.epoll, fd, data, flags) {
            let pid = program.pid();
            tracing::error!(%error, pid, "cannot watch for the end of a program; it counts as ended");
            program.mark_exited();
        }
    }

    /// Stops watching a program that is no longer served.
    pub(crate) fn unwatch(&self, program: u64) {
        self.lock().remove(&program);
    }

    fn run(&self) {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot wait for the end of programs any more");
                    return;
                }
            }
            for event in &events {
                let program = self.lock().get(&event.data.u64()).and_then(Weak::upgrade);
                if let Some(program) = program {
                    program.mark_exited();
                }
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Weak<Program>>> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
