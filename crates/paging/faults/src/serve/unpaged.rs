//! Detection of processes of runs that are not paged, because they have executed a program without
//! the shim.
//!
//! A process belongs to the run of its nearest ancestor that has opened a run or is paged in one.
//! It is paged if the shim is in its memory map: the shim ends a process that it cannot attach.
//!
//! For a process outside of the tenant's runs, this reads only `/proc/PID/status`. Opening other
//! files can make the kernel wait for the process, for ever if it is hostile.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use aquifer_channel::kill::kill_as;
use aquifer_report::UnpagedProcess;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::PagingService;
use super::run::Run;
use super::stat;

/// Time after which a process that has loaded neither the shim nor libc will load no shim.
const LOADING_TIME: Duration = Duration::from_secs(10);
/// Minimum time between two checks of all processes.
const INTERVAL_MIN: Duration = Duration::from_millis(500);
/// Minimum time between two checks, as a multiple of the duration of a check.
const INTERVAL_FACTOR: u32 = 100;
/// Maximum number of unpaged processes of a run that are reported.
const PER_RUN_MAX: usize = 16;
/// Maximum number of ancestors of a process that are checked.
const GENERATIONS_MAX: usize = 64;
/// The libraries that page a process. The dynamic linker loads them before all others.
const LIBRARIES: [&str; 3] = ["/libaquifer_shim.so", "/libaquifer-malloc.so", "/libaquifer_malloc.so"];

/// The C library, whose presence shows that the dynamic linker has begun with the other libraries.
const LIBC: [&str; 2] = ["/libc.so.6", "/libc-2."];
/// Number of bytes of a memory map that are searched at once.
const MAPS_PIECE_BYTES: usize = 1 << 16;
/// Maximum number of pieces of one map: 64 MiB.
const MAPS_PIECES_MAX: usize = 1024;
/// Overlap of two pieces in bytes: more than the length of any name that is searched for.
const NAME_BYTES_MAX: usize = 32;
const AT_BASE: u64 = 7;
const AT_SECURE: u64 = 23;

/// Starts to watch the processes of a tenant's new run.
pub(super) fn announce_run(service: &Arc<PagingService>, tenant: u32) {
    let weak = Arc::downgrade(service);
    if let Err(error) = service.unpaged_watches.wake(tenant, move || watch(&weak, tenant)) {
        tracing::error!(%error, tenant, "cannot watch for processes that are not paged");
    }
}

/// The loop of a tenant's thread, which ends when the tenant has no run.
fn watch(service: &Weak<PagingService>, tenant: u32) {
    let mut known = KnownProcesses::default();
    while let Some(service) = service.upgrade() {
        let began = Instant::now();
        let runs = service.runs_of(tenant);
        if runs.is_empty() && service.unpaged_watches.ends(tenant, || service.runs_of(tenant).is_empty()) {
            return;
        }
        drop(service);
        check(&runs, &mut known);
        drop(runs);
        std::thread::park_timeout(INTERVAL_MIN.max(began.elapsed() * INTERVAL_FACTOR));
    }
}

/// A program that a process executes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Image {
    process: u32,
    /// The start time of the process, in clock ticks.
    start: u64,
    /// The addresses of the code and of the stack, which change at each `execve`.
    place: [u64; 3],
}

/// The results of earlier checks of a user's runs.
#[derive(Debug, Default)]
struct KnownProcesses {
    images: HashMap<Image, Verdict>,
    /// The names and reasons that were reported to the owner of each run, by the number of the run.
    reported: HashMap<u64, HashSet<(String, String)>>,
}

/// The result of the checks of an image.
#[derive(Clone, Debug)]
enum Verdict {
    /// The process is paged.
    Paged,
    /// The process has not loaded the shim yet. The time is that of the first check.
    Loading(Instant),
    /// The process is not paged.
    Unpaged(UnpagedProcess),
}

