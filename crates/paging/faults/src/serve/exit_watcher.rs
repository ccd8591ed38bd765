//! One thread that detects the end of each program.
//!
//! A program has ended when the socket of its worker hangs up: the worker ends when no other
//! process has the memory. The pidfd reports the end of a program that has no worker yet, or whose
//! worker cannot detect it.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::event::epoll;

use super::program::Program;

const EVENTS_MAX: usize = 64;

/// The process whose end is watched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WatchedEnd {
    /// The program's process, by its pidfd. Another process may have its memory.
    Process,
    /// The program's worker, by the socket.
    Worker,
}

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

    /// Notifies `program` when `fd` becomes readable.
    pub(crate) fn watch(&self, program: &Arc<Program>, what: WatchedEnd, fd: impl AsFd) {
        self.programs.lock().insert(program.id, Arc::downgrade(program));
        let data = epoll::EventData::new_u64(program.id << 1 | u64::from(what == WatchedEnd::Worker));
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
        if let Err(error) = epoll::add(&self.epoll, fd, data, flags) {
            let pid = program.pid();
            tracing::error!(%error, pid, "cannot watch for the end of a program; it counts as ended");
            program.mark_exited();
        }
    }

    /// Stops watching a program that is no longer served.
    pub(crate) fn unwatch(&self, program: u64) {
        self.programs.lock().remove(&program);
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
                let (id, is_worker) = (event.data.u64() >> 1, event.data.u64() & 1 == 1);
                let program = self.programs.lock().get(&id).and_then(Weak::upgrade);
                match program {
                    Some(program) if is_worker => program.mark_exited(),
                    Some(program) => program.mark_process_ended(),
                    None => {}
                }
            }
        }
    }
}
