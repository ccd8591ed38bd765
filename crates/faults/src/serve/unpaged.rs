//! Finds processes of runs that are not paged, because they have executed a program without the
//! shim.
//!
//! A process belongs to the run of its next ancestor that has started one or is paged in one. It is
//! paged if the shim is in its memory map: the shim ends a process that it cannot attach.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use aquifer_channel::kill::kill_as;
use aquifer_report::UnpagedProcess;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::PagingService;
use super::run::Run;
use super::stat;

/// A process that has no shim for so long gets none: the dynamic linker loads it at once.
const LOADING_TIME: Duration = Duration::from_millis(500);
/// Shortest time between two looks at all processes,
const INTERVAL_MIN: Duration = Duration::from_millis(500);
/// and the time as a multiple of what a look has taken.
const INTERVAL_FACTOR: u32 = 100;
/// Most such processes of a run that are reported.
const PER_RUN_MAX: usize = 16;
/// Most ancestors of a process.
const GENERATIONS_MAX: usize = 64;
/// The libraries by which a process is paged.
const LIBRARIES: [&str; 3] = ["/libaquifer_shim.so", "/libaquifer-malloc.so", "/libaquifer_malloc.so"];

const STATE_AT: usize = 0;
const PARENT_AT: usize = 1;
const START_AT: usize = 19;
const STACK_AT: usize = 25;
const AT_BASE: u64 = 7;
const AT_SECURE: u64 = 23;

/// Watches the processes of a tenant's new run.
pub(super) fn announce_run(service: &Arc<PagingService>, tenant: u32) {
    let weak = Arc::downgrade(service);
    if let Err(error) = service.unpaged_watches.wake(tenant, move || watch(&weak, tenant)) {
        tracing::error!(%error, tenant, "cannot watch for processes that are not paged");
    }
}

/// The loop of a tenant's thread, which ends when the tenant has no run.
fn watch(service: &Weak<PagingService>, tenant: u32) {
    let mut seen = HashMap::new();
    while let Some(service) = service.upgrade() {
        let began = Instant::now();
        let runs = service.runs_of(tenant);
        if runs.is_empty() && service.unpaged_watches.ends(tenant, || service.runs_of(tenant).is_empty()) {
            return;
        }
        drop(service);
        look(&runs, &mut seen);
        drop(runs);
        std::thread::park_timeout(INTERVAL_MIN.max(began.elapsed() * INTERVAL_FACTOR));
    }
}

/// A program that a process executes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Image {
    process: u32,
    /// When the process was started, in clock ticks.
    start: u64,
    /// The address of its stack, which is another one after each `execve`.
    stack: u64,
}

/// What is known of an image.
#[derive(Clone, Debug)]
enum Verdict {
    Paged,
    /// It has no shim, and was first seen then.
    Loading(Instant),
    Unpaged(UnpagedProcess),
}

fn look(runs: &[Arc<Run>], seen: &mut HashMap<Image, Verdict>) {
    let processes = all_processes();
    let mut roots = HashMap::new();
    for (number, run) in runs.iter().enumerate() {
        let programs = run.programs();
        let owner = run.owner_process();
        // A program that pages only its own heap watches over its children itself.
        if owner.is_some_and(|owner| programs.iter().any(|program| program.pid() == owner)) {
            continue;
        }
        roots.extend(owner.map(|owner| (owner, number)));
        roots.extend(programs.iter().map(|program| (program.pid(), number)).filter(|(pid, _)| *pid != 0));
    }
    let owners: HashSet<u32> = runs.iter().filter_map(|run| run.owner_process()).collect();
    let mut unpaged = vec![Vec::new(); runs.len()];
    let mut alive = HashSet::new();
    for (process, (image, _)) in &processes {
        let Some(run) = run_of(*process, &processes, &roots).filter(|_| !owners.contains(process)) else {
            continue;
        };
        alive.insert(*image);
        let verdict = seen.entry(*image).or_insert_with(|| Verdict::Loading(Instant::now()));
        if let Verdict::Loading(since) = *verdict {
            *verdict = judge(*process, since);
            if let Verdict::Unpaged(found) = verdict {
                report(&runs[run], found);
            }
        }
        if let Verdict::Unpaged(found) = verdict {
            unpaged[run].push(found.clone());
        }
    }
    seen.retain(|image, _| alive.contains(image));
    for (run, mut unpaged) in runs.iter().zip(unpaged) {
        unpaged.sort_by_key(|process: &UnpagedProcess| process.pid);
        unpaged.truncate(PER_RUN_MAX);
        run.set_unpaged(unpaged);
    }
}

type Processes = HashMap<u32, (Image, u32)>;

/// All processes, with their images and parents.
fn all_processes() -> Processes {
    let Ok(folders) = fs::read_dir("/proc") else { return HashMap::new() };
    let numbers = folders.flatten().filter_map(|folder| folder.file_name().to_str()?.parse().ok());
    numbers.filter_map(|process| Some((process, read_image(process)?))).collect()
}

/// The image and the parent of a process that has not ended.
fn read_image(process: u32) -> Option<(Image, u32)> {
    let text = fs::read(format!("/proc/{process}/stat")).ok()?;
    if matches!(stat::word(&text, STATE_AT)?, "Z" | "X") {
        return None;
    }
    let number = |at| stat::field(&text, at);
    let image = Image { process, start: number(START_AT)?, stack: number(STACK_AT)? };
    Some((image, u32::try_from(number(PARENT_AT)?).ok()?))
}

