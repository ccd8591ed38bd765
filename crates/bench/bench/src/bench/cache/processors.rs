//! The processors that the load and the servers run on.

use aquifer_bench::BenchError;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The processors of a bench: the first one is for the load.
#[derive(Clone, Copy, Debug)]
pub struct Processors {
    all: CpuSet,
    load: CpuSet,
    servers: CpuSet,
}

/// Where a server runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// On one processor that the load does not use.
    Own,
    /// On all processors.
    All,
}

impl Processors {
    /// The processors of this thread. If there is only one, servers share it with the load.
    ///
    /// # Errors
    /// If the system call fails.
    pub fn find() -> Result<Self, BenchError> {
        let all = sched_getaffinity(None).map_err(failed)?;
        let mut numbers = (0..CpuSet::MAX_CPU).filter(|number| all.is_set(*number));
        let first = numbers.next().unwrap_or(0);
        let second = numbers.next().unwrap_or(first);
        Ok(Self { all, load: only(first), servers: only(second) })
    }

    /// Whether servers have a processor of their own.
    pub fn are_separate(&self) -> bool {
        self.load != self.servers
    }

    /// Pins this thread to the load's processor.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn pin_load(&self) -> Result<(), BenchError> {
        sched_setaffinity(None, &self.load).map_err(failed)
    }

    /// Calls `start` in a thread on the processors of a server, which a new process inherits.
    ///
    /// # Errors
    /// Those of `start`, or if the system refuses.
    pub fn start_on<T: Send>(
        &self,
        place: Place,
        start: impl FnOnce() -> Result<T, BenchError> + Send,
    ) -> Result<T, BenchError> {
        let set = match place {
            Place::Own => self.servers,
            Place::All => self.all,
        };
        std::thread::scope(|scope| {
            let starter = scope.spawn(move || {
                sched_setaffinity(None, &set).map_err(failed)?;
                start()
            });
            starter.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

fn only(number: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(number);
    set
}

fn failed(error: rustix::io::Errno) -> BenchError {
    BenchError::io("pin threads by", std::path::Path::new("sched_setaffinity"))(error.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_starting_thread_is_on_the_servers_processor() {
        let before = sched_getaffinity(None).unwrap();
        let processors = Processors::find().unwrap();
        let own = processors.start_on(Place::Own, || sched_getaffinity(None).map_err(failed)).unwrap();
        assert_eq!((own, own.count()), (processors.servers, 1));
        let all = processors.start_on(Place::All, || sched_getaffinity(None).map_err(failed)).unwrap();
        assert_eq!((all, sched_getaffinity(None).unwrap()), (before, before));
        assert_eq!(processors.are_separate(), before.count() > 1);
    }
}