/// Checks all processes of a user's runs.
fn check(runs: &[Arc<Run>], known: &mut KnownProcesses) {
    let parents = all_parents();
    let owners: HashSet<u32> = runs.iter().filter_map(|run| run.living_owner()).collect();
    // A child of the owner that has not executed its program yet has the same image.
    let owner_places: HashSet<[u64; 3]> =
        owners.iter().filter_map(|owner| Some(read_image(*owner)?.place)).collect();
    let roots = roots(runs);
    let mut unpaged = vec![Vec::new(); runs.len()];
    let mut alive = HashSet::new();
    for (process, Parent { is_stopped, is_first_dead, .. }) in &parents {
        let Some(run) = run_of(*process, &parents, &roots) else { continue };
        if owners.contains(process) {
            continue;
        }
        let Some(image) = read_image(*process).filter(|image| !owner_places.contains(&image.place)) else {
            continue;
        };
        alive.insert(image);
        let verdict = known.images.entry(image).or_insert_with(|| Verdict::Loading(Instant::now()));
        if let Verdict::Loading(since) = verdict
            && !is_stopped
        {
            *verdict = judge(*process, *is_first_dead, *since);
            if let Verdict::Unpaged(found) = verdict {
                report(&runs[run], image, found, known.reported.entry(runs[run].id()).or_default());
            }
        }
        if let Verdict::Unpaged(found) = verdict {
            unpaged[run].push(found.clone());
        }
    }
    known.images.retain(|image, _| alive.contains(image));
    known.reported.retain(|id, _| runs.iter().any(|run| run.id() == *id));
    for (run, mut unpaged) in runs.iter().zip(unpaged) {
        unpaged.sort_by_key(|process: &UnpagedProcess| process.pid);
        unpaged.truncate(PER_RUN_MAX);
        run.set_unpaged(unpaged);
    }
}

/// Returns the living processes whose descendants belong to a run, with the index of the run.
fn roots(runs: &[Arc<Run>]) -> HashMap<u32, usize> {
    let mut roots = HashMap::new();
    for (number, run) in runs.iter().enumerate() {
        let programs: Vec<u32> =
            run.programs().iter().filter_map(|program| program.living_process()).collect();
        let owner = run.living_owner();
        // If a program has opened its run itself, only its own heap is paged, and no descendant.
        if owner.is_some_and(|owner| programs.contains(&owner)) {
            continue;
        }
        roots.extend(owner.into_iter().chain(programs).map(|process| (process, number)));
    }
    roots
}

type Parents = HashMap<u32, Parent>;

/// The parent and the state of a process that has not ended.
#[derive(Debug)]
struct Parent {
    parent: u32,
    /// Whether a signal or a tracer has stopped the process, so that it may load its libraries
    /// later.
    is_stopped: bool,
    /// Whether the first thread has ended, and others have not.
    is_first_dead: bool,
}

/// Returns the parents of all processes that have not ended.
fn all_parents() -> Parents {
    let Ok(folders) = fs::read_dir("/proc") else { return HashMap::new() };
    let numbers = folders.flatten().filter_map(|folder| folder.file_name().to_str()?.parse().ok());
    numbers.filter_map(|number| Some((number, read_parent(number)?))).collect()
}

fn read_parent(number: u32) -> Option<Parent> {
    let text = fs::read(format!("/proc/{number}/status")).ok()?;
    parent_in(&String::from_utf8_lossy(&text))
}

/// Parses the text of `/proc/PID/status`. Returns `None` if the process has ended; a process whose
/// first thread alone has ended still lives.
fn parent_in(status: &str) -> Option<Parent> {
    let word = |name| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_whitespace().next())
    };
    let state = word("State:")?;
    let threads: u32 = word("Threads:")?.parse().ok()?;
    let is_alive = state != "X" && (state != "Z" || threads > 1);
    let parent = word("PPid:")?.parse().ok()?;
    let (is_stopped, is_first_dead) = (matches!(state, "T" | "t"), state == "Z");
    is_alive.then_some(Parent { parent, is_stopped, is_first_dead })
}

