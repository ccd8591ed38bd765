//! Wakes a faulting thread on its monitor's core.
//!
//! The scheduler would rather wake it on an idle core: a migration, and from then on two wake-ups across cores for each fault. So it
//! may run on no other core just while it is woken. It waits all that time, and we keep that core: it cannot notice. Should we lose the
//! core all the same, it may have run, and what it made then has inherited its narrow set of cores: that is looked for and widened.
//! Should the agent die just then, the next one finds in the journal whom to give its cores back.

use std::fs;

use rustix::param::clock_ticks_per_second;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

use super::priority::{KeptCore, times_switched};
use super::stat::{PARENT, START_TICKS, field};
use crate::journal::{CoreBits, Held, Journal};

/// Wake `thread`, of `process`, by `wake` so that it goes on on `core`, where the calling thread is.
pub(super) fn hold_while<T>(
    journal: &Journal,
    process: u32,
    thread: u32,
    core: usize,
    wake: impl FnOnce() -> T,
) -> T {
    let Some(pid) = as_pid(thread) else { return wake() };
    let is_wide = |set: &CpuSet| set.count() > 1 && set.is_set(core);
    let Some(allowed) = sched_getaffinity(Some(pid)).ok().filter(is_wide) else {
        return wake();
    };
    let Some(kept) = KeptCore::keep() else { return wake() };
    let held = Held {
        thread,
        core: u32::try_from(core).expect("cores are few"),
        since_ticks: now_ticks(),
        cores: bits_of(&allowed),
    };
    journal.hold(&held);
    let switched = times_switched();
    let is_held = sched_setaffinity(Some(pid), &only(core)).is_ok();
    let result = wake();
    if is_held && let Err(error) = sched_setaffinity(Some(pid), &allowed) {
        tracing::debug!(%error, thread, "the thread has ended");
    }
    let is_lost = times_switched() != switched;
    drop(kept);
    if is_lost && may_have_been_made(held.since_ticks) {
        widen_children(process, &held);
    }
    journal.let_go();
    result
}

/// The agent that held a thread of `process` has died: it has its cores again, and so has what it made.
pub(super) fn release(process: u32, held: &Held) {
    widen(process, held, |thread| thread == held.thread);
    widen_children(process, held);
}

/// A set of one core.
pub(super) fn only(core: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(core);
    set
}

fn bits_of(set: &CpuSet) -> CoreBits {
    let mut bits = CoreBits::default();
    let mut cores = set.count();
    for core in 0..CpuSet::MAX_CPU {
        if cores == 0 {
            break;
        }
        if set.is_set(core) {
            bits[core / 64] |= 1 << (core % 64);
            cores -= 1;
        }
    }
    bits
}

fn set_of(bits: &CoreBits) -> CpuSet {
    let mut set = CpuSet::new();
    (0..CpuSet::MAX_CPU)
        .filter(|core| bits[core / 64] >> (core % 64) & 1 == 1)
        .for_each(|core| set.set(core));
    set
}

fn as_pid(thread: u32) -> Option<Pid> {
    i32::try_from(thread).ok().and_then(Pid::from_raw)
}

/// Clock ticks since the machine began, as `/proc` has them.
fn now_ticks() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let hz = clock_ticks_per_second();
    now.tv_sec.unsigned_abs() * hz + now.tv_nsec.unsigned_abs() * hz / 1_000_000_000
}

/// Whether the newest thread of all began in this tick or later, as far as can be told. Almost always none did, and this is quick to see.
fn may_have_been_made(since: u64) -> bool {
    let newest = fs::read_to_string("/proc/loadavg")
        .ok()
        .and_then(|text| text.split_ascii_whitespace().last()?.parse::<u32>().ok())
        .and_then(start_ticks);
    newest.is_none_or(|start| start >= since)
}

fn start_ticks(thread: u32) -> Option<u64> {
    field(&fs::read(format!("/proc/{thread}/stat")).ok()?, START_TICKS)
}

/// Give the threads and children that were made by a thread of `process` since it is held its cores, if they may run on its one core alone.
fn widen_children(process: u32, held: &Held) {
    let is_new = |thread: u32| start_ticks(thread).is_some_and(|start| start >= held.since_ticks);
    let children = numbers("/proc").filter(|pid| is_child(*pid, process, held.since_ticks));
    children.chain([process]).for_each(|process| widen(process, held, is_new));
}

fn widen(process: u32, held: &Held, which: impl Fn(u32) -> bool) {
    let narrow = only(held.core as usize);
    let threads = numbers(&format!("/proc/{process}/task")).filter(|thread| which(*thread));
    for thread in threads.filter_map(as_pid) {
        if sched_getaffinity(Some(thread)).is_ok_and(|set| set == narrow)
            && let Err(error) = sched_setaffinity(Some(thread), &set_of(&held.cores))
        {
            tracing::debug!(%error, ?thread, "the thread has ended");
        }
    }
}

fn is_child(pid: u32, process: u32, since: u64) -> bool {
    let Ok(stat) = fs::read(format!("/proc/{pid}/stat")) else { return false };
    field(&stat, PARENT) == Some(process.into())
        && field(&stat, START_TICKS).is_some_and(|start| start >= since)
}