/// The run to which a process belongs, by its place.
fn run_of(mut process: u32, processes: &Processes, roots: &HashMap<u32, usize>) -> Option<usize> {
    for _ in 0..GENERATIONS_MAX {
        if let Some(run) = roots.get(&process) {
            return Some(*run);
        }
        process = processes.get(&process)?.1;
    }
    None
}

/// Whether a process is paged that was seen first without the shim, or may still load it.
fn judge(process: u32, since: Instant) -> Verdict {
    let maps = fs::read(format!("/proc/{process}/maps"));
    let text = maps.as_ref().map(|maps| String::from_utf8_lossy(maps)).unwrap_or_default();
    if LIBRARIES.iter().any(|library| text.contains(library)) {
        return Verdict::Paged;
    }
    // One that ends has no map any more.
    if since.elapsed() < LOADING_TIME || maps.is_ok() && text.is_empty() {
        return Verdict::Loading(since);
    }
    let name = fs::read(format!("/proc/{process}/comm")).unwrap_or_default();
    Verdict::Unpaged(UnpagedProcess {
        pid: process,
        name: String::from_utf8_lossy(&name).trim_end().chars().filter(|c| !c.is_control()).collect(),
        reason: reason(process, maps.is_ok().then_some(&*text)).to_owned(),
    })
}

/// Why a process has no shim; `maps` is its memory map, if it can be read.
fn reason(process: u32, maps: Option<&str>) -> &'static str {
    let auxiliary = fs::read(format!("/proc/{process}/auxv")).unwrap_or_default();
    let value = |wanted| auxiliary_value(&auxiliary, wanted);
    match maps {
        None => "it has rights that its user does not have, so that no library is loaded into it",
        Some(_) if value(AT_SECURE).is_some_and(|secure| secure != 0) => {
            "it has rights that its user does not have, so that no library is loaded into it"
        }
        Some(_) if value(AT_BASE) == Some(0) => {
            "it is statically linked; aquifer run --swap pages it, as root"
        }
        Some(maps) if maps.contains("/ld-musl") => {
            "it uses another C library than glibc; aquifer run --swap pages it, as root"
        }
        Some(_) => "LD_PRELOAD was removed or replaced, as env -i, sudo and wrappers do",
    }
}

/// A value of the auxiliary vector.
fn auxiliary_value(vector: &[u8], wanted: u64) -> Option<u64> {
    let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("8 bytes"));
    let mut entries = vector.chunks_exact(16).map(|entry| (word(&entry[..8]), word(&entry[8..])));
    entries.find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
}

/// Tells the owner of the run, and ends the run if it is strict.
fn report(run: &Run, found: &UnpagedProcess) {
    let UnpagedProcess { pid, name, reason } = found;
    tracing::warn!(pid, name, reason, "a process of a run is not paged");
    if !run.is_strict() {
        run.notify_owner(&format!("process {pid} ({name}) is not paged: {reason}"));
        return;
    }
    run.end(&format!("process {pid} ({name}) is not paged, and --strict forbids that: {reason}"));
    let killed = i32::try_from(*pid).ok().and_then(Pid::from_raw).map(|pid| {
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        kill_as(run.tenant(), pidfd.as_fd())
    });
    if let Some(Err(error)) = killed {
        tracing::warn!(%error, pid, "cannot end a process that is not paged");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_belongs_to_the_run_of_its_next_ancestor() {
        let image = |process| Image { process, start: 1, stack: 2 };
        let parents = [(1, 0), (10, 1), (20, 10), (30, 20), (40, 1)];
        let processes = parents.into_iter().map(|(pid, parent)| (pid, (image(pid), parent))).collect();
        let roots = HashMap::from([(10, 0), (20, 1)]);
        let runs = [1, 10, 20, 30, 40, 50].map(|process| run_of(process, &processes, &roots));
        assert_eq!(runs, [None, Some(0), Some(1), Some(1), None, None]);
    }

    #[test]
    fn a_process_without_the_shim_is_unpaged_after_a_while() {
        let own = std::process::id();
        let (image, parent) = read_image(own).unwrap();
        assert_eq!((image.process, parent), (own, std::os::unix::process::parent_id()));
        assert!(all_processes().contains_key(&own));
        assert!(matches!(judge(own, Instant::now()), Verdict::Loading(_)));
        let Some(earlier) = Instant::now().checked_sub(LOADING_TIME) else { return };
        let Verdict::Unpaged(found) = judge(own, earlier) else { panic!("it has no shim") };
        assert_eq!(found.pid, own);
        assert!(found.reason.contains("LD_PRELOAD"), "{found:?}");
    }

    #[test]
    fn values_of_the_auxiliary_vector_are_found() {
        let words = [3u64, 77, AT_BASE, 0, AT_SECURE, 1, 0, 0];
        let vector: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(
            [3, AT_BASE, AT_SECURE, 9].map(|kind| auxiliary_value(&vector, kind)),
            [Some(77), Some(0), Some(1), None]
        );
    }
}