/// Reads the image of a process.
fn read_image(number: u32) -> Option<Image> {
    let text = fs::read(format!("/proc/{number}/stat")).ok()?;
    let mut place = [0; 3];
    for (value, at) in place.iter_mut().zip(stat::CODE_AND_STACK) {
        *value = stat::field(&text, at)?;
    }
    Some(Image { process: number, start: stat::field(&text, stat::START)?, place })
}

/// Returns the index of the run to which a process belongs.
fn run_of(mut process: u32, processes: &Parents, roots: &HashMap<u32, usize>) -> Option<usize> {
    for _ in 0..GENERATIONS_MAX {
        if let Some(run) = roots.get(&process) {
            return Some(*run);
        }
        process = processes.get(&process)?.parent;
    }
    None
}

/// Determines whether a process is paged. `since`: the time of its first check.
fn judge(process: u32, is_first_dead: bool, since: Instant) -> Verdict {
    // A thread that has ended has no memory.
    let thread = if is_first_dead { living_thread(process) } else { Some(process) };
    let Some(thread) = thread else { return Verdict::Loading(since) };
    let folder = format!("/proc/{process}/task/{thread}");
    let loaded = match File::open(format!("{folder}/maps")).and_then(Loaded::find_in) {
        Ok(loaded) => loaded,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Verdict::Unpaged(unpaged(process, OTHER_RIGHTS));
        }
        // The process has ended.
        Err(_) => return Verdict::Loading(since),
    };
    if loaded.shim {
        return Verdict::Paged;
    }
    let auxiliary = fs::read(format!("{folder}/auxv")).unwrap_or_default();
    let is_linker = || is_dynamic_linker(&fs::read_link(format!("{folder}/exe")).unwrap_or_default());
    match reason(loaded, &auxiliary, is_linker) {
        Some(reason) => Verdict::Unpaged(unpaged(process, reason)),
        None if since.elapsed() > LOADING_TIME && loaded.anything && !loaded.is_cut => {
            Verdict::Unpaged(unpaged(process, PRELOAD_REMOVED))
        }
        None => Verdict::Loading(since),
    }
}

/// Returns a thread of a process that has not ended.
fn living_thread(process: u32) -> Option<u32> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).ok()?.flatten();
    let numbers = threads.filter_map(|thread| thread.file_name().to_str()?.parse().ok());
    numbers.into_iter().find(|thread| {
        let status = fs::read_to_string(format!("/proc/{process}/task/{thread}/status"));
        status.is_ok_and(|status| status.lines().any(|line| line.starts_with("VmSize:")))
    })
}

/// The libraries that were found in a memory map.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Loaded {
    /// Whether the map is not empty.
    anything: bool,
    /// Whether the map is too long, and may have more libraries.
    is_cut: bool,
    shim: bool,
    libc: bool,
    musl: bool,
}

impl Loaded {
    /// Searches the text of `/proc/PID/maps` in pieces, because a program can make a path in it as
    /// long as it wants.
    fn find_in(mut maps: impl Read) -> io::Result<Self> {
        let (mut found, mut piece, mut kept) = (Self::default(), vec![0; MAPS_PIECE_BYTES], 0);
        for _ in 0..MAPS_PIECES_MAX {
            let length = maps.read(&mut piece[kept..])?;
            if length == 0 {
                return Ok(found);
            }
            let end = kept + length;
            found.search(&String::from_utf8_lossy(&piece[..end]));
            // A name may continue in the next piece.
            kept = end.min(NAME_BYTES_MAX);
            piece.copy_within(end - kept..end, 0);
        }
        Ok(Self { is_cut: true, ..found })
    }

    fn search(&mut self, text: &str) {
        let has = |names: &[&str]| names.iter().any(|name| text.contains(name));
        self.anything = true;
        self.shim |= has(&LIBRARIES);
        self.libc |= has(&LIBC);
        self.musl |= has(&["/ld-musl"]);
    }
}