/// The entries of a directory that are numbers.
fn numbers(directory: &str) -> impl Iterator<Item = u32> + use<> {
    let entries = fs::read_dir(directory).ok().into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
    use std::thread;

    use super::*;

    /// One test at a time: to each of them the others' children are its own process's.
    fn own_cores() -> (MutexGuard<'static, ()>, CpuSet) {
        static ONE: Mutex<()> = Mutex::new(());
        (ONE.lock().unwrap_or_else(PoisonError::into_inner), sched_getaffinity(None).unwrap())
    }

    fn cores_of(thread: u32) -> CpuSet {
        sched_getaffinity(as_pid(thread)).unwrap()
    }

    fn own_number() -> u32 {
        rustix::thread::gettid().as_raw_pid().unsigned_abs()
    }

    /// A process that does nothing, until it is dropped.
    struct Sleeper(Child);

    impl Sleeper {
        fn start() -> Self {
            Self(
                Command::new("sleep")
                    .arg("1000")
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .unwrap(),
            )
        }

        fn number(&self) -> u32 {
            self.0.id()
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    /// A thread that waits, and makes a thread and a process as soon as it goes on.
    struct Maker {
        number: u32,
        go: mpsc::Sender<()>,
        made: mpsc::Receiver<(u32, Sleeper)>,
        end: mpsc::Sender<()>,
    }

    impl Maker {
        fn start() -> Self {
            let (go, gone) = mpsc::channel();
            let (making, made) = mpsc::channel();
            let (numbering, number) = mpsc::channel();
            let (end, ended) = mpsc::channel::<()>();
            thread::spawn(move || {
                numbering.send(own_number()).unwrap();
                gone.recv().unwrap();
                let child = Sleeper::start();
                let made = thread::spawn(move || {
                    making.send((own_number(), child)).unwrap();
                    let _ = ended.recv();
                });
                made.join().unwrap();
            });
            Self { number: number.recv().unwrap(), go, made, end }
        }
    }

    #[test]
    fn a_thread_that_runs_meanwhile_and_all_it_makes_keep_their_cores() {
        let (_one, cores) = own_cores();
        if cores.count() < 2 {
            return;
        }
        let core = (0..CpuSet::MAX_CPU).find(|core| cores.is_set(*core)).unwrap();
        let journal = Journal::new().unwrap();
        let maker = Maker::start();
        let pinned = Sleeper::start();
        sched_setaffinity(as_pid(pinned.number()), &only(core)).unwrap();
        // It is an old child when the other begins: a tick lasts 10 ms, and the kernel tells no closer.
        let before = now_ticks();
        while now_ticks() == before {
            std::hint::spin_loop();
        }

        let (made, child) = hold_while(&journal, std::process::id(), maker.number, core, || {
            maker.go.send(()).unwrap();
            let made = maker.made.recv().unwrap();
            // The test can fail: both inherited the narrow set.
            assert!(cores_of(made.0) == only(core));
            assert!(cores_of(made.1.number()) == only(core));
            made
        });
        assert!(cores_of(made) == cores, "the thread that was made");
        assert!(cores_of(child.number()) == cores, "the process that was made");
        assert!(cores_of(pinned.number()) == only(core), "a child that somebody pinned before");
        maker.end.send(()).unwrap();
    }

    #[test]
    fn whom_a_dead_agent_held_has_its_cores_again() {
        let (_one, cores) = own_cores();
        let core = (0..CpuSet::MAX_CPU).find(|core| cores.is_set(*core)).unwrap();
        let [held, other] = [Sleeper::start(), Sleeper::start()];
        for sleeper in [&held, &other] {
            sched_setaffinity(as_pid(sleeper.number()), &only(core)).unwrap();
        }
        let process = held.number();
        let journal = Journal::new().unwrap();
        let bits = bits_of(&cores);
        assert!(set_of(&bits) == cores);
        journal.hold(&Held {
            thread: process,
            core: u32::try_from(core).unwrap(),
            since_ticks: u64::MAX,
            cores: bits,
        });
        let fd = journal.memory().fd().try_clone_to_owned().unwrap();
        let (journal, left) = Journal::recover(aquifer_pager::Memory::whole(fd).unwrap()).unwrap();
        release(process, &left.held.unwrap());
        journal.let_go();
        assert!(cores_of(held.number()) == cores);
        assert!(cores_of(other.number()) == only(core));
    }

    #[test]
    fn what_may_run_on_one_core_only_or_has_ended_is_left_alone() {
        let (_one, cores) = own_cores();
        let core = (0..CpuSet::MAX_CPU).find(|core| cores.is_set(*core)).unwrap();
        let journal = Journal::new().unwrap();
        let child = Sleeper::start();
        sched_setaffinity(as_pid(child.number()), &only(core)).unwrap();
        assert_eq!(hold_while(&journal, child.number(), child.number(), core, || 7), 7);
        assert!(cores_of(child.number()) == only(core));
        let number = child.number();
        drop(child);
        assert_eq!(hold_while(&journal, number, number, core, || 8), 8);
    }
}
