//! A real allocator as a peer of figures 18 and 19: a process with this allocator preloaded
//! allocates the objects of a trace by malloc, and prints its memory.

use std::path::Path;
use std::process::Command;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::random::Random;
use parking_lot::Mutex;

use super::traces::{TRACES, Trace, TraceHeap};

/// Steps of a trace that the threads carry out concurrently.
const STEPS_AT_ONCE: usize = 1024;
/// Time for an allocator to compact after a trace. Mesh does so when memory is freed, ten times a
/// second at most.
const COMPACTION_TIME: Duration = Duration::from_secs(2);
/// Interval of samples of the resident memory during that time.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);

/// The order of the process: `TRACE:THREADS`, such as `2:8`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Play {
    trace: Trace,
    threads: u16,
}

impl FromStr for Play {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str = "it is not TRACE:THREADS, such as 2:8";
        let (trace, threads) = text.split_once(':').ok_or(WRONG)?;
        let number: usize = trace.parse().map_err(|_| WRONG)?;
        let trace = *number.checked_sub(1).and_then(|at| TRACES.get(at)).ok_or(WRONG)?;
        let threads = threads.parse().ok().filter(|threads| (1..=64).contains(threads)).ok_or(WRONG)?;
        Ok(Self { trace, threads })
    }
}

/// Bytes that a process uses for the objects of trace `number`, 1 to 3, with this allocator.
///
/// # Errors
/// If the process cannot be run with the allocator.
pub fn measure(library: &Path, number: usize, threads: u16) -> Result<f64, BenchError> {
    let own = std::env::current_exe().map_err(BenchError::io("find the program of", library))?;
    let mut command = Command::new(own);
    command.args(["objects", "--play", &format!("{number}:{threads}")]).env("LD_PRELOAD", library);
    let output = command.output().map_err(BenchError::io("run a process with", library))?;
    let (printed, message) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // The dynamic linker ignores a library that it cannot load.
    let is_loaded = output.status.success() && !message.contains("cannot be preloaded");
    let bytes = printed.trim().parse().ok().filter(|_| is_loaded);
    bytes.ok_or_else(|| BenchError::Program {
        program: "the process that plays a trace of Redis".into(),
        context: format!("with {}", library.display()),
        status: output.status.to_string(),
        message: message.trim().to_owned(),
    })
}

/// Plays a trace with this process's own allocator. Returns the memory of the objects in bytes.
///
/// # Errors
/// If the system does not report the memory.
pub fn play(play: Play) -> Result<u64, BenchError> {
    let mut recorder = Recorder { random: Random::new(18), threads: play.threads, ..Recorder::default() };
    play.trace.play(&mut recorder);
    let Recorder { steps, bytes, .. } = recorder;
    let objects: Arc<Vec<Object>> = Arc::new(bytes.iter().map(|_| Object::default()).collect());
    let (steps, bytes) = (Arc::new(steps), Arc::new(bytes));
    let (done, finished) = channel();
    let threads: Vec<_> = (0..play.threads)
        .map(|thread| {
            let (sender, turns) = channel();
            let (steps, objects, bytes) = (Arc::clone(&steps), Arc::clone(&objects), Arc::clone(&bytes));
            let done = done.clone();
            std::thread::spawn(move || make_steps(thread, &turns, &steps, &objects, &bytes, &done));
            sender
        })
        .collect();
    drop(done);
    let before = resident_bytes()?;
    for first in (0..steps.len()).step_by(STEPS_AT_ONCE) {
        for thread in &threads {
            let _ = thread.send(first);
        }
        for _ in &threads {
            finished.recv().expect("no thread ends before the trace");
        }
    }
    let until = Instant::now() + COMPACTION_TIME;
    let mut least = u64::MAX;
    while Instant::now() < until {
        // Allocators may compact at a free.
        drop(std::hint::black_box(vec![1_u8; 150]));
        least = least.min(resident_bytes()?);
        std::thread::sleep(SAMPLE_INTERVAL);
    }
    Ok(least.saturating_sub(before))
}

/// An object that a thread has allocated. Allocated and freed by different threads.
type Object = Mutex<Option<Box<[u8]>>>;

