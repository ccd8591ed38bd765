//! The thread that looks after the memory: clears it between tenants, and lends more or less.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::clearer::Clearer;
use crate::keeping::Kept;
use crate::own::{OwnError, OwnPool};
use crate::resizer::Resizer;
use crate::shutdown::Shutdown;

/// How often to look.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The thread. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Caretaker {
    stop: Shutdown,
    thread: Option<JoinHandle<()>>,
}

impl Caretaker {
    /// Start it.
    pub fn start(
        own: OwnPool,
        clearer: Clearer,
        resizer: Resizer,
        kept: Option<Arc<Kept>>,
    ) -> std::io::Result<Self> {
        let stop = Shutdown::new();
        let duties = Duties { own, clearer, resizer, kept, failing: BTreeSet::new() };
        let asked = stop.clone();
        let thread =
            std::thread::Builder::new().name("caretaker".into()).spawn(move || duties.run(&asked))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Caretaker {
    fn drop(&mut self) {
        self.stop.request();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            debug_assert!(ended.is_ok(), "the thread that looks after the memory panicked");
        }
    }
}

struct Duties {
    own: OwnPool,
    clearer: Clearer,
    resizer: Resizer,
    kept: Option<Arc<Kept>>,
    /// What failed when it was tried last.
    failing: BTreeSet<&'static str>,
}

impl Duties {
    fn run(mut self, stop: &Shutdown) {
        let mut pause = LOOK_EVERY;
        while !stop.wait(pause) {
            pause = LOOK_EVERY;
            if let Some(kept) = &self.kept {
                kept.refresh();
            }
            // What was under way when the connection broke is set right at once, and not when there is something to do next.
            let connected = if self.own.is_broken() { self.own.connect().map(drop) } else { Ok(()) };
            let is_connected = self.note("the node does not reach its own memory", connected);
            // It says so if that is what holds it up.
            let resized = self.resizer.look(&mut self.own, stop);
            self.note("the node does not lend as much as it was asked to", resized);
            if !is_connected {
                continue;
            }
            let cleared = self.clearer.look(&mut self.own, stop);
            if let Ok(false) = cleared {
                pause = Duration::ZERO;
            }
            self.note("memory that was given back is not cleared for other users", cleared.map(drop));
        }
    }

    /// Whether it went well. If not it is told, once in a row, and the connection is given up.
    fn note(&mut self, failure: &'static str, outcome: Result<(), OwnError>) -> bool {
        match &outcome {
            Ok(()) => {
                self.failing.remove(failure);
            }
            Err(error) => {
                self.own.give_up();
                if self.failing.insert(failure) {
                    tracing::warn!(%error, "{failure}; trying again");
                }
            }
        }
        outcome.is_ok()
    }
}
