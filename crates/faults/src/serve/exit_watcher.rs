//! One thread hears of every program's end, so that monitors need not listen for it.
//!
//! A program ends when its worker's socket hangs up (`exit`, `exec` and death alike), or, before it has a worker, when its pidfd
//! says so.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::event::epoll;

use super::program::Program;

const EVENTS_MAX: usize = 64;

/// Tells monitors that their programs have ended.
#[derive(Debug)]
pub(crate) struct ProgramExitWatcher {
    epoll: OwnedFd,
    programs: Mutex<HashMap<u64, Weak<Program>>>,
}

impl ProgramExitWatcher {
    /// Start the thread. It ends with the process.
    pub(crate) fn start() -> io::Result<Arc<Self>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let exit_watcher = Arc::new(Self { epoll, programs: Mutex::new(HashMap::new()) });
        let for_thread = Arc::clone(&exit_watcher);
        std::thread::Builder::new().name("exit_watcher".into()).spawn(move || for_thread.listen())?;
        Ok(exit_watcher)
    }

    /// Tell `program` when `fd` says anything: nothing is ever said there but the end.
    pub(crate) fn watch(&self, program: &Arc<Program>, fd: impl AsFd) {
        self.lock().insert(program.id, Arc::downgrade(program));
        let data = epoll::EventData::new_u64(program.id);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
        if let Err(error) = epoll::add(&self.epoll, fd, data, flags) {
            tracing::error!(%error, pid = program.pid(), "a program's end would go unnoticed; it is taken for ended");
            program.mark_exited();
        }
    }

    /// The program is no longer served.
    pub(crate) fn forget(&self, program: u64) {
        self.lock().remove(&program);
    }

    fn listen(&self) {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the ends of programs cannot be heard any more");
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