/// Whether a program is the system's dynamic linker, which has no linker itself and loads the
/// program that its arguments name.
fn is_dynamic_linker(program: &Path) -> bool {
    let name = program.file_name().unwrap_or_default().as_encoded_bytes();
    let is_of_system =
        ["/lib", "/lib64", "/usr/lib", "/usr/lib64"].iter().any(|folder| program.starts_with(folder));
    is_of_system && (name.starts_with(b"ld-") || name.starts_with(b"ld.so"))
}

fn unpaged(process: u32, reason: &str) -> UnpagedProcess {
    let name = fs::read(format!("/proc/{process}/comm")).unwrap_or_default();
    let name = String::from_utf8_lossy(&name).trim_end().chars().filter(|c| !c.is_control()).collect();
    UnpagedProcess { pid: process, name, reason: reason.to_owned() }
}

const OTHER_RIGHTS: &str = "it has rights that its user does not have, so that no library is loaded into it";
const PRELOAD_REMOVED: &str = "LD_PRELOAD was removed or replaced, as env -i, sudo and wrappers do";

/// Returns the reason why a process without the shim will not load it; `None` if it still may.
/// `loaded`: the libraries of the process. `auxiliary`: its auxiliary vector.
fn reason(loaded: Loaded, auxiliary: &[u8], is_linker: impl FnOnce() -> bool) -> Option<&'static str> {
    let value = |wanted| auxiliary_value(auxiliary, wanted);
    if value(AT_SECURE).is_some_and(|secure| secure != 0) {
        Some(OTHER_RIGHTS)
    } else if value(AT_BASE) == Some(0) && !is_linker() {
        Some("it is statically linked; aquifer run --swap pages it, as root")
    } else if loaded.musl {
        Some("it uses another C library than glibc; aquifer run --swap pages it, as root")
    } else {
        (loaded.libc && !loaded.is_cut).then_some(PRELOAD_REMOVED)
    }
}

/// Returns a value of the auxiliary vector.
fn auxiliary_value(vector: &[u8], wanted: u64) -> Option<u64> {
    let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("8 bytes"));
    let mut entries = vector.chunks_exact(16).map(|entry| (word(&entry[..8]), word(&entry[8..])));
    entries.find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
}

/// Reports an unpaged process to the owner of the run, once for each name and reason. Ends the run
/// if it is strict.
fn report(run: &Run, image: Image, found: &UnpagedProcess, reported: &mut HashSet<(String, String)>) {
    let UnpagedProcess { pid, name, reason } = found;
    if run.is_strict() {
        run.end(&format!("process {pid} ({name}) is not paged, and --strict forbids that: {reason}"));
        if let Err(error) = kill(image, run.tenant()) {
            tracing::warn!(%error, pid, "cannot end a process that is not paged");
        }
    } else if reported.len() < PER_RUN_MAX && reported.insert((name.clone(), reason.clone())) {
        tracing::info!(pid, name, reason, "a process of a run is not paged");
        run.notify_owner(&format!("process {pid} ({name}) is not paged: {reason}"));
    }
}