/// A step of a trace, with the number of the object.
#[derive(Clone, Copy, Debug)]
enum Step {
    Allocate(u32),
    Free(u32),
}

/// Records the steps of a trace, and the random thread that carries out each (§4.4.3).
#[derive(Debug)]
struct Recorder {
    steps: Vec<(u16, Step)>,
    /// The size of each object, and the part of the trace in which it is allocated.
    bytes: Vec<u32>,
    /// Where each object is allocated.
    born: Vec<usize>,
    /// Objects that are freed after the current part, because another thread allocates them in it.
    late: Vec<u32>,
    random: Random,
    threads: u16,
}

impl Default for Recorder {
    fn default() -> Self {
        Self {
            steps: Vec::new(),
            bytes: Vec::new(),
            born: Vec::new(),
            late: Vec::new(),
            random: Random::new(0),
            threads: 1,
        }
    }
}

impl Recorder {
    fn step(&mut self, step: Step) {
        if self.steps.len().is_multiple_of(STEPS_AT_ONCE) {
            for object in std::mem::take(&mut self.late) {
                self.push(Step::Free(object));
            }
        }
        self.push(step);
    }

    fn push(&mut self, step: Step) {
        let thread = u16::try_from(self.random.word_below(u64::from(self.threads))).expect("small");
        self.steps.push((thread, step));
    }
}

impl TraceHeap for Recorder {
    type Object = u32;

    fn allocate(&mut self, bytes: u32) -> u32 {
        let number = u32::try_from(self.bytes.len()).expect("traces are short");
        self.bytes.push(bytes);
        self.step(Step::Allocate(number));
        self.born.push((self.steps.len() - 1) / STEPS_AT_ONCE);
        number
    }

    fn free(&mut self, object: u32) {
        if self.born[object as usize] == self.steps.len() / STEPS_AT_ONCE {
            self.late.push(object);
        } else {
            self.step(Step::Free(object));
        }
    }
}

/// Carries out the steps of one thread, a part of the trace at a time.
fn make_steps(
    thread: u16,
    turns: &Receiver<usize>,
    steps: &[(u16, Step)],
    objects: &[Object],
    bytes: &[u32],
    done: &Sender<()>,
) {
    for first in turns {
        let part = &steps[first..steps.len().min(first + STEPS_AT_ONCE)];
        for (_, step) in part.iter().filter(|(of, _)| *of == thread) {
            let (object, value) = match *step {
                Step::Allocate(object) => {
                    (object, Some(vec![1; bytes[object as usize] as usize].into_boxed_slice()))
                }
                Step::Free(object) => (object, None),
            };
            *objects[object as usize].lock() = value;
        }
        let _ = done.send(());
    }
}

/// The process's share of resident memory: pages that are mapped twice count once.
fn resident_bytes() -> Result<u64, BenchError> {
    let path = Path::new("/proc/self/smaps_rollup");
    let text = std::fs::read_to_string(path).map_err(BenchError::io("read", path))?;
    let kib =
        text.lines().find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.parse().ok());
    let missing = || BenchError::io("find Pss in", path)(std::io::ErrorKind::InvalidData.into());
    kib.map(|kib: u64| kib * 1024).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_freed_in_a_later_part_than_it_is_allocated() {
        let mut recorder = Recorder { random: Random::new(1), threads: 4, ..Recorder::default() };
        Trace::Cache.play(&mut recorder);
        let mut live = vec![None; recorder.bytes.len()];
        let mut frees = 0;
        for (at, (_, step)) in recorder.steps.iter().enumerate() {
            match *step {
                Step::Allocate(object) => live[object as usize] = Some(at / STEPS_AT_ONCE),
                Step::Free(object) => {
                    let born = live[object as usize].take().expect("it is allocated");
                    assert!(born < at / STEPS_AT_ONCE);
                    frees += 1;
                }
            }
        }
        assert!(frees > 100_000, "{frees}");
    }

    #[test]
    fn a_trace_takes_at_least_the_memory_of_its_objects() {
        let bytes = play(Play { trace: Trace::Removal, threads: 2 }).expect("Linux says so");
        let live = 5 * (160 << 10) + 25_000 * 158;
        assert!(bytes >= live && bytes < 10 * live, "{bytes} of {live}");
    }
}
