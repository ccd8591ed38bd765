//! Lower bounds without segments: the time to move a mapping, and the bandwidth of READs.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_fabric::tcp::{self, ConnectOptions, TcpOptions, TcpTarget};
use aquifer_fabric::{
    Access, ClusterKey, Host, Identity, LocalSlice, Memory, RemoteAddr, Scope, Target, Tenant, Verb, Work,
};
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, munmap};

use super::player::segment_error;

const PAGE_BYTES: u32 = 4096;
/// READs in flight at once, as many as the agent has.
const PAGES_AT_ONCE: u64 = 64;
const MOVES: usize = 21;

/// The median time to move a mapping of `bytes` bytes, in µs.
///
/// # Errors
/// If the system refuses.
pub fn move_us(bytes: usize) -> io::Result<f64> {
    let mut times = Vec::new();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at addresses that the system selects, which nothing refers to.
    let mut start = unsafe {
        mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::SHARED | MapFlags::NORESERVE)?
    };
    for _ in 0..MOVES {
        // SAFETY: another new mapping.
        let place = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let began = Instant::now();
        // SAFETY: both mappings are this function's, as long as that, and nothing refers to them.
        start = unsafe { rustix::mm::mremap_fixed(start, bytes, bytes, MremapFlags::MAYMOVE, place)? };
        times.push(began.elapsed().as_secs_f64() * 1e6);
    }
    // SAFETY: the mapping is this function's.
    unsafe { munmap(start, bytes)? };
    times.sort_by(f64::total_cmp);
    Ok(times[MOVES / 2])
}

/// The bandwidth of READs of pages over TCP, in MiB/s.
///
/// # Errors
/// If the fabric fails.
pub fn read_mib_s(bytes: u64) -> Result<f64, BenchError> {
    let key = ClusterKey([3; 32]);
    let local = "127.0.0.1:0".parse().expect("it is an address");
    let target = TcpTarget::listen(local, &key, TcpOptions::default()).map_err(segment_error)?;
    let len = usize::try_from(bytes).map_err(segment_error)?;
    let create = |name| Memory::create(name, len).map(Arc::new).map_err(segment_error);
    let (from, into) = (create("aquifer-bench-from")?, create("aquifer-bench-into")?);
    // Pages that exist at both ends.
    for at in (0..len).step_by(PAGE_BYTES as usize) {
        from.write(at, &[1]);
        into.write(at, &[2]);
    }
    let region = target.register(from, Access::READ, Scope::Anyone).map_err(segment_error)?;
    let who = Identity { tenant: Tenant(0), host: Host(1), epoch: 1 };
    let mut endpoint =
        tcp::connect(target.address(), &key, who, ConnectOptions::default()).map_err(segment_error)?;
    let into = endpoint.register_local(into).map_err(segment_error)?;
    let began = Instant::now();
    let pages: Vec<u64> = (0..bytes / u64::from(PAGE_BYTES)).collect();
    for batch in pages.chunks(usize::try_from(PAGES_AT_ONCE).expect("small")) {
        let work = |page: &u64| {
            let offset = page * u64::from(PAGE_BYTES);
            let local = LocalSlice { key: into, offset, len: PAGE_BYTES };
            let remote = RemoteAddr { addr: region.base + offset, key: region.key };
            Work { id: *page, verb: Verb::Read { local, remote }, signalled: true }
        };
        endpoint.post(&batch.iter().map(work).collect::<Vec<_>>()).map_err(segment_error)?;
        let (mut done, mut completions) = (0, Vec::new());
        while done < batch.len() {
            completions.clear();
            if endpoint.poll(&mut completions, batch.len()) == 0 {
                endpoint.wait(Duration::from_millis(20));
            }
            for completion in &completions {
                completion.outcome.map_err(segment_error)?;
            }
            done += completions.len();
        }
    }
    Ok(float(bytes) / f64::from(1 << 20) / began.elapsed().as_secs_f64())
}