/// Kills the process of an image with the permissions of a user.
fn kill(image: Image, user: u32) -> std::io::Result<()> {
    let number = i32::try_from(image.process).ok().and_then(Pid::from_raw);
    let pidfd = pidfd_open(number.ok_or(std::io::ErrorKind::NotFound)?, PidfdFlags::empty())?;
    // The pidfd may be that of another process that reuses the number. It is not if the process
    // still has the image.
    match read_image(image.process) {
        Some(found) if found == image => kill_as(user, pidfd.as_fd()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_belongs_to_the_run_of_its_next_ancestor() {
        let process = |number, parent| (number, Parent { parent, is_stopped: false, is_first_dead: false });
        let parents = [(1, 0), (10, 1), (20, 10), (30, 20), (40, 1)];
        let processes = parents.into_iter().map(|(number, parent)| process(number, parent)).collect();
        let roots = HashMap::from([(10, 0), (20, 1)]);
        let runs = [1, 10, 20, 30, 40, 50].map(|process| run_of(process, &processes, &roots));
        assert_eq!(runs, [None, Some(0), Some(1), Some(1), None, None]);
    }

    #[test]
    fn a_process_with_libc_and_without_the_shim_is_unpaged() {
        let own = std::process::id();
        assert_eq!(read_image(own).unwrap().process, own);
        assert_eq!(all_parents()[&own].parent, std::os::unix::process::parent_id());
        assert_eq!(living_thread(own).map(|_| ()), Some(()));
        let Verdict::Unpaged(found) = judge(own, false, Instant::now()) else { panic!("it has no shim") };
        assert_eq!((found.pid, found.reason.as_str()), (own, PRELOAD_REMOVED));
    }

    #[test]
    fn a_process_that_may_still_load_the_shim_is_not_reported() {
        let vector = |base: u64, secure: u64| -> Vec<u8> {
            [AT_BASE, base, AT_SECURE, secure].iter().flat_map(|word| word.to_ne_bytes()).collect()
        };
        let reason = |loaded, base, secure| reason(loaded, &vector(base, secure), || false);
        let linker = Loaded { anything: true, ..Loaded::default() };
        assert_eq!(reason(linker, 7, 0), None, "it may be loading");
        assert_eq!(super::reason(Loaded::default(), &[], || false), None, "it is ending");
        assert_eq!(reason(Loaded { libc: true, ..linker }, 7, 0), Some(PRELOAD_REMOVED));
        assert_eq!(reason(linker, 7, 1), Some(OTHER_RIGHTS));
        assert!(reason(linker, 0, 0).is_some_and(|why| why.contains("statically")));
        assert_eq!(super::reason(linker, &vector(0, 0), || true), None, "it loads another program");
        assert!(
            reason(Loaded { musl: true, ..linker }, 7, 0)
                .is_some_and(|why| why.contains("another C library"))
        );
        assert!(is_dynamic_linker("/lib64/ld-linux-x86-64.so.2".as_ref()));
        assert!(!is_dynamic_linker("/bin/sh".as_ref()) && !is_dynamic_linker("/tmp/ld-x".as_ref()));
        let cut = Loaded { is_cut: true, libc: true, ..linker };
        assert_eq!(reason(cut, 7, 0), None, "the shim may be behind the cut");
        assert!(reason(cut, 0, 0).is_some());
    }

    #[test]
    fn libraries_are_found_in_a_map_of_any_length() {
        let line = |path: &str| format!("7f0000000000-7f0000100000 r-xp 0 00:00 7 {path}\n");
        let long = line(&format!("/{}", "x".repeat(100_000)));
        let find = |text: String| Loaded::find_in(text.as_bytes());
        assert_eq!(find(String::new()).unwrap(), Loaded::default());
        // Each name goes over the end of a piece once.
        for before in 0..NAME_BYTES_MAX + 40 {
            let padding = "x".repeat(MAPS_PIECE_BYTES - before);
            let found = find(format!("{padding}{}{}", line("/a/libaquifer_shim.so"), line("/lib/libc.so.6")));
            let found = found.unwrap();
            assert!(found.shim && found.libc && !found.musl, "{before}: {found:?}");
        }
        let endless = long.repeat(MAPS_PIECES_MAX * MAPS_PIECE_BYTES / long.len() + 2);
        assert!(find(endless).unwrap().is_cut);
    }

    #[test]
    fn a_process_lives_as_long_as_one_of_its_threads() {
        let status =
            |state: &str, threads| format!("Name:\tx\nState:\t{state}\nPPid:\t7\nThreads:\t{threads}\n");
        assert!(parent_in(&status("Z (zombie)", 1)).is_none());
        assert!(
            parent_in(&status("Z (zombie)", 2)).is_some_and(|found| found.is_first_dead && found.parent == 7)
        );
        assert!(parent_in(&status("T (stopped)", 1)).is_some_and(|found| found.is_stopped));
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
